"""Real runs with --async-save: equal checkpoints, and each way in which a save can fail."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.manifest import read_manifest
from support.faults import full_disk, kill_in_save, signal_in_save, until_logged
from support.runs import (
    LAST,
    Data,
    assert_same_state,
    in_folder,
    run,
    saved_steps,
    steps,
    tiny_options,
)

CHECKPOINT, PREEMPTED = 4, 75


def contents(checkpoint: Path) -> list[tuple[str, ...]]:
    """Return the checksums of the tensors in each file of a checkpoint."""
    return [file.block_checksums for file in read_manifest(checkpoint).files]


def test_the_checkpoints_are_those_of_a_run_that_waits(
    uninterrupted: Callable[[int], Path], dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """On two ranks every checkpoint equals the checkpoint of a run without --async-save.

    During the first save, the run completes and logs two more steps.
    """
    log = tmp_path / "log.jsonl"
    options = {**dropout_options, **in_folder(tmp_path), "async_save": True}
    finished = run(options, tmp_path, 2, partial(until_logged, 1, 0, 4, log))
    assert finished.exit_code == 0, finished.console
    waited = uninterrupted(2)
    assert saved_steps(tmp_path) == saved_steps(waited)
    for step in saved_steps(tmp_path):
        name = f"checkpoints/step_{step:08d}"
        assert contents(tmp_path / name) == contents(waited / name), step
        assert finished.console.count(f"saved {tmp_path / name} (") == 1
    assert_same_state(tmp_path / "checkpoints", waited / "checkpoints", LAST)
    assert steps(log) == steps(waited / "log.jsonl")


def test_killed_in_a_save(
    uninterrupted: Callable[[int], Path], dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """After a kill during a save, the run resumes from the previous checkpoint."""
    options = {**dropout_options, **in_folder(tmp_path), "async_save": True}
    finished = run(options, tmp_path, 2, partial(kill_in_save, "shard.piece_written", 2, 1))
    assert finished.exit_codes[1] == -signal.SIGKILL, finished.console
    assert saved_steps(tmp_path) == [3]
    finished = run(options, tmp_path, 2)
    assert finished.exit_code == 0 and "(iteration 3)" in finished.console, finished.console
    assert_same_state(tmp_path / "checkpoints", uninterrupted(2) / "checkpoints", LAST)


def test_a_full_disk_ends_the_run_after_the_step_under_way(data: Data, tmp_path: Path) -> None:
    """A save on a full disk ends the run after the current step, also with expert parallelism.

    With expert parallelism the ranks exchange tokens in every pass while the save runs.
    """
    options = tiny_options(
        data, train_iters=12, save_interval=4, expert_model_parallel_size=2, **in_folder(tmp_path)
    )
    options["async_save"] = True
    finished = run(options, tmp_path, 2, partial(full_disk, 2, 1))
    assert finished.exit_code == CHECKPOINT, finished.console
    assert "rank 1: OSError: [Errno 28] No space left on device" in finished.console
    assert "nothing was published, and the previous checkpoint is unchanged" in finished.console
    assert saved_steps(tmp_path) == [4]
    assert len(steps(tmp_path / "log.jsonl")) in range(8, 13)


def test_a_signal_during_a_save(
    uninterrupted: Callable[[int], Path], dropout_options: dict[str, Any], tmp_path: Path
) -> None:
    """A signal during a save lets that save finish before the run saves again and stops."""
    options = {**dropout_options, **in_folder(tmp_path), "async_save": True}
    finished = run(options, tmp_path, 1, partial(signal_in_save, 1, signal.SIGTERM))
    assert finished.exit_code == PREEMPTED, finished.console
    newest, *rest = saved_steps(tmp_path)
    assert newest > 3 == rest[-1]
    assert run(options, tmp_path, 1).exit_code == 0
    assert_same_state(tmp_path / "checkpoints", uninterrupted(1) / "checkpoints", LAST)
