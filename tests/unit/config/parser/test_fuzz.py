"""Fuzz test of the parser: any input gives a configuration or a list of problems."""

import random
from itertools import zip_longest

import yaml

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.options import Field
from megatron_packed.config.parser.command_line import every_field, known_flags
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.serialise import from_dict, to_dict
from support.command_lines import argv_of

TEXTS = [
    "",
    "0",
    "-1",
    "1",
    "3",
    "1e400",
    "-0.0",
    "nan",
    "None",
    "true",
    "M*-E",
    "M|",
    "--",
    "---",
    "-",
    "=",
    "--=",
    "--x=",
    "@",
    "@.",
    "@/dev/null",
    "train.jsonl",
    "\0",
    "\ud800",
    "é" * 5000,
    "9" * 5000,
    "٣",
    " 7 ",
    "0x10",
    "a=b",
]
VALUES = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "1e-3",
    [],
    [1],
    {},
    {"a": 1},
    ["a", None],
    b"x",
    "M*-",
]


def refused(run) -> set[str]:
    """Return the options that a parser refuses, each with its rule and its cure."""
    try:
        run()
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.option
            assert problem.rule
            assert problem.cure
        return {problem.option for problem in error.problems}
    return set()


def test_random_command_lines(right) -> None:
    rng, flags, results = random.Random(5), sorted(known_flags()), []
    argv = argv_of(right)
    for _ in range(1500):
        words = list(argv)
        for _ in range(rng.randint(1, 4)):
            chosen = [rng.choice(flags), rng.choice(TEXTS), rng.choice(TEXTS)][: rng.randint(1, 3)]
            if chosen[0] != "--config" and rng.random() < 0.2:
                chosen = [f"{chosen[0]}={rng.choice(TEXTS)}"]
            at = rng.randint(0, len(words))
            words[at:at] = chosen
        results.append(bool(refused(lambda words=words: parse(words, 1))))
    assert results.count(True) > 1000
    assert False in results


def test_every_field_with_every_type_in_a_file_and_in_a_checkpoint(right, tmp_path) -> None:
    """Read a value for one field of each section at once; read each accepted value alone, too."""
    config = parse(argv_of(right), 1)
    sections: dict[str, list[tuple[int, Field]]] = {}
    for number, field in enumerate(every_field()):
        sections.setdefault(field.section, []).append((number, field))
    alone = 0

    def read(fields: list[Field], value: object, in_checkpoint: bool) -> set[str]:
        if in_checkpoint:
            stored = to_dict(config)
            for field in fields:
                stored[field.section][field.name] = value
            return refused(lambda: from_dict(stored))
        (tmp_path / "run.yaml").write_text(
            yaml.safe_dump({field.section: {field.name: value} for field in fields})
        )
        others = argv_of(right, " ".join(f"~{field.flag}" for field in fields))
        return refused(lambda: parse([*others, "--config", "run.yaml"], 1))

    for row in zip_longest(*sections.values()):
        for of_value, value in enumerate(VALUES):
            # Both readers check values with the same function, so each pair is tried with one.
            for in_checkpoint in (True, False):
                fields = [
                    field
                    for number, field in filter(None, row)
                    if (number + of_value) % 2 == in_checkpoint
                ]
                if not fields or (value == b"x" and not in_checkpoint):
                    continue
                known = read(fields, value, in_checkpoint)
                for field in fields:
                    if field.flag not in known:
                        alone += 1
                        read([field], value, in_checkpoint)
    assert alone > 500
