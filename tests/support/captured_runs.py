"""Runs of the complete command with a stand-in for capture, compared with eager runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.captures import capture_on_cpu
from support.runs import assert_same_state, in_folder, run, steps


def run_captured(folder: Path, options: dict[str, Any], processes: int = 1, **how: Any) -> Path:
    """Run successfully with the options of `capture_on_cpu`, and return the folder."""
    prepare = partial(capture_on_cpu, **how)
    finished = run({**options, **in_folder(folder)}, folder, processes, prepare)
    assert finished.exit_code == 0, finished.console
    return folder


def without_graphs(log: Path) -> list[dict[str, Any]]:
    """Return the lines of the log without the fields that graphs add."""
    return [
        {name: value for name, value in line.items() if not name.startswith("graph_")}
        for line in steps(log)
    ]


def assert_same_run(found: Path, expected: Path, iteration: int) -> None:
    """Compare all lines of the logs, and the checkpoints of one iteration.

    The first run ends at this iteration; the other run may be longer.
    """
    lines = without_graphs(expected / "log.jsonl")
    wanted = [line for line in lines if line["iteration"] <= iteration]
    assert without_graphs(found / "log.jsonl") == wanted
    assert_same_state(found / "checkpoints", expected / "checkpoints", iteration)
