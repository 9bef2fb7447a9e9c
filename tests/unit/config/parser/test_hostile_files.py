"""Unusual and malicious input files: each is refused at once with a short message."""

import os
import time

import pytest
import yaml

from megatron_packed.config.errors import MOST_SHOWN, Problem, format_problems
from megatron_packed.config.parser.parse import parse, parse_or_exit, parse_with_sources
from megatron_packed.config.parser.text_file import MOST_BYTES, read_text_file
from megatron_packed.config.value_checks import MOST_VALUES
from support.command_lines import argv_of, problems_of

NAMED_BY = ["--config {}", "@{}", "--data-args-path {}", "--per-split-data-args-path {}"]


def refused(right, words: str) -> str:
    change = "~--data-path" if "data-args" in words else ""
    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(argv_of(right, f"{change} {words}"))
    assert ended.value.code == 2
    assert time.monotonic() - begun < 10
    return words


@pytest.mark.timeout(60)
@pytest.mark.parametrize("named_by", NAMED_BY)
@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("pipe", "it is a pipe or a device"),
        ("/dev/zero", "it is a pipe or a device"),
        (".", "it is a directory"),
        ("sparse", "it is larger than"),
        ("absent", "No such file"),
        ("bytes", "not UTF-8 text"),
    ],
)
def test_what_is_no_small_file_is_refused_at_once(
    right, tmp_path, capsys, named_by, file, rule
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "sparse", "wb") as sparse:
        sparse.truncate(2**40)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    refused(right, named_by.format(file))
    said = capsys.readouterr().err
    assert said.startswith("1 problem ") and rule in said and f"{named_by.format(file)}\n" in said


def test_a_link_to_a_file_is_a_file(right, tmp_path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfseed: 5\r\nbf16: true\r\n")
    (tmp_path / "link.yaml").symlink_to("run.yaml")
    training = parse([*argv_of(right), "--config", "link.yaml"]).training
    assert (training.seed, training.bf16) == (5, True)
    assert read_text_file(str(tmp_path / "link.yaml")) == "seed: 5\nbf16: true\n"


def aliases(lines: int) -> str:
    """Return YAML with aliases in which each line has ten times as many values as the line before."""
    return "a0: &a0 [x]\n" + "".join(
        f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(lines)
    )


def merges(lines: int) -> str:
    return "a0: &a0 {x: 1}\n" + "".join(
        f"a{i + 1}: &a{i + 1} {{<<: [{', '.join([f'*a{i}'] * 10)}]}}\n" for i in range(lines)
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (
            "--config bomb",
            aliases(8) + "fp8-format: *a8\n",
            "found *a0, but aliases are not supported",
        ),
        (
            "--config bomb",
            aliases(8) + "train-data-path: *a8\n",
            "found *a0, but aliases are not supported",
        ),
        ("--config bomb", merges(8), "found *a0, but aliases are not supported"),
        ("--config bomb", "".join(f"key{i}: 1\n" for i in range(4000)), "and 3,980 more\n"),
        ("--config bomb", f"data-path: [{'x, ' * 60_000}]", "more than 10,000 keys and values"),
        ("--config bomb", "seed: " + "x" * 250_000, "must be a whole number"),
        ("--config bomb", "[" * 100_000, "is nested too deeply"),
        ("--config bomb", "seed: 0x" + "f" * 100_000, "a whole number of more than 300 digits"),
        ("--config bomb", "lr: " + "1" * 400, "a whole number of more than 300 digits"),
        ("@bomb", "--nonsense " * 20_000, "is not a flag"),
        ("@bomb", " ".join(f"--n{i}" for i in range(20_000)), "and 19,980 more\n"),
        ("@bomb", "--save-interval " + "1" * 250_000, "must fit into 32 bits"),
        (
            "@bomb",
            "--offload-modules " + " ".join(f"mlp{i}" for i in range(20_000)),
            "must be one of",
        ),
        (
            "@bomb",
            "--profile-ranks " + "0 " * 100_000,
            "has 100,000 values, but at most 20,000 are allowed",
        ),
        (
            "--data-args-path bomb",
            "a " * 400_000,
            "has 400,000 words, but at most 20,000 are allowed",
        ),
        ("--data-args-path bomb", "[" * 900_000, "has 900,000 characters"),
        (
            "--per-split-data-args-path bomb",
            '{"train": "' + "a " * 400_000 + '"}',
            "has 400,000 words",
        ),
        ("--per-split-data-args-path bomb", "[" * 900_000, "is not valid JSON"),
    ],
)
def test_a_bomb_is_a_short_sentence(right, tmp_path, capsys, words, text, said) -> None:
    (tmp_path / "bomb").write_text(text)
    refused(right, words)
    printed = capsys.readouterr().err
    assert said in printed and len(printed) < 12_000


@pytest.mark.timeout(60)
def test_files_that_name_others_many_times(right, tmp_path, capsys) -> None:
    for depth in range(6):
        (tmp_path / f"bomb{depth}").write_text(f"@bomb{depth + 1} " * 20)
    (tmp_path / "bomb6").write_text("--seed 1 ")
    refused(right, "@bomb0")
    assert "follows 256 KiB of other files, and no more is read" in capsys.readouterr().err
    names = [f"@part{number}" for number in range(200)]
    for name in names:
        (tmp_path / name[1:]).write_text("--seed 7")
    argv = argv_of(right)
    assert parse([*argv, *names]).training.seed == 7  # many small files are accepted


def test_limits_leave_room_for_what_people_write(right, tmp_path) -> None:
    paths = [f"data/{number:05}_text_document" for number in range(MOST_VALUES // 2)]
    (tmp_path / "paths").write_text(" ".join(f"1 {path}" for path in paths))
    argv = argv_of(right, "~--data-path")
    found = problems_of([*argv, "--data-args-path", "paths"])
    assert len(found) == MOST_VALUES // 2
    assert {problem.rule for problem in found} == {f"does not exist (looked in {tmp_path})"}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"data": {"tokenizer_special_tokens": ["x" * 20] * 5000}})
    )
    assert (tmp_path / "run.yaml").stat().st_size < MOST_BYTES
    found = problems_of([*argv, "--config", "run.yaml"])
    assert found and not any("YAML" in problem.rule for problem in found)


ESCAPE = "a\x1b[31mred\nb\u202e"


@pytest.mark.parametrize(
    "flag", ["--nonsense", "--load", "--train-data-path", "--tokenizer-model", "--chat-template"]
)
def test_control_characters_do_not_reach_the_screen(right, capsys, flag) -> None:
    for argv in (
        [flag, ESCAPE],
        [f"{flag}={ESCAPE}"],
        [f"--{ESCAPE}"],
        ["--seed", ESCAPE],
        [f"@{ESCAPE}"],
    ):
        with pytest.raises(SystemExit):
            parse_or_exit([*argv_of(right), *argv])
        said = capsys.readouterr().err
        assert "\\x1b[31mred\\nb\\u202e" in said.replace("\\\\", "\\")
        assert said.replace("\n", "").isprintable()


def test_nor_do_those_of_a_file_or_of_a_warning(right, tmp_path, capsys) -> None:
    (tmp_path / "run.yaml").write_text('"lr\\nnothing was wrong": 1\nsave: "\\e[31m"\n')
    argv = argv_of(right)
    with pytest.raises(SystemExit):
        parse_or_exit([*argv, "--config", "run.yaml"])
    said = capsys.readouterr().err
    assert "1. run.yaml:1 lr\\nnothing was wrong\n" in said and said.replace("\n", "").isprintable()
    parse_or_exit([*argv, "--save", ESCAPE, "--save", "b"])
    said = capsys.readouterr().err
    assert "--save a\\x1b[31mred" in said and said.count("\n") == 1
    long = parse_with_sources([*argv, "--log-jsonl", "x" * 10_000, "--log-jsonl", "y"])
    assert max(map(len, long.warnings)) < 400


def test_a_report_is_short_however_many_problems_there_are() -> None:
    problems = [
        Problem(f"--flag{i}", "v" * 10_000, "r" * 10_000, "c" * 10_000) for i in range(10_000)
    ]
    report = format_problems(problems)
    assert report.startswith("10,000 problems ") and report.endswith("     and 9,980 more\n")
    assert report.count("rule: ") == MOST_SHOWN and len(report) < 60_000
    assert "more" not in format_problems(problems[:MOST_SHOWN]).splitlines()[-1]
