"""Writers and logs that a run's options request, and the callback of a run from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.lazy_exports import lazy_function
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.log_file import JsonlWriter, LogFile, Origin, RunIdentity
from megatron_packed.reporting.run_facts import now

if TYPE_CHECKING:
    from megatron_packed.reporting.progress_log import ProgressLog

_write_report = lazy_function("megatron_packed.reporting.run_report", "write_report")
"""Writer of the report page; its charts are imported only by a run that gets a page."""
RecordFunction = Callable[[dict[str, object]], object]
"""Function that receives the records of the log."""


class Writer(Protocol):
    def write(self, record: dict[str, object]) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


class ReportedState(Protocol):
    """State of a run, as far as its writers read it; `RunState` of a run."""

    @property
    def run_id(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the run, in the form of `serialise.to_dict`."""

    @property
    def progress(self) -> RunProgress: ...

    @property
    def resumed(self) -> object | None:
        """Packs of the checkpoint from which the run continues; None for a new run."""


class CallbackWriter:
    """Writer that calls a function with every record.

    Args:
        callback: receives a copy of each record.
    """

    def __init__(self, callback: RecordFunction) -> None:
        self._callback = callback

    def write(self, record: dict[str, object]) -> None:
        self._callback(dict(record))

    def close(self, *, failed: bool = False) -> None:
        pass


def writers_of(
    config: RunConfig,
    groups: ParallelGroups,
    state: ReportedState,
    opening: Mapping[str, Any],
    console: Console,
    callback: RecordFunction | None = None,
    log: LogFile | None = None,
) -> list[Writer]:
    """Return the writers of rank 0; the other ranks have none.

    The callback comes last, so that the logs already have the record that it receives.

    Args:
        log: the file of ``--log-jsonl``, which this run has locked.
    Raises:
        ConfigError: the log belongs to another run.
    """
    options = config.logging
    writers: list[Writer] = []
    if groups.rank != 0:
        return writers
    first = state.progress.iteration + 1
    flags = opening.get("run", {}).get("flags", ())
    if log is not None:
        writers.append(_log_writer(log, config, state, opening, console))
    if options.tensorboard_dir:
        from megatron_packed.reporting.tensorboard import TensorBoardWriter

        folder = _events_folder(options.tensorboard_dir, config, state, console)
        writers.append(TensorBoardWriter(folder, first, flags))
    if options.wandb_project is not None or options.mlflow_experiment is not None:
        from megatron_packed.reporting.experiment_trackers import TrackerWriter, services

        tracked = services(
            options,
            save=config.checkpoint.save,
            run_id=state.run_id,
            config=state.config,
            flags=flags,
        )
        writers += [TrackerWriter(each, say=console.say, warn=console.warn) for each in tracked]
    if callback is not None:
        writers.append(CallbackWriter(callback))
    return writers


def _events_folder(
    requested: str, config: RunConfig, state: ReportedState, console: Console
) -> str:
    from megatron_packed.reporting.tensorboard import events_folder

    identity = RunIdentity.from_config(state.run_id, config)
    folder = str(events_folder(requested, identity, resumed=state.resumed is not None))
    if folder != str(Path(requested)):
        console.warn(
            f"{requested} has TensorBoard events of another run; those of this run are in {folder}"
        )
    return folder


def _log_writer(
    log: LogFile,
    config: RunConfig,
    state: ReportedState,
    opening: Mapping[str, Any],
    console: Console,
) -> JsonlWriter:
    """Keep the lines of the log that the run continues, and return the writer of further lines."""
    done = state.progress
    origin = None
    if state.resumed is not None:
        origin = Origin(iteration=done.iteration, consumed_tokens=done.consumed_tokens)
    identity = RunIdentity.from_config(state.run_id, config)
    earlier = log.begin(identity, origin, save=config.checkpoint.save)
    if earlier.sentence is not None:
        console.warn(earlier.sentence)
    return JsonlWriter(log, opening, earlier)


def end_log(
    writers: Sequence[Writer],
    iteration: int,
    exit_code: int,
    notes: Sequence[tuple[str, str]],
    console: Console,
    *,
    stopped_early: bool = False,
) -> None:
    """Write the end of a run to its log: time, exit code and notes for the report page.

    Args:
        writers: writers of this rank.
        iteration: finished steps of the run.
        exit_code: exit code of the run.
        notes: (heading, text) of blocks of the page.
        console: console of the run.
        stopped_early: validations stopped the run.
    """
    end: dict[str, object] = {
        "time": now(),
        "exit_code": int(exit_code),
        "notes": [list(note) for note in notes],
    }
    if stopped_early:
        end["stopped_early"] = True
    note({"iteration": iteration, "end": end}, writers, console)


def note(record: dict[str, object], writers: Sequence[Writer], console: Console) -> None:
    """Write a record without metrics to the log. A log that cannot be written is a warning."""
    for writer in writers:
        if isinstance(writer, JsonlWriter):
            try:
                writer.note(record)
            except OSError as error:  # for example, the disk is full
                console.warn(f"the log cannot be written: {error}; the run continues.")


def write_page_if_requested(
    config: RunConfig, groups: ParallelGroups, console: Console
) -> str | None:
    """Write the report page on rank 0, if ``--report`` and ``--log-jsonl`` are given.

    Returns:
        The path of the page if it was written.
    """
    log, page = config.logging.log_jsonl, config.logging.report
    if groups.rank != 0 or not page or not log:
        return None
    # The run is complete and saved, so an error of the page must not make it fail.
    try:
        _write_report(log, page)
    # ValueError: a log without a step. ImportError: the installation changed during the run.
    except (OSError, ValueError, ImportError) as error:
        console.warn(f"the report cannot be written: {error}")
        return None
    return page


def progress_log_of(
    config: RunConfig, groups: ParallelGroups, state: ReportedState, console: Console
) -> ProgressLog | None:
    """Return the log of ``--log-progress`` on rank 0; None on other ranks and without the option."""
    folder = config.checkpoint.save
    if not config.logging.log_progress or folder is None or groups.rank != 0:
        return None
    from megatron_packed.reporting.progress_log import ProgressLog

    return ProgressLog(folder, groups.world_size, state.progress, console.warn)
