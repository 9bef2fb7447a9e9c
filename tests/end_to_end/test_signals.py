"""A run that receives a stop signal saves, ends with its exit code, and can resume."""

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.data.loader import Loader
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.training.trainer import Trainer
from support.faults import as_if_begun_earlier, impatience, signal_all, signal_at, signal_in_save
from support.json_lines import read_json
from support.runs import (
    LAST,
    Data,
    assert_same_state,
    in_folder,
    losses,
    run,
    saved_steps,
    start_torchrun,
    steps,
    tiny_options,
)

PREEMPTED = 75
STOPPED = "Stopped on request. Run the same command again to resume."
STEP = 8
"""Step in whose update the signals arrive. No checkpoint is due at this step or the next two."""


def assert_goes_on(
    folder: Path, processes: int, options: dict[str, Any], uninterrupted: Callable[[int], Path]
) -> None:
    """Check that the same command resumes and ends like the uninterrupted run."""
    finished = run(options, folder, processes)
    assert finished.exit_code == 0, finished.console
    assert_same_state(folder / "checkpoints", uninterrupted(processes) / "checkpoints", LAST)
    assert steps(folder / "log.jsonl") == steps(uninterrupted(processes) / "log.jsonl")
    assert read_json(folder / "checkpoints" / "STATUS.json") == {"exit_code": 0}


@pytest.mark.parametrize(
    ("processes", "fault"),
    [
        pytest.param(
            1, partial(signal_at, Optimizer, "step", STEP, 0, signal.SIGUSR1), id="SIGUSR1-alone"
        ),
        pytest.param(
            2, partial(signal_at, Optimizer, "step", STEP, 0, signal.SIGINT), id="SIGINT-rank-0"
        ),
        pytest.param(
            2, partial(signal_at, Optimizer, "step", STEP, 1, signal.SIGTERM), id="SIGTERM-rank-1"
        ),
        pytest.param(
            2,
            partial(signal_all, Optimizer, "step", STEP, signal.SIGTERM),
            id="SIGTERM-twice-to-all",
        ),
    ],
)
def test_a_signal_ends_in_a_checkpoint(
    processes: int,
    fault: Callable[[], None],
    uninterrupted: Callable[[int], Path],
    dropout_options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A signal leads to a checkpoint at most two steps later.

    The next step carries the stop request to all ranks, and its metrics are read after the step
    that follows.
    """
    options = {**dropout_options, **in_folder(tmp_path)}
    finished = run(options, tmp_path, processes, fault)
    assert finished.exit_code == PREEMPTED, finished.console
    assert finished.console.count(STOPPED) == 1
    assert (
        saved_steps(tmp_path)[0]
        == steps(tmp_path / "log.jsonl")[-1]["iteration"]
        in (STEP + 1, STEP + 2)
    )
    assert read_json(tmp_path / "checkpoints" / "STATUS.json") == {"exit_code": PREEMPTED}
    assert_goes_on(tmp_path, processes, options, uninterrupted)


@pytest.mark.parametrize(
    ("fault", "saved"),
    [
        pytest.param(
            partial(signal_at, Loader, "__init__", 1, 0, signal.SIGTERM),
            [2],
            id="while-data-is-made",
        ),
        pytest.param(partial(signal_in_save, 1, signal.SIGTERM), [4, 3], id="in-a-save"),
        pytest.param(
            partial(signal_at, Trainer, "validate", 1, 0, signal.SIGTERM),
            [6, 3],
            id="in-a-validation",
        ),
        pytest.param(
            partial(signal_at, Optimizer, "step", LAST - 1, 0, signal.SIGTERM),
            [LAST, 21, 18, 15, 12, 9, 6, 3],
            id="at-the-end",
        ),
    ],
)
def test_whenever_a_signal_comes(
    fault: Callable[[], None],
    saved: list[int],
    uninterrupted: Callable[[int], Path],
    dropout_options: dict[str, Any],
    tmp_path: Path,
) -> None:
    options = {**dropout_options, **in_folder(tmp_path)}
    finished = run(options, tmp_path, 1, fault)
    assert finished.exit_code == PREEMPTED, finished.console
    assert saved_steps(tmp_path) == saved
    assert_goes_on(tmp_path, 1, options, uninterrupted)


def test_a_second_signal_is_obeyed_at_once(dropout_options: dict[str, Any], tmp_path: Path) -> None:
    """A second signal ends the run at once, without a further step or checkpoint."""
    finished = run(
        {**dropout_options, **in_folder(tmp_path)},
        tmp_path,
        1,
        partial(impatience, signal.SIGINT, 1.1),
    )
    assert finished.exit_code == 128 + signal.SIGINT
    assert saved_steps(tmp_path) == [3]
    assert STOPPED not in finished.console


def test_under_torchrun(
    uninterrupted: Callable[[int], Path],
    dropout_options: dict[str, Any],
    tmp_path: Path,
    quick_programs: Path,
) -> None:
    """torchrun passes its SIGTERM on to two processes, and STATUS.json contains the exit code.

    The exit code of torchrun does not show why the run ended.
    """
    options = {**dropout_options, **in_folder(tmp_path)}
    log = tmp_path / "log.jsonl"
    launcher = start_torchrun(options, tmp_path, 2, quick_programs)
    deadline = time.monotonic() + 100
    while (
        launcher.poll() is None
        and not (log.exists() and len(losses(log)) >= 2)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) != 0
    console = (tmp_path / "console.txt").read_text()
    assert console.count(STOPPED) == 1, console
    assert read_json(tmp_path / "checkpoints" / "STATUS.json") == {"exit_code": PREEMPTED}
    assert 2 <= saved_steps(tmp_path)[0] < LAST, "the signal came too late; make the run longer"
    assert_goes_on(tmp_path, 2, options, uninterrupted)


def test_a_time_limit_stops_like_a_signal(data: Data, tmp_path: Path) -> None:
    options = tiny_options(data, train_iters=6, exit_duration_in_mins=5, **in_folder(tmp_path))
    finished = run(options, tmp_path, 2, partial(as_if_begun_earlier, 1, 301))
    assert finished.exit_code == PREEMPTED, finished.console
    assert saved_steps(tmp_path) == [2]
    assert run(options, tmp_path, 2, partial(as_if_begun_earlier, 1, 290)).exit_code == 0


def test_an_exit_interval_is_an_end(data: Data, tmp_path: Path) -> None:
    options = tiny_options(data, train_iters=6, exit_interval=4, **in_folder(tmp_path))
    assert run(options, tmp_path).exit_code == 0
    assert saved_steps(tmp_path) == [4] and len(losses(tmp_path / "log.jsonl")) == 4
