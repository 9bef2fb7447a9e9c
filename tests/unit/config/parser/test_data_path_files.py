"""Files that name data: the values that they give, and the problems that are reported."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.data_path_files import (
    NamedData,
    read_data_args,
    read_per_split_data_args,
)
from megatron_packed.config.parser.parse import parse, parse_or_exit
from megatron_packed.config.sections.data import DataConfig
from support.command_lines import problems_of

LEAST = shlex.split(
    "--hybrid-layer-pattern - --hidden-size 8 --seq-length 8 --lr 1 --train-iters 1"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        Path(name).write_text("text")


def test_words_of_a_file() -> None:
    Path("words").write_bytes(b"\xef\xbb\xbf0.7 a\r\n\t0.3  b\n")
    assert read_data_args("words") == NamedData(train=("0.7", "a", "0.3", "b"))
    for content in (b"", b" \n", b"\xff\xfe"):
        Path("words").write_bytes(content)
        assert read_data_args("words").fault and not read_data_args("words").train
    assert read_data_args(".").fault and "No such file" in read_data_args("absent").fault


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"train": [0.70, "a", 3e-1, "b"]}', NamedData(("0.70", "a", "3e-1", "b"))),
        (
            '\ufeff{"test": "c d", "valid": null, "train": ["a b"]}',
            NamedData(("a b",), (), ("c", "d")),
        ),
        ('{"train": "a", "valid": ["1", "b"], "test": []}', NamedData(("a",), ("1", "b"))),
    ],
)
def test_splits_of_a_file(content: str, named: NamedData) -> None:
    Path("splits").write_text(content, encoding="utf-8")
    assert read_per_split_data_args("splits") == named


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a b", "is not valid JSON"),
        ("[" * 10**5, "is not valid JSON"),
        ('["a"]', "does not contain a JSON object"),
        ('{"train": ["a"], "train": ["b"]}', "'train' occurs twice"),
        ('{"train": ["a"], "validation": ["b"]}', "the key 'validation'"),
        ('{"train": ["a", true]}', "the data of 'train' as a list of words"),
        ('{"train": ["a"], "test": [""]}', "the data of 'test' as a list of words"),
        ('{"train": ["a"], "valid": {}}', "the data of 'valid' as a list of words"),
        ('{"valid": ["a"]}', "names no training data"),
        ('{"train": " "}', "names no training data"),
    ],
)
def test_a_file_that_names_no_splits(content: str, fault: str) -> None:
    Path("splits").write_text(content)
    named = read_per_split_data_args("splits")
    assert fault in named.fault and named[:3] == ((), (), ())
    (problem,) = problems_of([*LEAST, "--per-split-data-args-path", "splits"])
    assert problem.option == "--per-split-data-args-path" and fault in problem.rule


@pytest.mark.parametrize(
    ("splits", "flags", "rule"),
    [
        ({"train": "a absent"}, "", "--per-split-data-args-path absent: does not exist"),
        ({"train": "a", "test": "absent"}, "", "--per-split-data-args-path absent: does not exist"),
        ({"train": "a", "valid": "0 b 1 c"}, "", "the weight 0 must be more than 0"),
        ({"train": "a", "test": "b a"}, "", "is also training data, so it cannot test the model"),
        (
            {"train": "a", "valid": "1 a"},
            "",
            "is also training data, so it cannot validate the model",
        ),
        ({"train": "a"}, "--eval-interval 1", "there is no validation data"),
        ({"train": "a", "valid": "b"}, "--skip-train", "leaves nothing to do"),
        ({"train": "a"}, "--test-data-path b", "contradicts --per-split-data-args-path"),
        (
            {"train": "a"},
            "--valid-data-path b --eval-interval 1",
            "contradicts --per-split-data-args-path",
        ),
        ({"train": "a"}, "--data-path b", "both name the training data"),
        ({"train": "a"}, "--split 1,1,1", "contradicts --per-split-data-args-path"),
    ],
)
def test_problems_of_a_file_of_splits(splits: dict[str, str], flags: str, rule: str) -> None:
    Path("splits").write_text(json.dumps(splits))
    with pytest.raises(ConfigError, match=rule):
        parse([*LEAST, "--per-split-data-args-path", "splits", *flags.split()])


def test_what_a_file_names_is_used() -> None:
    Path("splits").write_text('{"train": ["3", "a", "1", "b"], "valid": "c", "test": "d"}')
    run = parse([*LEAST, "--per-split-data-args-path", "splits", "--eval-interval", "1"])
    assert run.validates and run.tests and run.data.train_blend.weights == (0.75, 0.25)
    assert (run.data.valid_blend.paths, run.data.test_blend.paths) == (("c",), ("d",))
    tested = parse([*LEAST, "--per-split-data-args-path", "splits"])
    assert (tested.validates, tested.tests) == (False, True)
    assert not parse([*LEAST, "--per-split-data-args-path", "splits", "--eval-iters", "0"]).tests
    Path("words").write_text("3 a\n1 b")
    assert parse([*LEAST, "--data-args-path", "words"]).data.train_blend == run.data.train_blend
    assert parse([*LEAST, "--data-path", "a", "--split", "8,1,1"]).tests
    Path("splits").unlink()
    assert run.data.train_paths == (
        "a",
        "b",
    )  # the file is read only once, when the run starts


def test_another_machine_may_lack_the_file() -> None:
    run = parse_or_exit(
        [*LEAST, "--data-args-path", "absent"], launched=False, on_this_machine=False
    )
    assert run.data.train_paths == () and run.data.named.fault
    with pytest.raises(ConfigError, match="--data-args-path absent"):
        parse([*LEAST, "--data-args-path", "absent"])
    assert DataConfig(data_path=("a",)).named == NamedData(("a",))
