"""Writers and logs that a run's options request, and the callback of a run from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.console import Console
from megatron_packed.training.experiment_trackers import TrackerWriter, services
from megatron_packed.training.metric_writers import JsonlWriter, TensorBoardWriter, Writer
from megatron_packed.training.progress_log import ProgressLog
from megatron_packed.training.run_state import RunState

Callback = Callable[[dict[str, object]], object]
"""Function that receives the records of the log."""


class CallbackWriter:
    """Writer that calls a function with every record.

    Args:
        callback: receives a copy of each record.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def write(self, record: dict[str, object]) -> None:
        self._callback(dict(record))

    def close(self, *, failed: bool = False) -> None:
        pass


def writers_of(
    config: RunConfig,
    groups: ParallelGroups,
    state: RunState,
    opening: Mapping[str, object],
    console: Console,
    callback: Callback | None = None,
) -> list[Writer]:
    """Return the writers of rank 0; the other ranks have none.

    The callback comes last, so that the logs already have the record that it receives.
    """
    options = config.logging
    writers: list[Writer] = []
    if groups.rank != 0:
        return writers
    first = state.progress.iteration + 1
    if options.log_jsonl:
        writers.append(JsonlWriter(options.log_jsonl, first, opening))
    if options.tensorboard_dir:
        writers.append(TensorBoardWriter(options.tensorboard_dir, first))
    tracked = services(
        options, save=config.checkpoint.save, run_id=state.run_id, config=state.config
    )
    writers += [TrackerWriter(service, say=console.say, warn=console.warn) for service in tracked]
    if callback is not None:
        writers.append(CallbackWriter(callback))
    return writers


def progress_log_of(
    config: RunConfig, groups: ParallelGroups, state: RunState, console: Console
) -> ProgressLog | None:
    """Return the log of ``--log-progress`` on rank 0; None on other ranks and without the option."""
    folder = config.checkpoint.save
    if not config.logging.log_progress or folder is None or groups.rank != 0:
        return None
    return ProgressLog(folder, groups.world_size, state.progress, console.warn)
