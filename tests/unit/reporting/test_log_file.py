"""Logs of other runs: a run continues its own log, sets an old one aside, or is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.config.errors import ConfigError
from megatron_packed.reporting import log_file
from megatron_packed.reporting.log_file import (
    Action,
    JsonlWriter,
    LogFile,
    OldLines,
    Origin,
    RunIdentity,
    action_for,
)

A, B = "/runs/a", "/runs/b"
MINE = RunIdentity("mine", A)
STEP_2 = Origin(iteration=2, consumed_tokens=200)


def lines(steps: int, **run: Any) -> bytes:
    """Return a log of ``steps`` steps of 100 tokens; the first line has the facts ``run``."""
    records: list[dict[str, Any]] = [
        {"iteration": step, "lm_loss": 1.0, "consumed_tokens": 100 * step}
        for step in range(1, steps + 1)
    ]
    if run:
        records[0]["run"] = run
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.mark.parametrize(
    ("old", "origin", "action"),
    [
        (lines(0), None, Action.CONTINUE),
        (b'{"iteration": 1, "lm_lo', None, Action.CONTINUE),  # nothing but a torn line
        (lines(5, id="mine", folder=A), STEP_2, Action.CONTINUE),
        (lines(5, id="mine", folder=None), STEP_2, Action.CONTINUE),
        (lines(5, id="mine", folder=B), STEP_2, Action.CONTINUE),  # the folder was moved
        (lines(5, id="other", folder=A), None, Action.SET_ASIDE),  # no save yet
        (lines(5, id="other", folder=A), STEP_2, Action.SET_ASIDE),
        (lines(5, id="other", folder=None), None, Action.SET_ASIDE),
        (lines(5, id="other", folder=B), None, Action.REFUSE),
        (lines(5, id="other", folder=B), STEP_2, Action.REFUSE),
        (lines(5), STEP_2, Action.CONTINUE),  # logs of earlier versions have no id
        (lines(5, checkpoints={"save": "a"}), STEP_2, Action.CONTINUE),
        (lines(5, checkpoints=[]), STEP_2, Action.CONTINUE),
        (lines(2, checkpoints={"save": "b"}), STEP_2, Action.CONTINUE),
        (lines(5, checkpoints={"save": "b"}), STEP_2, Action.SET_ASIDE),
        (lines(5), Origin(iteration=2, consumed_tokens=201), Action.SET_ASIDE),
        (lines(5), Origin(iteration=6, consumed_tokens=600), Action.SET_ASIDE),
        (lines(5), None, Action.SET_ASIDE),
        (b"null\n", None, Action.SET_ASIDE),
    ],
)
def test_what_becomes_of_a_log(old: bytes, origin: Origin | None, action: Action) -> None:
    assert action_for(OldLines.parse(old), MINE, origin, "a") is action


def test_steps_that_another_folder_still_holds_are_kept(tmp_path: Path) -> None:
    """A run that branches off from an earlier checkpoint does not shorten the log of the first."""
    save_checkpoint(tmp_path / "b", 5, [], {}, run_id="mine")
    of_b = OldLines.parse(lines(5, id="mine", folder=str(tmp_path / "b")))
    assert action_for(of_b, MINE, STEP_2) is Action.REFUSE
    assert (
        action_for(of_b, MINE, Origin(iteration=5, consumed_tokens=500)) is Action.CONTINUE
    )  # all lines stay
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(5, id="mine", folder=str(tmp_path / "b")))
    with pytest.raises(ConfigError, match=r"run that saves to .*/b, with steps after step 2; give"):
        LogFile(log).begin(MINE, STEP_2)
    assert log.read_bytes().count(b"\n") == 5


def test_a_copied_log_is_continued(tmp_path: Path) -> None:
    """A folder of a run that was copied has the log of the original, which loses nothing."""
    save_checkpoint(tmp_path / "b", 5, [], {}, run_id="mine")
    original, copy = str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")
    old = OldLines.parse(lines(5, id="mine", folder=str(tmp_path / "b"), log=original))
    mine = RunIdentity("mine", str(tmp_path / "a"), copy)
    assert action_for(old, mine, STEP_2) is Action.REFUSE  # the log was moved
    Path(original).touch()
    assert action_for(old, mine, STEP_2) is Action.CONTINUE
    same = RunIdentity("mine", str(tmp_path / "a"), original)
    assert action_for(old, same, STEP_2) is Action.REFUSE


def test_a_resumed_run_keeps_lines_and_permissions(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(5, id="mine", folder=A) + b'{"iteration": 6')
    log.chmod(0o660)
    file = LogFile(log)
    earlier = file.begin(MINE, STEP_2)
    assert [record["iteration"] for record in earlier.records] == [1, 2]
    assert earlier.sentence is None and log.read_bytes() == lines(2, id="mine", folder=A)
    assert log.stat().st_mode & 0o777 == 0o660 and os.listdir(tmp_path) == ["log.jsonl"]
    file.close()


def test_a_log_that_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    """The old log gets the first free number; a dangling link takes a number, too."""
    log, old = tmp_path / "log.jsonl", lines(3, id="other", folder=A)
    log.write_bytes(old)
    (tmp_path / "log.1.jsonl").write_text("kept")
    (tmp_path / "log.2.jsonl").symlink_to("absent")
    file = LogFile(log)
    earlier = file.begin(MINE, None)
    assert earlier.records == [] and str(earlier.sentence).endswith("/log.3.jsonl")
    JsonlWriter(file, {}, earlier).write({"iteration": 1})
    file.close()
    assert (tmp_path / "log.3.jsonl").read_bytes() == old
    assert (tmp_path / "log.1.jsonl").read_text() == "kept" and not (tmp_path / "absent").exists()
    assert log.read_text() == '{"iteration": 1}\n'


def test_a_log_of_another_run_is_left_as_it_is(tmp_path: Path) -> None:
    log, old = tmp_path / "log.jsonl", lines(3, id="other", folder=B)
    log.write_bytes(old)
    file = LogFile(log)
    file.refuse(MINE, lambda: ["other"])  # a run that this run may resume
    for refused in (lambda: file.refuse(MINE), lambda: file.begin(MINE, None)):
        with pytest.raises(
            ConfigError,
            match=r"log\.jsonl: is the log of the run that saves to /runs/b; give another file, "
            r"or resume that run with --load and --save /runs/b",
        ):
            refused()
    assert log.read_bytes() == old and os.listdir(tmp_path) == ["log.jsonl"]


def test_two_runs_cannot_write_one_log(tmp_path: Path, monkeypatch) -> None:
    """A log is locked from its opening on, also while it is shortened, until it is closed."""
    log = tmp_path / "log.jsonl"
    first = LogFile(log)
    second = LogFile(log, patience=0)  # the file does not exist yet
    first.begin(MINE, None)
    with pytest.raises(ConfigError, match="is written by another process"):
        second.begin(MINE, None)
    with pytest.raises(ConfigError, match="is written by another process; give each run its own"):
        LogFile(log, patience=0)
    first.close()
    log.write_bytes(lines(5, id="mine", folder=A))
    third = LogFile(log, patience=0)
    third.begin(MINE, STEP_2)  # shortened, so the file is another one
    with pytest.raises(ConfigError, match="is written by another process"):
        LogFile(log, patience=0)
    monkeypatch.setattr(log_file.time, "sleep", lambda seconds: third.close())
    LogFile(log).close()  # waits for a process that ends


def test_a_link_at_the_end_of_a_path_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    log, target = tmp_path / "log.jsonl", tmp_path / "other" / "log.jsonl"
    log.symlink_to(target)
    for origin in (None, STEP_2):
        file = LogFile(log)
        file.begin(MINE, origin)
        file.close()
        assert log.is_symlink() and target.is_file()
        target.write_bytes(lines(5, id="mine", folder=A))
    assert sorted(os.listdir(tmp_path / "other")) == ["log.jsonl"]


@pytest.mark.parametrize(
    "damaged", ['{"iteration": "1"}', "null", "[1]", '{"iteration": true}', "\x00", '"a']
)
def test_damaged_lines_are_counted_and_kept_elsewhere(tmp_path: Path, damaged: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(2, id="mine", folder=A) + f"{damaged}\n".encode())
    file = LogFile(log)
    earlier = file.begin(MINE, STEP_2)
    file.close()
    assert "1 damaged line(s) are left out; the file with them is now " in str(earlier.sentence)
    assert log.read_bytes() == lines(2, id="mine", folder=A)
    assert (tmp_path / "log.1.jsonl").read_bytes().endswith(f"{damaged}\n".encode())


def test_a_record_with_damaged_fields_is_a_record(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"iteration": 1, "starts": 5, "run": 7}\n' + lines(2, id="mine", folder=A))
    file = LogFile(log)
    earlier = file.begin(MINE, STEP_2)
    JsonlWriter(file, {"starts": [{"step": 2}]}, earlier).write({"iteration": 3})
    file.close()
    assert json.loads(log.read_text().splitlines()[-1]) == {"iteration": 3, "starts": [{"step": 2}]}
