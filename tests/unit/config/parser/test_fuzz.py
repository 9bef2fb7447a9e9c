"""Fuzz test of the parser: any input gives a configuration or a list of problems."""

import random

import yaml

from megatron_packed.config.errors import ConfigError
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


def outcome(run) -> str:
    try:
        run()
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.option
            assert problem.rule
            assert problem.cure
        return "refused"
    return "accepted"


def test_random_command_lines(right) -> None:
    rng, flags, outcomes = random.Random(5), sorted(known_flags()), []
    argv = argv_of(right)
    for _ in range(1500):
        words = list(argv)
        for _ in range(rng.randint(1, 4)):
            chosen = [rng.choice(flags), rng.choice(TEXTS), rng.choice(TEXTS)][: rng.randint(1, 3)]
            if chosen[0] != "--config" and rng.random() < 0.2:
                chosen = [f"{chosen[0]}={rng.choice(TEXTS)}"]
            at = rng.randint(0, len(words))
            words[at:at] = chosen
        outcomes.append(outcome(lambda words=words: parse(words, 1)))
    assert outcomes.count("refused") > 1000
    assert "accepted" in outcomes


def test_every_field_with_every_type_in_a_file_and_in_a_checkpoint(right, tmp_path) -> None:
    argv = argv_of(right)
    config = parse(argv, 1)
    for number, field in enumerate(every_field()):
        others = argv_of(right, f"~{field.flag}")
        for of_value, value in enumerate(VALUES):
            # Both readers check values with the same function, so each pair is tried with one.
            if (number + of_value) % 2:
                stored = to_dict(config)
                stored[field.section][field.name] = value
                outcome(lambda stored=stored: from_dict(stored))
            elif value != b"x":
                (tmp_path / "run.yaml").write_text(
                    yaml.safe_dump({field.section: {field.name: value}})
                )
                outcome(lambda others=others: parse([*others, "--config", "run.yaml"], 1))
