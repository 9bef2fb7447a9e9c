"""From a valid configuration to a trained model, and out with the exit code that says how it went.

The codes are those of ``exit_codes.py``. What goes wrong on one rank ends all of them, see
``distributed/failure_watch.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_packed.checkpoint.claim import claim_directory
from megatron_packed.checkpoint.directory import RootLock
from megatron_packed.checkpoint.errors import NoCheckpointError, printable
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.resumed_options import implied_keys
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import changed_options, model_hash, to_dict
from megatron_packed.distributed.collectives import barrier, in_turns
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import Heartbeat
from megatron_packed.distributed.rng import seed_all
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation, coupled_by_design
from megatron_packed.optim.lr_schedule import Schedule
from megatron_packed.reporting.run_report import write_report
from megatron_packed.training.build_graphs import (
    Graphs,
    build_graphs,
    capture_graphs,
    refuse_eager,
    released,
    sentences_of_all_ranks,
    tune_graphs,
    what_is_captured,
)
from megatron_packed.training.build_job import Job, build_job, device_of
from megatron_packed.training.checkpoint_metadata import packs_per_step_of
from megatron_packed.training.console import Console
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.experiment_trackers import TrackerWriter, services
from megatron_packed.training.failures import (
    IsolationLeak,
    StatusFolder,
    failure_of,
    is_lost_connection,
    speak,
    write_status,
)
from megatron_packed.training.kernels import (
    check_kernels,
    kernel_block,
    kernel_names,
    slow_kernel_warnings,
)
from megatron_packed.training.metric_writers import JsonlWriter, TensorBoardWriter, Writer
from megatron_packed.training.profiling import StepProfiler, memory_history, profile_folder
from megatron_packed.training.progress_log import ProgressLog
from megatron_packed.training.resume import resumed_packs
from megatron_packed.training.run_data import RunData, build_data
from megatron_packed.training.run_state import RunState, model_refusal
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.trainer import Trainer
from megatron_packed.training.transformer_engine_checks import check_implementation


def pretrain(config: RunConfig) -> NoReturn:
    """Runs the job of this process and ends the process."""
    with SignalFlag(speaks=os.environ.get("RANK", "0") == "0") as signal_flag:
        exit_code = _run(config, signal_flag)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads and half-dead process groups must not change the exit code or keep the
    # process.
    os._exit(exit_code)


def _run(config: RunConfig, signal_flag: SignalFlag) -> int:
    if config.training.deterministic_mode:
        configure_determinism()
    try:
        layout = config.layout(environment_number(os.environ, "WORLD_SIZE", 1, []))
        check_implementation(config, device_of(config))
        groups = ParallelGroups.create(config.parallel, device_of(config), layout=layout)
    except (
        ValueError
    ) as error:  # of the launch: an environment, devices or libraries that do not fit
        print(printable(str(error)), file=sys.stderr, flush=True)
        return ExitCode.USAGE
    watch = FailureWatch(groups)
    console = Console(groups.rank, config.training.train_iters, config.logging.log_interval)
    status_folder = lock = (
        None  # until the folder is ours: another run's status is not to be touched
    )
    try:
        check_kernels(
            config, groups.device
        )  # before anything is made, and before data is read for hours
        if config.checkpoint.save is not None:
            status_folder, lock = _claim(config.checkpoint.save, groups)
        report = partial(_report, watch=watch, groups=groups, status_folder=status_folder)
        exit_code = _train(
            config, groups, console, signal_flag, watch, heartbeat_of(groups, report), lock
        )
        barrier(groups)  # a rank that still fails ends those that have come this far, too
    except Exception as error:
        return _report(error, watch=watch, groups=groups, status_folder=status_folder)
    watch.close()
    if groups.rank == 0:
        write_status(status_folder, {"exit_code": exit_code})
    groups.shutdown()
    return exit_code


def _report(
    error: Exception,
    *,
    watch: FailureWatch,
    groups: ParallelGroups,
    status_folder: StatusFolder | None,
) -> int:
    """This rank has failed; the exit code, when it is time to end."""
    failure = failure_of(
        error, rank=groups.rank if groups.world_size > 1 else None, step=watch.step
    )
    lost = error if is_lost_connection(error) else None
    return watch.report(failure, partial(speak, error, status_folder), lost=lost)


def heartbeat_of(groups: ParallelGroups, report: Callable[[Exception], int]) -> Heartbeat | None:
    """Ends this process, reported as lost, when its GPU hangs; None where no GPU waits for another
    one.
    """
    if groups.device.type != "cuda" or groups.world_size == 1:
        return None
    return Heartbeat(groups.timeout.total_seconds(), lambda error: os._exit(report(error)))


def _claim(folder: str, groups: ParallelGroups) -> tuple[StatusFolder, RootLock | None]:
    """Keep other runs out until this process is gone; that nothing can be written is found out
    here, not at a save.
    """
    lock = claim_directory(
        folder, rank=groups.rank, world_size=groups.world_size, group=groups.world_group
    )
    status_folder = StatusFolder(folder)
    if groups.rank == 0:
        status_folder.clear()
    barrier(groups)  # from here on any rank may write a new status
    return status_folder, lock


def _train(
    config: RunConfig,
    groups: ParallelGroups,
    console: Console,
    signal_flag: SignalFlag,
    watch: FailureWatch,
    heartbeat: Heartbeat | None,
    lock: RootLock | None,
) -> ExitCode:
    refuse_eager(config.cuda_graph, groups.device)
    history = memory_history(config.profiling, groups, console.warn)
    config, resumed, taken = resumed_packs(config, groups)
    if taken:
        console.say(f"taken from the checkpoint, so that packs stay as they are: {' '.join(taken)}")
    data = build_data(config, groups, console.say, resumed)
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
        lock=lock,
    )
    _restore(config, state, console)
    last = console.total_steps = config.last_iteration(data.train.plan.origin)
    _describe(config, groups, job, data, console)
    kernels = _name_kernels(config, groups, data, console)
    if config.training.isolation_self_test:
        _self_test(config, groups, job.model, console)
    graphs = job.step.graphs = build_graphs(config, job, data.capture_sizes, groups, console.say)
    opening = {"data": data.accounts, "kernels": kernels}
    writers = _writers(config, groups, state, opening, console)
    profiler = None
    if config.profiling.profile:
        folder = profile_folder(config)
        profiler = StepProfiler(
            config.profiling, groups, folder, say=console.say, warn=console.warn
        )
        begins, end = config.profiling.profile_step_start, max(last, state.progress.iteration)
        if begins >= end:
            console.warn(
                f"--profile-step-start {begins} is not reached: the run ends after step {end}."
            )
    progress_log = None
    if config.logging.log_progress and config.checkpoint.save is not None and groups.rank == 0:
        progress_log = ProgressLog(
            config.checkpoint.save, groups.world_size, state.progress, console.warn
        )
    trainer = Trainer(
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
        writers=writers,
        signal=signal_flag,
        watch=watch,
        heartbeat=heartbeat,
        profiler=profiler,
        progress_log=progress_log,
    )
    notes = [("Packing", "\n".join(data.sentences()))]
    try:
        with released(graphs):
            if graphs is not None:
                _tune(graphs, config, groups, job, console)
            with nullcontext() if heartbeat is None else heartbeat:
                if graphs is not None:
                    _capture(graphs, config, groups, job, console)
                exit_code = trainer.run()
            if graphs is not None:
                notes.append(("CUDA graphs", "\n".join(sentences_of_all_ranks(graphs, groups))))
                console.say(notes[-1][1])
    except BaseException:
        for writer in writers:
            writer.close(failed=True)
        raise
    for writer in writers:
        writer.close(failed=exit_code not in (ExitCode.DONE, ExitCode.PREEMPTED))
    if job.model.offload is not None:  # after the graphs that copy to its memory
        job.model.offload.close()
    data.close()
    if history is not None:
        history.finish()
    if profiler is not None:
        notes += profiler.notes
    if (
        exit_code == ExitCode.DONE
        and groups.rank == 0
        and config.logging.report
        and config.logging.log_jsonl
    ):
        _write_page(config.logging.log_jsonl, config.logging.report, notes, console)
    return exit_code


def _write_page(log: str, page: str, notes: Sequence[tuple[str, str]], console: Console) -> None:
    """The page about the run, which is done and saved: what is wrong with the page is no failure of
    the run.
    """
    try:
        write_report(log, page, notes=notes)
    except (OSError, ValueError) as error:  # ValueError: a log without a step
        console.warn(f"there is no report: {error}")
    else:
        console.say(f"report: {page}")


def _restore(config: RunConfig, state: RunState, console: Console) -> None:
    """Resumes from ``--load`` if there is something to resume from, else begins with
    ``--pretrained-checkpoint``.
    """
    options, loaded = config.checkpoint, None
    if options.load is not None:
        try:
            loaded = state.load(options)
        except NoCheckpointError:
            is_own = (
                options.save is not None
                and Path(options.load).absolute() == Path(options.save).absolute()
            )
            if (
                not is_own
                or options.finetune
                or options.ckpt_step is not None
                or options.exit_on_missing_checkpoint
            ):
                raise
            others = "random" if options.pretrained_checkpoint is None else "other"
            console.say(f"No checkpoint in {options.load} yet: starting from {others} weights.")
    if loaded is None and options.pretrained_checkpoint is not None:
        options = replace(
            options, load=options.pretrained_checkpoint, pretrained_checkpoint=None, finetune=True
        )
        loaded = state.load(options)
    if loaded is None:
        return
    what = "weights of" if options.finetune else "resuming from"
    console.say(f"{what} {loaded.path} (iteration {loaded.step})")
    strictness = options.dist_ckpt_strictness
    unexpected = [name for name in loaded.missing if not name.startswith("rng/")]
    if unexpected and strictness.startswith("log_"):
        console.warn(f"the checkpoint lacks what keeps its start values: {_some(unexpected)}")
    if loaded.unused and strictness == "log_all":
        console.warn(f"in the checkpoint but unused: {_some(loaded.unused)}")
    if not options.finetune:
        _say_changes(config, state, loaded.metadata, console)
    refusal = model_refusal(loaded.metadata, config.model)
    if refusal is not None:  # only fine-tuning comes this far
        console.warn(f"{loaded.path} {refusal}; fine-tuning takes its weights as they are.")


def _say_changes(
    config: RunConfig, state: RunState, metadata: Mapping[str, Any], console: Console
) -> None:
    """What a resumed run does otherwise than the one before, and where another batch size finds it."""
    assert state.plan is not None
    done, last = state.progress, config.last_iteration(state.plan.origin)
    changed = changed_options(metadata["config"], state.config, ("optim", "training"))
    if (
        config.training.train_samples is not None
    ):  # iterations are what the batch size makes of them
        changed = [option for option in changed if not option.startswith("--train-iters ")]
    if changed:
        console.say(f"changed since the checkpoint: {'; '.join(changed)}")
    then, now, samples = (
        packs_per_step_of(metadata),
        config.packs_per_step(),
        config.training.train_samples,
    )
    if then != now:
        sizes = "; ".join(changed_options(metadata["config"], state.config, ("packing",)))
        rate = "samples" if config.schedule_units == {"samples"} else "steps"
        onward = (
            f", and step {done.iteration + 1:,} goes on with the next, {now:,} a step where there were {then:,}; the "
            f"learning rate counts {rate}, and the last step is {last:,}"
        )
        console.say(
            f"{sizes}: {done.consumed_packs:,} packs were trained on in {done.iteration:,} steps"
            f"{onward if done.iteration < last else ''}."
        )
    if done.iteration >= last:
        reached = f"--train-iters {last} is reached"
        if samples is not None:
            reached = f"no whole batch is left of --train-samples {samples}"
        console.say(f"{reached}: there is nothing left to train.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _describe(
    config: RunConfig, groups: ParallelGroups, job: Job, data: RunData, console: Console
) -> None:
    precision = "bf16 with fp32 masters" if config.training.bf16 else "fp32"
    parameters = sum(
        sharded.stored_shape.numel() for sharded in job.model.sharded_parameters().values()
    )
    console.say(
        f"model {config.model.hybrid_layer_pattern}: {parameters:,} parameters, {precision}"
    )
    console.say(
        f"{groups.world_size} process(es) on {groups.device.type}{_shared(config, groups)}; packs of "
        f"{config.packing.tokens_per_pack:,} tokens, {config.packs_per_step()} packs a step; "
        f"plan {data.train.plan.hash[:12]}"
    )
    buffer = job.model.expert_buffer(config.packing.tokens_per_pack)
    if buffer is not None and groups.ep_size > 1:
        room = buffer.rows * buffer.bytes_per_row / 2**20
        console.say(
            f"experts of a rank have room for {buffer.rows:,} rows ({room:,.1f} MiB in front of them in each E layer); "
            f"the worst case is {buffer.worst_rows:,}"
        )


def _name_kernels(
    config: RunConfig, groups: ParallelGroups, data: RunData, console: Console
) -> dict[str, str]:
    """Say which kernels the packs will run, and warn of slow ones.

    Raises:
        ConfigError: with ``--require-fast-kernels``, for the documents of these packs some op has
            no kernel.
    """
    largest = (
        data.packing.documents_max if data.capture_sizes is None else data.capture_sizes.largest
    )
    kernels = check_kernels(config, groups.device, max(largest, data.packing.documents_max))
    names = kernel_names(config, kernels)
    console.say(kernel_block(names))
    for sentence in slow_kernel_warnings(kernels, groups.device):
        console.warn(sentence)
    return names


def _shared(config: RunConfig, groups: ParallelGroups) -> str:
    """How the processes share the work, where they do not just train on different packs."""
    words = []
    if groups.tp_cp_size > 1:
        tensor = f"{groups.tp_size} tensor-parallel{', sequence too,' if config.parallel.sequence_parallel else ''}"
        context = f" x {groups.cp_size} context-parallel by {config.parallel.cp_comm_type}"
        words.append(
            f"{tensor}{context if groups.cp_size > 1 else ''} x {groups.dp_size} data-parallel"
        )
    if groups.ep_size > 1 or groups.expert_tp_size != groups.tp_size:
        of_experts = f"{groups.expert_tp_size} tensor-parallel x {groups.ep_size} expert-parallel"
        words.append(f"experts {of_experts} x {groups.expert_dp_size} data-parallel")
    return f" ({'; '.join(words)})" if words else ""


def _self_test(
    config: RunConfig, groups: ParallelGroups, model: HybridModel, console: Console
) -> None:
    """Refuses to train when a document can see another through the kernels in use."""
    check = partial(
        check_isolation,
        config.model,
        groups.device,
        model.dtype,
        model.backends,
        groups=groups,
        cp_comm_type=config.parallel.cp_comm_type,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    # The first use compiles and tunes kernels.
    results = in_turns(groups, check) if groups.device.type == "cuda" else check()
    leaks = [str(result) for result in results if not result.passed]
    if leaks:
        raise IsolationLeak(
            "the self-test refuses to train, because documents of a pack are not kept apart:\n  "
            + "\n  ".join(leaks)
            + "\ndocs/isolation.md lists the kernels that keep them apart; --no-isolation-self-test trains on a leak"
        )
    coupled = coupled_by_design(config.model)
    left_out = (
        f"; not checked, since it couples the documents of a pack by design: {', '.join(coupled)}"
    )
    console.say(f"isolation self-test: {len(results)} checks passed{left_out if coupled else ''}")


def _tune(
    graphs: Graphs, config: RunConfig, groups: ParallelGroups, job: Job, console: Console
) -> None:
    capacities = ", ".join(f"{capacity:,}" for capacity in graphs.capture_sizes.capacities)
    console.say(
        f"CUDA graphs: capturing {what_is_captured(graphs)} for up to {capacities} documents"
    )
    tune_graphs(graphs, job.step, config.packs_per_step(), groups)


def _capture(
    graphs: Graphs, config: RunConfig, groups: ParallelGroups, job: Job, console: Console
) -> None:
    capture_graphs(graphs, job.step, config.packs_per_step(), groups)
    console.say(
        f"CUDA graphs: {graphs.counters.captures} graphs captured in {graphs.counters.capture_seconds:.1f} s"
    )


def _writers(
    config: RunConfig,
    groups: ParallelGroups,
    state: RunState,
    opening: Mapping[str, object],
    console: Console,
) -> list[Writer]:
    """Of rank 0; none on the others."""
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
    return writers + [
        TrackerWriter(service, say=console.say, warn=console.warn) for service in tracked
    ]
