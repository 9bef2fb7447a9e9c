"""Training loop of a run: steps, late metrics, repeated steps, and the end of the run.

The run's periodic work (validation, saves, ...) is in ``run_callbacks.py``, and one step of the model
in ``train_step.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.data.errors import DataError
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import UNWATCHED, DeviceWatch
from megatron_packed.distributed.rng import RngState
from megatron_packed.inputs.run_data import AnyPlan, RunData, Stream
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.schedules import Schedule, WeightDecaySchedule
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.run_writers import Writer
from megatron_packed.reporting.step_record import GraphFigures, StepFacts, replays_and_fallbacks
from megatron_packed.resume.callback_state import CallbackError
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.callback import (
    HOOKS,
    Callback,
    StepMetrics,
    overriding,
)
from megatron_packed.training.evaluation import early_stop, evaluate_end, evaluate_validation
from megatron_packed.training.late_metrics import Arrived, LateMetrics
from megatron_packed.training.run_callbacks import GarbageCollection, run_callbacks
from megatron_packed.training.run_log import RunLog
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.train_step import UNCHECKED, StepChecks, TrainStep

if TYPE_CHECKING:
    from megatron_packed.checkpoint.save import SavedCheckpoint
    from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters
    from megatron_packed.memory.activation_offload import Offload
    from megatron_packed.memory.offload_figures import OffloadFigures
    from megatron_packed.reporting.profiling import StepProfiler
    from megatron_packed.reporting.progress_log import ProgressLog
    from megatron_packed.training.expert_bounds import ExpertBounds
    from megatron_packed.training.replica_checks import ReplicaCheck

_RESUME = "Run the same command again to resume."
_NOT_SAVED = "Nothing was saved, because --save is not given."


class _Queued(NamedTuple):
    """Arguments of a queued step, for its repeat."""

    micro_batches: Sequence[MicroBatch]
    rng: RngState | None
    """Random generators before the step; None if a repeat draws no random numbers."""


@dataclass(kw_only=True)
class Trainer:
    """Training loop of a job that is already built; every rank runs the same loop.

    [Note: when a run may stop]
    All ranks must take some decisions together: to stop after a signal, to stop after a non-finite
    step, to capture graphs again. These decisions depend on the all-reduced metrics of the previous
    step, which every rank reads at the same place of the loop. A time limit that any rank's clock
    has reached, and the request of a callback on any rank, are sent in the same way as a signal.
    """

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    state: RunState
    schedule: Schedule
    weight_decay: WeightDecaySchedule
    last_iteration: int
    """Iteration after which the run ends."""
    data: RunData
    flops: FlopCounter
    console: Console
    writers: list[Writer]
    signal: SignalFlag
    watch: FailureWatch
    hang_detector: DeviceWatch = UNWATCHED
    profiler: StepProfiler | None = None
    progress_log: ProgressLog | None = None
    user_callbacks: Sequence[Callback] = ()
    exit_code: ExitCode | None = field(default=None, init=False)
    """Reason to stop; None while the run goes on."""
    stopped_early: bool = field(default=False, init=False)
    """True if validations have stopped the run."""
    weights_moved: bool = field(default=False, init=False)
    """True if tensors of captured graphs were reallocated on some rank."""
    last_checkpoint: Path | None = field(default=None, init=False)
    """Checkpoint that this process saved last."""

    def __post_init__(self) -> None:
        self.progress: RunProgress = self.state.progress
        self.step.hang_detector = self.hang_detector
        self.garbage = GarbageCollection(self.config.training)
        self.callbacks = run_callbacks(
            self.config, self.garbage, self.profiler, self.user_callbacks
        )
        # Most callbacks define one hook, and a step calls only hooks that are defined.
        self._hooks = {hook: overriding(self.callbacks, hook) for hook in HOOKS}
        # The weights of a step may still be gathered while the next step begins.
        self._reads_weights = bool(overriding(self.user_callbacks, "on_step_end"))
        self.log = RunLog(
            self.config, self.groups, self.step, self.progress, self.console, self.writers
        )
        self._late: LateMetrics[StepFacts] = LateMetrics(
            self.step.numbers.numel(), self.groups.device, hang_detector=self.hang_detector
        )
        self.replicas = self._replica_check()
        self._tokens_per_pack = self.config.packing.tokens_per_pack
        self._queued: dict[int, _Queued] = {}
        self._known_fallbacks: set[str] = set()
        self._paused = False
        self._repeating = False
        self._may_save = False
        self._requested_stop = False
        self._started = time.perf_counter()
        # The checkpoint from which the run resumes need not be saved again.
        self._saved_at = self.progress.iteration or None

    @property
    def model(self) -> HybridModel:
        return self.step.model

    @property
    def optimizer(self) -> Optimizer:
        return self.step.optimizer

    @property
    def update_applied(self) -> Tensor:
        """0-d float32 on the device: 1 if the last queued step changes the weights, else 0.

        The value is 0 for a step with a non-finite value or without targets, for a skipped spike, and
        for a step that will be repeated.
        """
        return 1.0 - self.optimizer.skipped

    # ---------------------------------------------------------------------------------------------
    # the loop

    def run(self) -> ExitCode:
        """Train until the last iteration or a reason to stop, save, and return the exit code."""
        with self.garbage.in_training():
            self._may_save = True
            if self.config.training.skip_train:
                self.validate()
                evaluate_end(self, complete=True)
                return ExitCode.DONE
            self._start()
            while self.progress.iteration < self.last_iteration and self.exit_code is None:
                self._may_save = False
                previous = self._queue_next()
                self._finish(previous)
                self._call("on_step_end", self.progress.iteration)
                if self._paused:
                    self._late.restart()
                    self._paused = False
            return self._end()

    def _start(self) -> None:
        """Do the work that was due after the step at which the run resumes."""
        self._call("on_train_start")
        self._late.restart()
        if self.exit_code is None:
            self._stop_early(
                "Nothing is trained, because the run had an ", " Raise it or leave it out to go on."
            )

    def _queue_next(self) -> Arrived[StepFacts] | None:
        """Queue one step, and return the previous step, whose metrics have arrived."""
        progress, train = self.progress, self.data.train
        self.watch.step = progress.iteration + 1
        facts, packs = self._facts(progress.iteration)
        loading_begun = time.perf_counter()
        micro_batches = self.micro_batches(train, progress.iteration)
        data_wait_ms = 1e3 * (time.perf_counter() - loading_begun)
        expected = packs // self.groups.dp.size
        # With fewer packs, this rank would enter a different collective than the other ranks.
        if len(micro_batches) != expected:
            raise DataError(
                f"the data loader returned {len(micro_batches)} packs, but every rank needs {expected} per step"
            )
        counters = None if self.step.graphs is None else self.step.graphs.counters
        # The counters are totals of the run, and the log reports their increase in this step.
        previous_counts = (0, 0) if counters is None else replays_and_fallbacks(counters)
        # Keep the micro-batches until the step's metrics have arrived: the step may be repeated.
        self._queued[facts.iteration] = _Queued(micro_batches, self._rng())
        self._run_step(facts)
        self.hang_detector.beat()
        # These figures are on the host, so reading them needs no wait for the device.
        offload = self.step.model.offload
        figures = None if offload is None else self._end_offload(offload)
        facts = replace(facts, data_wait_ms=data_wait_ms, offload=figures)
        if counters is not None:
            facts = replace(facts, graphs=GraphFigures.since(previous_counts, counters))
            self._say_new_fallbacks(counters)
        # The host counts a step when the step is queued. A save first waits for the step's metrics.
        progress.consumed_packs += expected * self.groups.dp.size
        progress.iteration += 1
        progress.consumed_tokens = facts.consumed_tokens
        progress.flops += facts.flops
        return self._late.push(facts, self.step.numbers)

    def _finish(self, arrived: Arrived[StepFacts] | None) -> None:
        """Log a finished step, and stop if it is a reason to; repeat a step that the device held."""
        if arrived is None:
            return
        layout = self.step.layout
        values, counts = layout.values_of(arrived.values), layout.counts_of(arrived.values)
        if values.held:
            self._redo(arrived.facts)
            return
        del self._queued[arrived.facts.iteration]
        self.weights_moved |= values.weights_moved
        record = self.log.record(arrived, values, counts)
        fields = record.as_dict()
        if self._hooks["on_metrics"]:
            metrics = StepMetrics(fields)
            self._call("on_metrics", metrics)
            record = replace(record, callback_metrics=metrics.added)
            fields = {**fields, **metrics.added}
        self.stop(self.log.finish(record, fields, values))

    def _redo(self, facts: StepFacts) -> None:
        """Run a held step again, and then the step that was queued after it.

        A held step changed nothing, because an expert buffer overflowed. See [Note: steps that are
        done again].
        """
        self.console.say(
            f"step {facts.iteration} needed more room for experts than the bound of "
            "--moe-expert-rank-capacity-factor; the step is repeated with room for all rows."
        )
        self.bounds.room.repeats += 1
        # The following step is already queued, and the device held it as well. So it is repeated
        # after the first held step.
        following = self._late.flush()
        self._late.restart()
        self.bounds.make_room()
        rng = self._queued[facts.iteration].rng
        # The repeated steps draw the dropout masks of a run without repeats.
        if rng is not None:
            rng.restore(self.groups.device)
        self._run_step(facts, again=True)
        self._late.push(facts, self.step.numbers)
        repeated = self._late.flush()
        assert repeated is not None, "the repeated step was queued above"
        self._finish(repeated)
        # Before the next step, so that it is replayed and does not overflow like this one.
        self.bounds.raise_for(self.step.layout.counts_of(repeated.values))
        self.step.buffers.wait_params()
        self._repeating = True  # `pause` is False: the host has counted a step that has not run
        for callback in self.user_callbacks:
            self._call_one(callback, "on_step_end", facts.iteration)
        self._repeating = False
        # The host has already counted the following step. So it runs even if the run stops now.
        if following is not None:
            self._run_step(following.facts)
            self._late.push(following.facts, self.step.numbers)

    def _end(self) -> ExitCode:
        """Finish the last step, save, and evaluate a complete run on the test data."""
        # The loop ends with a step still queued. Its metrics are read before a save, and it may give
        # a reason to stop that the loop has not seen.
        self._finish(self._late.flush())
        self.step.buffers.wait_params()
        self._may_save = True
        if self.profiler is not None:
            with self.hang_detector.resting():
                self.profiler.end(self.progress.iteration)
        validates, exit_code = self.config.validation_interval, self.exit_code
        if (
            exit_code is None
            and validates
            and self.progress.validated_at != self.progress.iteration
        ):
            self.validate()
        # Save after a non-finite step, too: its update was not applied, so weights and moments are
        # valid, and the steps since the last save are not lost.
        self.save_once()
        with self.hang_detector.resting():
            self.report_saved(self.state.saved(wait=True))
        if self.exit_code == ExitCode.PREEMPTED:
            hint = _NOT_SAVED if self.config.checkpoint.save is None else _RESUME
            self.console.say(f"Stopped on request. {hint}")
        complete = self.progress.iteration >= self.last_iteration or self.stopped_early
        if self.exit_code in (None, ExitCode.DONE):
            evaluate_end(self, complete=complete)
        self.stop(ExitCode.DONE)
        self._call("on_train_end")
        assert self.exit_code is not None
        return self.exit_code

    # ---------------------------------------------------------------------------------------------
    # work of callbacks between steps

    def request_stop(self) -> None:
        """Let all ranks stop and save, as after a signal; any rank may call it, at any time.

        The run ends after the next step that is queued, or the one after it, with the exit code
        ``PREEMPTED``.
        """
        self._requested_stop = True

    def is_multiple(self, interval: int | None) -> bool:
        """Return True if the number of steps so far is a multiple of ``interval``."""
        return bool(interval and self.progress.iteration % interval == 0)

    def pause(self) -> bool:
        """Log the last step, before work between two steps that reads weights or waits for the device.

        All ranks call it together, at the end of ``on_step_end``: if the step is repeated, the hook is
        called again during the pause. The time until the next step is queued does not count as step
        time.

        Returns:
            False if the run stops, or if the hook is called for a repeated step whose following step
            has not run: the work is then left out.
        """
        if self.exit_code is not None or self._repeating:
            return False
        self._paused = True
        self._finish(self._late.flush())
        self.step.buffers.wait_params()  # gathers of parameters may still run on the device
        self._may_save = self.exit_code is None
        return self._may_save

    def stop(self, reason: ExitCode | None) -> None:
        """Stop after this step if there is a reason, which is the same on all ranks."""
        # The metrics of the last step replace a planned end.
        if reason is not None and self.exit_code in (None, ExitCode.DONE):
            self.exit_code = reason

    def validate(self) -> None:
        """Print and log the loss over the validation data, if the run has any; a collective.

        Too many validations without a lower loss stop the run.

        Raises:
            RuntimeError: a step is in flight, see `pause`.
        """
        self._check_pause("validate")
        if not self.data.validations:
            return
        metrics, improved = evaluate_validation(self)
        self._saved_at = None  # save again, so that a checkpoint records this validation
        self._call("on_validation_end", metrics)
        if improved and self.config.checkpoint.save_best and not self.config.training.skip_train:
            self.save()
        self._stop_early("Stopping: ")

    def _stop_early(self, begin: str, end: str = "") -> None:
        """Print why validations stop the run, and stop; do nothing if they do not."""
        sentence = early_stop(self.config.training.early_stopping_patience, self.progress)
        if sentence is None or self.progress.iteration >= self.last_iteration:
            return
        self.stopped_early = True
        self.console.say(f"{begin}{sentence}{end}")
        self.stop(ExitCode.DONE)

    def save_once(self) -> None:
        """Save, unless the checkpoint of this iteration is already saved."""
        if self._saved_at != self.progress.iteration:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, if ``--save`` is given; with ``--async-save`` only begin to write.

        Raises:
            RuntimeError: a step is in flight, see `pause`.
        """
        self._check_pause("save")
        if self.config.checkpoint.save is None:
            return
        with self.hang_detector.resting():
            saved = self.state.save(self.config.checkpoint)
        # With ``--async-save``, the checkpoint is not complete yet, but it needs no second save.
        self._saved_at = self.progress.iteration
        self.report_saved(saved)
        if self.progress_log is not None:
            self.progress_log.saved(self.progress, beside=self.config.checkpoint.async_save)

    def _check_pause(self, method: str) -> None:
        if not self._may_save:
            raise RuntimeError(
                f"trainer.{method}() was called while a step is in flight, whose metrics the host has not read; "
                "call it only if trainer.pause() returns True."
            )

    def report_saved(self, saved: SavedCheckpoint | None) -> None:
        """Print and log a published checkpoint; None does nothing."""
        if saved is None:
            return
        self.last_checkpoint = saved.path
        self.console.say(
            f"saved {saved.path} ({saved.num_bytes / 2**20:,.1f} MiB in {saved.seconds:.1f} s)"
        )
        self.log.saved(saved)
        for warning in saved.warnings:
            self.console.warn(warning)
        if self.progress_log is not None and self.config.checkpoint.async_save:
            self.progress_log.published(saved.step)
        self._call("on_save", saved.path)

    def _replica_check(self) -> ReplicaCheck | None:
        """Return the comparison of weights and gradients with those of other ranks, if a step has one."""
        training = self.config.training
        if not (
            training.check_weight_hash_across_dp_replicas_interval
            or training.check_grad_hash_across_dp_replicas_interval
        ):
            return None
        from megatron_packed.training.replica_checks import ReplicaCheck

        return ReplicaCheck(self.model, self.optimizer, self.groups, self.hang_detector)

    # ---------------------------------------------------------------------------------------------
    # parts of a step

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks that define it."""
        if hook == "on_step_end" and self._reads_weights:
            self.step.buffers.wait_params()
        for callback in self._hooks[hook]:
            self._call_one(callback, hook, *arguments)

    def _call_one(self, callback: Callback, hook: str, *arguments: Any) -> None:
        """Call one hook.

        Raises:
            CallbackError: a callback of the user has failed.
        """
        try:
            getattr(callback, hook)(self, *arguments)
        except Exception as error:
            if callback not in self.user_callbacks:
                raise
            raise CallbackError(callback, hook, error) from error

    def _facts(self, number: int) -> tuple[StepFacts, int]:
        """Return the numbers that the host knows of a step before the device runs it, and its packs."""
        # The host counts all steps. The device's count leaves out skipped steps, but learning rate
        # and weight decay advance with them, too.
        train, decay = self.data.train, self.weight_decay
        done = train.plan.full_steps_before(number)
        plan, packs = train.plan.step(number), train.plan.packs_of_step(number)
        lengths = train.plan.lengths_of(plan)
        real = plan.global_tokens
        facts = StepFacts(
            iteration=number + 1,
            learning_rate=self.schedule.at(done),
            weight_decay=decay.at(done) if decay.changes else None,
            real_tokens=real,
            target_tokens=plan.global_targets,
            padded_tokens=packs * self._tokens_per_pack - real,
            consumed_tokens=self.progress.consumed_tokens + real,
            num_seqs=len(lengths),
            num_packs=plan.global_packs,
            epoch=plan.epoch,
            flops=self.flops.training(lengths).total,
            plan_hash=train.plan.hash,
            dp_imbalance=plan.dp_imbalance,
        )
        return facts, packs

    def micro_batches(self, stream: Stream[AnyPlan], number: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step of a plan."""
        # The loader may have to pack an epoch first. Resting keeps the hang detector from taking
        # this wait for a hang.
        with self.hang_detector.resting():
            return stream.loader.micro_batches(number)

    def _run_step(self, facts: StepFacts, *, again: bool = False) -> None:
        """Queue a step whose micro-batches are loaded.

        Args:
            again: the device held the step, and it gets room for all experts' rows.
        """
        self.watch.step = facts.iteration
        (self.step.redo if again else self.step)(
            self._queued[facts.iteration].micro_batches,
            facts.learning_rate,
            weight_decay=facts.weight_decay,
            stop_requested=self._stop_requested(),
            checks=self._checks(facts.iteration),
        )

    def _stop_requested(self) -> bool:
        """Return True if this rank asks all ranks to stop. See [Note: when a run may stop]."""
        limit = self.config.training.exit_duration_in_mins
        # Each rank reads its own clock. The flags of all ranks are summed, so all ranks stop
        # together.
        timed_out = limit is not None and time.perf_counter() - self._started > 60 * limit
        return self.signal.received is not None or self._requested_stop or timed_out

    def _checks(self, iteration: int) -> StepChecks:
        """Return the checks that run inside a step."""
        training, replicas = self.config.training, self.replicas
        if replicas is None:
            return UNCHECKED
        weights = training.check_weight_hash_across_dp_replicas_interval
        gradients = training.check_grad_hash_across_dp_replicas_interval
        return StepChecks(
            weights=replicas.weights if weights and iteration % weights == 0 else None,
            gradients=replicas.gradients if gradients and iteration % gradients == 0 else None,
        )

    def _rng(self) -> RngState | None:
        """Return the random generators' state, if a step draws numbers and may be repeated."""
        config = self.model.config
        draws = config.hidden_dropout > 0 or (config.has_adapters and config.lora_dropout > 0)
        repeats = draws and self.model.bounds_expert_buffers
        return RngState.capture(self.groups.device) if repeats else None

    @cached_property
    def bounds(self) -> ExpertBounds:
        """Bounds of the expert buffers."""
        from megatron_packed.training.expert_bounds import ExpertBounds

        packs = self.config.packs_per_step()
        return ExpertBounds(self.step, self.groups, packs_per_step=packs, say=self.console.say)

    def observe_routing(self) -> None:
        """Set the first bounds of expert buffers from the next step's packs; a collective.

        Call it before graphs are captured, because the bounds are sizes inside the graphs.
        """
        if not self.model.bounds_expert_buffers:
            return
        if self.bounds.unknown and not self.config.training.skip_train:
            self.bounds.observe(self.micro_batches(self.data.train, self.progress.iteration))

    def _end_offload(self, offload: Offload) -> OffloadFigures | None:
        offload.end_step()
        for sentence in offload.messages():
            self.console.say(sentence)
        return offload.figures

    def _say_new_fallbacks(self, counters: GraphCounters) -> None:
        for reason in sorted(counters.fallbacks.keys() - self._known_fallbacks):
            self._known_fallbacks.add(reason)
            self.console.say(
                f"CUDA graphs: a micro-batch ran eagerly, with the same result: {reason}"
            )
