"""Run of one process: builds data, model and graphs, trains, and returns an exit code.

`worker.run_worker` is the entry point. The codes are in ``exit_codes.py``. An error on one rank ends all ranks, see
``distributed/failure_watch.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_packed.checkpoint.errors import printable_message
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.idle_options import sentence as idle_sentence
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.collectives import barrier
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import UNWATCHED, HangDetector
from megatron_packed.distributed.rng import seed_all
from megatron_packed.explain.kernel_reasons import (
    check_implementation,
    check_kernels,
    with_usable_partition,
)
from megatron_packed.explain.run_description import describe, name_kernels
from megatron_packed.inputs.plan_packs import with_epochs
from megatron_packed.inputs.run_data import RunData, build_data, most_documents
from megatron_packed.inputs.stored_files import files_of_start
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.run_model import device_of
from megatron_packed.optim.schedules import Schedule, WeightDecaySchedule
from megatron_packed.reporting.console import ClosingLines, Console
from megatron_packed.reporting.log_file import RunIdentity
from megatron_packed.reporting.run_facts import opening_of
from megatron_packed.reporting.run_writers import (
    RecordFunction,
    end_log,
    progress_log_of,
    write_page_if_requested,
    writers_of,
)
from megatron_packed.resume.compared_runs import AskedRun, Resumed, resumed_options
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.callback import Callback
from megatron_packed.training.claimed_outputs import ClaimedOutputs
from megatron_packed.training.failures import (
    failure_of,
    is_lost_connection,
    speak,
    write_status,
)
from megatron_packed.training.isolation_self_test import self_test
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron_packed.cuda_graphs.step_graphs import StepGraphs
    from megatron_packed.reporting.profiling import MemoryHistory


def run_job(
    config: RunConfig,
    signal_flag: SignalFlag,
    on_record: RecordFunction | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    raises: bool = False,
    quiet: bool = False,
    names_idle_options: bool = False,
) -> int:
    """Run the job and return its exit code.

    Args:
        on_record: called on rank 0 with every record of the log.
        callbacks: called by the training loop, on all ranks.
        raises: raise an error instead of printing it and returning its exit code.
        quiet: print nothing but the failures of a run with several ranks.
        names_idle_options: print which options have no effect in a resumed run. The parser of a command
            line leaves this to the job, because the checkpoint decides some options.
    """
    if config.training.deterministic_mode:
        configure_determinism()
    try:
        groups = _create_groups(config)
    except ValueError as error:  # the environment, the devices or the libraries are not suitable
        if raises:
            raise
        print(printable_message(str(error)), file=sys.stderr, flush=True)
        return ExitCode.USAGE
    # A rank that fails now informs the other ranks, which would otherwise wait in a collective.
    watch = FailureWatch(groups)
    outputs = ClaimedOutputs()
    report = partial(_report, watch=watch, groups=groups, outputs=outputs)
    launch = Launch(
        config=config,
        groups=groups,
        console=Console.of_run(groups.rank, config.logging, quiet=quiet),
        signal=signal_flag,
        watch=watch,
        hang_detector=hang_detector_of(groups, report),
        outputs=outputs,
        on_record=on_record,
        callbacks=callbacks,
        names_idle_options=names_idle_options,
    )
    try:
        exit_code: int = _check_and_train(launch)
    except Exception as error:
        # A Python caller gets the exception, so nothing is printed. With several ranks, the failure
        # is still reported, so that the other ranks end.
        exit_code = report(error, quiet=raises and groups.world_size == 1)
        if raises:
            outputs.release()
            raise
        return exit_code
    except BaseException:  # a Python caller interrupts the run, and may start another one
        outputs.release()
        raise
    watch.close()
    if groups.rank == 0:
        write_status(outputs.status_folder, {"exit_code": exit_code})
    groups.shutdown()
    if raises:
        outputs.release()
    return exit_code


def _create_groups(config: RunConfig) -> ParallelGroups:
    """Create the process groups of this rank.

    Raises:
        ValueError: the environment, the devices or the libraries are not suitable.
    """
    layout = config.layout(environment_number(os.environ, "WORLD_SIZE", 1, []))
    check_implementation(config, device_of(config))
    return ParallelGroups.create(config.parallel, device_of(config), layout=layout)


def _report(
    error: Exception,
    *,
    watch: FailureWatch,
    groups: ParallelGroups,
    outputs: ClaimedOutputs,
    quiet: bool = False,
) -> int:
    """Report that this rank has failed; return its exit code when the process may end.

    Args:
        quiet: only write ``STATUS.json``, and print nothing.
    """
    failure = failure_of(
        error, rank=groups.rank if groups.world_size > 1 else None, step=watch.step
    )
    lost = error if is_lost_connection(error) else None
    if quiet:
        write_status(outputs.status_folder, asdict(failure))
        return failure.exit_code
    return watch.report(failure, partial(speak, error, outputs.status_folder), lost=lost)


def hang_detector_of(
    groups: ParallelGroups, report: Callable[[Exception], int]
) -> HangDetector | None:
    """Return the detector that ends this process if its GPU hangs.

    Returns None without a GPU or with one process, since no GPU then waits for another one.
    """
    if groups.device.type != "cuda" or groups.world_size == 1:
        return None
    return HangDetector(groups.timeout.total_seconds(), lambda error: os._exit(report(error)))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Objects of one process that exist before data and model are built."""

    config: RunConfig
    groups: ParallelGroups
    console: Console
    signal: SignalFlag
    watch: FailureWatch
    hang_detector: HangDetector | None
    outputs: ClaimedOutputs
    """Folder of checkpoints and log."""
    on_record: RecordFunction | None = None
    """Receives every record of the log, on rank 0."""
    callbacks: Sequence[Callback] = ()
    """Callbacks of the user, the same on all ranks."""
    names_idle_options: bool = False
    """Print which options have no effect in a resumed run."""
    resumed: Resumed | None = None  # the checkpoint for which the data is planned
    closing: ClosingLines = field(default_factory=ClosingLines)
    """Counts of the run's steps, for its last lines."""


def _check_and_train(launch: Launch) -> ExitCode:
    """Check flags and kernels, claim the output folders, and train; wait for all ranks at the end."""
    config, groups = launch.config, launch.groups
    # Checks before files are created, and before data is read, which may take hours.
    if groups.world_size > 1:
        from megatron_packed.distributed.same_flags import check_same_flags

        check_same_flags(config, groups)
    config = with_usable_partition(config, groups)
    check_kernels(config, groups.device)
    if config.model.has_adapters and not any(config.checkpoint.starts):
        from megatron_packed.resume.restore import refuse_random_base

        refuse_random_base(config)
    launch.outputs.claim(config, groups)
    exit_code = _train(replace(launch, config=config))
    barrier(groups)  # if another rank fails now, this rank ends here, too
    return exit_code


def _train(launch: Launch) -> ExitCode:
    """Build the run in phases, train, and close all resources."""
    # The memory history must start before the first tensor of the run is allocated.
    history = _set_up(launch)
    launch, data = _build_data(launch)
    job, state = _build_model(launch, data)
    kernels = _check_model(launch, data, job)
    graphs = None
    if launch.config.cuda_graph.enabled:
        from megatron_packed.training.build_graphs import build_graphs

        graphs = job.step.graphs = build_graphs(
            launch.config, job, data.capture_sizes, launch.groups, launch.console.say
        )
    trainer = _build_trainer(launch, data, job, state, kernels)
    exit_code = _run_trainer(launch, job, graphs, trainer)
    job.close()  # after the graphs, which contain addresses of its memory
    data.close()
    if history is not None:
        history.finish()
    report = None
    if exit_code in (ExitCode.DONE, ExitCode.NONFINITE):
        report = write_page_if_requested(launch.config, launch.groups, launch.console)
    closing = launch.closing.lines(
        launch.config, state.progress, trainer.last_iteration, trainer.last_checkpoint, report
    )
    for line in (*job.unfused, *closing):
        launch.console.say(line)
    return exit_code


def _set_up(launch: Launch) -> MemoryHistory | None:
    """Refuse strict graphs on a device without graphs, and start the allocator's memory history."""
    config = launch.config
    if config.cuda_graph.enabled:
        from megatron_packed.training.build_graphs import refuse_eager

        refuse_eager(config.cuda_graph, launch.groups.device)
    if not config.profiling.record_memory_history:
        return None
    from megatron_packed.reporting.profiling import memory_history

    return memory_history(config.profiling, launch.groups, launch.console.warn)


def _build_data(launch: Launch) -> tuple[Launch, RunData]:
    """Tokenise and pack the data; a resumed run gets the packs of its checkpoint."""
    # Read the checkpoint's options before the data, because they decide the packs.
    config, resumed = _with_stored_options(launch)
    console = launch.console
    # Read before the data is opened: retention may remove this checkpoint while the run trains.
    stored = files_of_start(config, launch.groups)
    data = build_data(
        config,
        launch.groups,
        console.say,
        resumed,
        detail=console.detail,
        show=not console.silent,
        stored=stored,
    )
    if data.parallel != config.parallel:
        config = replace(config, parallel=data.parallel)
        check_kernels(config, launch.groups.device)
    plan, hashes = data.train.plan, data.hashes
    progress = None if resumed is None else resumed.progress_in(config, plan, hashes)
    return replace(launch, config=with_epochs(config, plan, progress), resumed=resumed), data


def _with_stored_options(launch: Launch) -> tuple[RunConfig, Resumed | None]:
    """Take the options that the checkpoint of a resumed run decides, and print the changes.

    Returns:
        The configuration, and the checkpoint; None for a new run.
    """
    config, console = launch.config, launch.console
    if not config.checkpoint.resumes:
        return config, None
    config, resumed, lines = resumed_options(config, launch.groups)
    if launch.names_idle_options:
        idle = without_effect(config, launch.groups.world_size)
        lines = [*lines, idle_sentence(idle, config)]
    for line in filter(None, lines):
        console.say(line)
    return config, resumed


def _build_model(launch: Launch, data: RunData) -> tuple[Job, RunState]:
    """Build model and optimizer, with values from a checkpoint or random start values."""
    config, groups, console = launch.config, launch.groups, launch.console
    # Without sequence parallelism, all tensor-parallel ranks hold the same hidden states, and
    # dropout must drop the same elements on all of them.
    own_rows = config.parallel.sequence_parallel
    seed_all(
        config.training.seed,
        groups.dp.rank,
        cp_rank=groups.cp.rank,
        tp_rank=groups.tp.rank if own_rows else 0,
    )
    job = build_job(config, groups, data.vocab_size)
    state = RunState(
        job.model,
        job.optimizer,
        groups,
        AskedRun(
            config=config,
            vocab_size=data.vocab_size,
            plan=data.train.plan,
            hashes=data.hashes,
            planned=launch.resumed,
            changed_files=data.changed_files,
        ),
        lock=launch.outputs.lock,
        attached=data.attached,
        show=not console.silent,
        callbacks=launch.callbacks,
    )
    if any(config.checkpoint.starts) or config.model.has_adapters:
        from megatron_packed.resume.restore import restore

        restore(config, state, console.say, console.warn)
    # Set after the restore: with lengths in samples, the last iteration depends on the position at
    # which the plan resumes.
    console.total_steps = config.last_iteration(state.progress.samples_ahead(config.packing))
    return job, state


def _check_model(launch: Launch, data: RunData, job: Job) -> dict[str, str]:
    """Print model and kernels, run the isolation self-test, and return the names of the kernels."""
    config, groups, console = launch.config, launch.groups, launch.console
    describe(
        config,
        groups,
        job.model,
        data.train.plan.hash,
        say=console.say,
        detail=console.detail,
    )
    documents = most_documents(data)
    kernels = name_kernels(config, groups, documents, detail=console.detail, warn=console.warn)
    # Run the test before graphs are captured, because its tensors have other shapes.
    if config.training.isolation_self_test:
        self_test(config, groups, job.model, console, documents)
    return kernels


def _build_trainer(
    launch: Launch, data: RunData, job: Job, state: RunState, kernels: dict[str, str]
) -> Trainer:
    config, groups, console = launch.config, launch.groups, launch.console
    ahead = state.progress.samples_ahead(config.packing)
    last = config.last_iteration(ahead)
    opening = opening_of(
        config,
        groups,
        kernels,
        vocab_size=data.vocab_size,
        packing=data.sentences(),
        accounts=data.accounts,
        identity=RunIdentity.from_config(state.run_id, config),
        iteration=state.progress.iteration,
        last_iteration=last,
        phases=state.phases,
    )
    # Logs are cut at the iteration at which the run resumes, so they are opened after the restore.
    log = launch.outputs.log
    writers = writers_of(config, groups, state, opening, console, launch.on_record, log)
    writers.append(launch.closing)
    profiler = None
    if config.profiling.profile:
        from megatron_packed.reporting.profiling import profiler_of

        profiler = profiler_of(config, groups, console, max(last, state.progress.iteration))
    return Trainer(
        writers=writers,
        config=config,
        groups=groups,
        step=job.step,
        state=state,
        schedule=Schedule.from_config(config, ahead),
        weight_decay=WeightDecaySchedule.from_config(config, ahead),
        last_iteration=last,
        data=data,
        flops=FlopCounter(config.model, data.vocab_size),
        console=console,
        signal=launch.signal,
        watch=launch.watch,
        hang_detector=launch.hang_detector or UNWATCHED,
        profiler=profiler,
        progress_log=progress_log_of(config, groups, state, console),
        user_callbacks=launch.callbacks,
    )


def _run_trainer(
    launch: Launch,
    job: Job,
    graphs: StepGraphs | None,
    trainer: Trainer,
) -> ExitCode:
    """Capture graphs and train; at the end or on an error, release the graphs and close writers."""
    notes = []
    try:
        if graphs is None:
            exit_code = _run_watched(launch, trainer)
        else:
            from megatron_packed.training.build_graphs import released, sentences_of_all_ranks

            with released(graphs):
                _tune(graphs, launch, job)
                exit_code = _run_watched(launch, trainer, partial(_capture, graphs, launch, job))
                sentences = "\n".join(sentences_of_all_ranks(graphs, job.model, launch.groups))
                notes.append(("CUDA graphs", sentences))
                launch.console.say(sentences)
    except BaseException:
        for writer in trainer.writers:
            writer.close(failed=True)
        raise
    if trainer.profiler is not None:
        notes += trainer.profiler.notes
    iteration = trainer.state.progress.iteration
    early = trainer.stopped_early
    end_log(trainer.writers, iteration, exit_code, notes, launch.console, stopped_early=early)
    for writer in trainer.writers:
        writer.close(failed=exit_code not in (ExitCode.DONE, ExitCode.PREEMPTED))
    return exit_code


def _run_watched(
    launch: Launch, trainer: Trainer, capture: Callable[[], None] | None = None
) -> ExitCode:
    """Capture graphs, if there are any, and train.

    Ranks wait for each other in captured collectives, so hangs are watched from the capture on.
    """
    with nullcontext() if launch.hang_detector is None else launch.hang_detector:
        if trainer.state.progress.iteration < trainer.last_iteration:
            trainer.observe_routing()
        if capture is not None:
            capture()
        return trainer.run()


def _tune(graphs: StepGraphs, launch: Launch, job: Job) -> None:
    from megatron_packed.training.build_graphs import tune_graphs

    capacities = ", ".join(f"{capacity:,}" for capacity in graphs.capture_sizes.capacities)
    launch.console.say(
        f"CUDA graphs: capturing {graphs.description} (capacities: {capacities} documents)"
    )
    tune_graphs(graphs, job.step, launch.config.packs_per_step(), launch.groups)


def _capture(graphs: StepGraphs, launch: Launch, job: Job) -> None:
    from megatron_packed.training.build_graphs import capture_graphs

    capture_graphs(graphs, job.step, launch.config.packs_per_step(), launch.groups)
    launch.console.say(
        f"CUDA graphs: {graphs.counters.captures} graphs captured in {graphs.counters.capture_seconds:.1f} s"
    )
