"""A run from its configuration to its exit code: setup, data, model, graphs, training.

The codes are those of ``exit_codes.py``. What goes wrong on one rank ends all of them, see
``distributed/failure_watch.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NoReturn

from megatron_packed.checkpoint.directory_lock import RootLock, claim_directory
from megatron_packed.checkpoint.errors import printable
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.resumed_options import implied_keys
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import model_hash, to_dict
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.collectives import barrier
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import HangDetector
from megatron_packed.distributed.rng import seed_all
from megatron_packed.models.flops import FlopCounter
from megatron_packed.optim.lr_schedule import Schedule
from megatron_packed.reporting.run_report import write_report
from megatron_packed.training.build_graphs import (
    build_graphs,
    capture_graphs,
    refuse_eager,
    released,
    sentences_of_all_ranks,
    tune_graphs,
)
from megatron_packed.training.build_job import Job, build_job, device_of
from megatron_packed.training.console import Console
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.failures import (
    StatusFolder,
    failure_of,
    is_lost_connection,
    speak,
    write_status,
)
from megatron_packed.training.isolation_self_test import self_test
from megatron_packed.training.kernels import check_kernels
from megatron_packed.training.out_of_memory import MemoryHistory, memory_history
from megatron_packed.training.profiling import StepProfiler, profile_folder
from megatron_packed.training.restore import restore
from megatron_packed.training.resume import resumed_packs
from megatron_packed.training.run_data import RunData, build_data
from megatron_packed.training.run_description import describe, name_kernels
from megatron_packed.training.run_state import RunState
from megatron_packed.training.run_writers import Callback, progress_log_of, writers_of
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.trainer import Trainer
from megatron_packed.training.transformer_engine_checks import check_implementation


def pretrain(config: RunConfig) -> NoReturn:
    """Run the job of this process, and end the process with its exit code."""
    # Before anything slow: a signal during start-up is kept until a step can answer it.
    with SignalFlag(speaks=os.environ.get("RANK", "0") == "0") as signal_flag:
        exit_code = run_job(config, signal_flag)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads and half-dead process groups must not change the exit code or keep the
    # process.
    os._exit(exit_code)


def run_job(
    config: RunConfig,
    signal_flag: SignalFlag,
    callback: Callback | None = None,
    *,
    raises: bool = False,
) -> int:
    """Run the job and return its exit code; with ``raises`` an error is raised in its place."""
    if config.training.deterministic_mode:
        configure_determinism()
    try:
        layout = config.layout(environment_number(os.environ, "WORLD_SIZE", 1, []))
        check_implementation(config, device_of(config))
        groups = ParallelGroups.create(config.parallel, device_of(config), layout=layout)
    except ValueError as error:  # the environment, devices or libraries do not fit
        if raises:
            raise
        print(printable(str(error)), file=sys.stderr, flush=True)
        return ExitCode.USAGE
    # From here on a rank that fails tells the others, which would wait in a collective.
    watch = FailureWatch(groups)
    console = Console(groups.rank, config.training.train_iters, config.logging.log_interval)
    # None until the folder is ours: another run's status is not to be touched.
    status_folder = lock = None
    try:
        # Before anything is made, and before data is read for hours.
        check_kernels(config, groups.device)
        if config.checkpoint.save is not None:
            status_folder, lock = _claim(config.checkpoint.save, groups)
        report = partial(_report, watch=watch, groups=groups, status_folder=status_folder)
        exit_code = _train(
            Launch(
                config=config,
                groups=groups,
                console=console,
                signal=signal_flag,
                watch=watch,
                hang_detector=hang_detector_of(groups, report),
                lock=lock,
                callback=callback,
            )
        )
        barrier(groups)  # a rank that still fails ends those that have come this far, too
    except Exception as error:
        # A caller in Python gets the error itself; other ranks must still learn of it.
        quiet = raises and groups.world_size == 1
        exit_code = _report(
            error, watch=watch, groups=groups, status_folder=status_folder, quiet=quiet
        )
        if raises:
            _release(status_folder, lock)
            raise
        return exit_code
    watch.close()
    if groups.rank == 0:
        write_status(status_folder, {"exit_code": exit_code})
    groups.shutdown()
    if raises:
        _release(status_folder, lock)
    return exit_code


def _release(status_folder: StatusFolder | None, lock: RootLock | None) -> None:
    """Let other runs of this process use the folder of checkpoints."""
    if status_folder is not None:
        os.close(status_folder.descriptor)
    if lock is not None:
        lock.close()


def _report(
    error: Exception,
    *,
    watch: FailureWatch,
    groups: ParallelGroups,
    status_folder: StatusFolder | None,
    quiet: bool = False,
) -> int:
    """Report that this rank has failed; return the exit code when it is time to end.

    Args:
        quiet: only write ``STATUS.json``, and print nothing.
    """
    failure = failure_of(
        error, rank=groups.rank if groups.world_size > 1 else None, step=watch.step
    )
    lost = error if is_lost_connection(error) else None
    if quiet:
        write_status(status_folder, asdict(failure))
        return failure.exit_code
    return watch.report(failure, partial(speak, error, status_folder), lost=lost)


def hang_detector_of(
    groups: ParallelGroups, report: Callable[[Exception], int]
) -> HangDetector | None:
    """Return what ends this process, reported as lost, when its GPU hangs.

    None where no GPU waits for another one.
    """
    if groups.device.type != "cuda" or groups.world_size == 1:
        return None
    return HangDetector(groups.timeout.total_seconds(), lambda error: os._exit(report(error)))


def _claim(folder: str, groups: ParallelGroups) -> tuple[StatusFolder, RootLock | None]:
    """Keep other runs out of the folder of checkpoints until this process is gone.

    A folder that cannot be written is found out here, not at the first save.
    """
    lock = claim_directory(
        folder, rank=groups.rank, world_size=groups.world_size, group=groups.world_group
    )
    status_folder = StatusFolder(folder)
    if groups.rank == 0:
        status_folder.clear()
    barrier(groups)  # from here on any rank may write a new status
    return status_folder, lock


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of the job, before anything of the run is built."""

    config: RunConfig
    groups: ParallelGroups
    console: Console
    signal: SignalFlag
    watch: FailureWatch
    hang_detector: HangDetector | None
    lock: RootLock | None
    """Rank 0's hold on the folder of checkpoints."""
    callback: Callback | None = None
    """Receives every record of the log, on rank 0."""


def _train(launch: Launch) -> ExitCode:
    """Build the run, phase by phase, train it, and close what was opened."""
    # The allocator is watched from before the first tensor of the run.
    history = _set_up(launch)
    launch, data = _build_data(launch)
    job, state = _build_model(launch, data)
    kernels = _check_model(launch, data, job)
    graphs = job.step.graphs = build_graphs(
        launch.config, job, data.capture_sizes, launch.groups, launch.console.say
    )
    trainer = _build_trainer(launch, data, job, state, kernels)
    notes = [("Packing", "\n".join(data.sentences()))]
    exit_code = _run_trainer(launch, job, graphs, trainer, notes)
    if job.model.offload is not None:  # after the graphs that copy to its memory
        job.model.offload.close()
    data.close()
    if history is not None:
        history.finish()
    if trainer.profiler is not None:
        notes += trainer.profiler.notes
    if exit_code == ExitCode.DONE:
        _write_page(launch, notes)
    return exit_code


def _set_up(launch: Launch) -> MemoryHistory | None:
    """Refuse graphs where only eager steps can run, and record the allocator from the start."""
    refuse_eager(launch.config.cuda_graph, launch.groups.device)
    return memory_history(launch.config.profiling, launch.groups, launch.console.warn)


def _build_data(launch: Launch) -> tuple[Launch, RunData]:
    """Tokenise and pack the data, as a checkpoint that the run resumes from had packed it."""
    # The checkpoint decides before data is read: its packs must come back as they were.
    config, resumed, taken = resumed_packs(launch.config, launch.groups)
    if taken:
        launch.console.say(
            f"taken from the checkpoint, so that packs stay as they are: {' '.join(taken)}"
        )
    data = build_data(config, launch.groups, launch.console.say, resumed)
    return replace(launch, config=config), data


def _build_model(launch: Launch, data: RunData) -> tuple[Job, RunState]:
    """Build model and optimizer with their start values: of a checkpoint, or random ones."""
    config, groups, console = launch.config, launch.groups, launch.console
    # Without sequence parallelism all tensor-parallel ranks drop the same of the hidden state that
    # they all have.
    own_rows = config.parallel.sequence_parallel
    seed_all(
        config.training.seed,
        groups.dp_rank,
        cp_rank=groups.cp_rank,
        tp_rank=groups.tp_rank if own_rows else 0,
    )
    job = build_job(config, groups, data.vocab_size)
    state = RunState(
        job.model,
        job.optimizer,
        groups,
        plan=data.train.plan,
        data_hash=data.train.dataset.content_hash,
        config=to_dict(config),
        model_hash=model_hash(config.model),
        schedule_units=config.schedule_units,
        implied=implied_keys(config),
        lock=launch.lock,
    )
    restore(config, state, console)
    # Only now: in samples, the last iteration depends on where the plan goes on.
    console.total_steps = config.last_iteration(data.train.plan.origin)
    return job, state


def _check_model(launch: Launch, data: RunData, job: Job) -> dict[str, str]:
    """Say what will run, test its kernels for leaks, and return their names."""
    config, groups, console = launch.config, launch.groups, launch.console
    describe(config, groups, job, data, console)
    kernels = name_kernels(config, groups, data, console)
    # Before graphs are captured: the test runs other shapes than theirs.
    if config.training.isolation_self_test:
        self_test(config, groups, job.model, console)
    return kernels


def _build_trainer(
    launch: Launch, data: RunData, job: Job, state: RunState, kernels: Mapping[str, str]
) -> Trainer:
    config, groups, console = launch.config, launch.groups, launch.console
    last = config.last_iteration(data.train.plan.origin)
    opening = {"data": data.accounts, "kernels": kernels}
    # Logs are cut at the iteration that the run resumes at, so they open after the restore.
    writers = writers_of(config, groups, state, opening, console, launch.callback)
    return Trainer(
        writers=writers,
        config=config,
        groups=groups,
        step=job.step,
        state=state,
        schedule=Schedule.from_config(config, data.train.plan.origin),
        last_iteration=last,
        train=data.train,
        valid=data.valid,
        test=data.test,
        flops=FlopCounter(config.model, data.vocab_size),
        console=console,
        signal=launch.signal,
        watch=launch.watch,
        hang_detector=launch.hang_detector,
        profiler=_profiler(launch, max(last, state.progress.iteration)),
        progress_log=progress_log_of(config, groups, state, console),
    )


def _profiler(launch: Launch, end: int) -> StepProfiler | None:
    """Return the profiler that the options ask for; ``end`` is the run's last iteration."""
    options, console = launch.config.profiling, launch.console
    if not options.profile:
        return None
    folder = profile_folder(launch.config)
    profiler = StepProfiler(options, launch.groups, folder, say=console.say, warn=console.warn)
    if options.profile_step_start >= end:
        console.warn(
            f"--profile-step-start {options.profile_step_start} is not reached: the run ends after step {end}."
        )
    return profiler


def _run_trainer(
    launch: Launch,
    job: Job,
    graphs: StepGraphs | None,
    trainer: Trainer,
    notes: list[tuple[str, str]],
) -> ExitCode:
    """Capture graphs and train; writers are closed and graphs released however it ends."""
    try:
        with released(graphs):
            if graphs is not None:
                _tune(graphs, launch, job)
            # From here on ranks wait for each other in captured collectives.
            with nullcontext() if launch.hang_detector is None else launch.hang_detector:
                if graphs is not None:
                    _capture(graphs, launch, job)
                exit_code = trainer.run()
            if graphs is not None:
                sentences = "\n".join(sentences_of_all_ranks(graphs, launch.groups))
                notes.append(("CUDA graphs", sentences))
                launch.console.say(sentences)
    except BaseException:
        for writer in trainer.writers:
            writer.close(failed=True)
        raise
    for writer in trainer.writers:
        writer.close(failed=exit_code not in (ExitCode.DONE, ExitCode.PREEMPTED))
    return exit_code


def _write_page(launch: Launch, notes: Sequence[tuple[str, str]]) -> None:
    """Write the page about the run, on rank 0, if the options ask for it."""
    log, page = launch.config.logging.log_jsonl, launch.config.logging.report
    if launch.groups.rank != 0 or not page or not log:
        return
    # The run is done and saved: a page that cannot be written is no failure of the run.
    try:
        write_report(log, page, notes=notes)
    except (OSError, ValueError) as error:  # ValueError: a log without a step
        launch.console.warn(f"there is no report: {error}")
    else:
        launch.console.say(f"report: {page}")


def _tune(graphs: StepGraphs, launch: Launch, job: Job) -> None:
    capacities = ", ".join(f"{capacity:,}" for capacity in graphs.capture_sizes.capacities)
    launch.console.say(
        f"CUDA graphs: capturing {graphs.description} for up to {capacities} documents"
    )
    tune_graphs(graphs, job.step, launch.config.packs_per_step(), launch.groups)


def _capture(graphs: StepGraphs, launch: Launch, job: Job) -> None:
    capture_graphs(graphs, job.step, launch.config.packs_per_step(), launch.groups)
    launch.console.say(
        f"CUDA graphs: {graphs.counters.captures} graphs captured in {graphs.counters.capture_seconds:.1f} s"
    )
