"""The loop of a run: steps, their late metrics, validation, checkpoints, and the reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_packed.checkpoint.save import SavedCheckpoint
from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.counters import GraphCounters
from megatron_packed.data.errors import DataError
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import Heartbeat
from megatron_packed.memory.offload_figures import OffloadFigures
from megatron_packed.models.flops import FlopCounter
from megatron_packed.optim.lr_schedule import Schedule
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import audit_graphs, capture_graphs
from megatron_packed.training.console import Console
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.garbage import Garbage
from megatron_packed.training.incidents import count_incidents, sentences, skip_reason
from megatron_packed.training.late_metrics import Arrived, LateMetrics
from megatron_packed.training.metric_writers import Writer
from megatron_packed.training.metrics import (
    ExpertFigures,
    GraphFigures,
    MemoryFigures,
    StepFacts,
    peak_flops,
    replays_and_fallbacks,
    step_record,
)
from megatron_packed.training.profiling import StepProfiler
from megatron_packed.training.progress_log import ProgressLog
from megatron_packed.training.replicas import ReplicaCheck, StepChecks
from megatron_packed.training.run_data import Stream
from megatron_packed.training.run_state import RunState
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.train_step import StepValues, TrainStep


@dataclass(kw_only=True)
class Trainer:
    """Runs a training job that is already built; the same on every rank.

    [Note: when a run may stop]
    What all ranks must decide alike (a signal, a non-finite step, graphs that one rank must capture
    again) is read from the all-reduced metrics of the step before, at the same place on every rank.
    Time limits are rank 0's clock and travel as a signal does.
    """

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    state: RunState
    schedule: Schedule
    last_iteration: int
    """At which the run ends."""
    train: Stream
    valid: Stream | None
    test: Stream | None
    flops: FlopCounter
    console: Console
    writers: list[Writer]
    signal: SignalFlag
    watch: FailureWatch
    heartbeat: Heartbeat | None = None
    """Where the device may wait for others without end."""
    profiler: StepProfiler | None = None
    progress_log: ProgressLog | None = None

    def __post_init__(self) -> None:
        told = {} if self.heartbeat is None else {"waits": self.heartbeat.waits}
        self._late: LateMetrics[StepFacts] = LateMetrics(
            self.step.numbers.numel(), self.groups.device, **told
        )
        if self.heartbeat is not None:
            self.step.beat = self.heartbeat.beat
        self._garbage = Garbage(self.config.training)
        self._peak = peak_flops(self.groups.device)
        self._complained: list[Writer] = []
        self._in_flight: dict[
            int, list[MicroBatch]
        ] = {}  # iteration -> its micro-batches, until its metrics are there
        self._known_fallbacks: set[str] = set()
        self._weights_moved = False
        self._started = time.perf_counter()
        # A run that resumes at its last iteration has nothing new to save.
        self._saved_at = self.state.progress.iteration or None

    def run(self) -> ExitCode:
        """Trains until the last iteration or a reason to stop, saves, and says which it was."""
        with self._garbage.in_training():
            return self._run()

    def _run(self) -> ExitCode:
        training, progress = self.config.training, self.state.progress
        exit_code = None
        if training.skip_train:
            self.validate()
            self.evaluate_test()
            return ExitCode.DONE
        if (
            self._due(training.validation_interval)
            and 0 < progress.iteration != progress.validated_at
        ):
            self.validate()  # was due when the run was stopped, which saved at once
        if self._profiler_turns():
            self._turn_profiler()
        self._late.restart()
        while progress.iteration < self.last_iteration and exit_code is None:
            exit_code = self._settle(self._one_step())
            self._garbage.after_step(progress.iteration)
            self._say_saved(self.state.saved())
            if exit_code is None and self._due(
                training.check_weight_hash_across_dp_replicas_interval
            ):
                exit_code = self._pause(self._replicas.weights)
            if exit_code is None and self._validation_due():
                exit_code = self._pause(self.validate)
            if exit_code is None and self._due(self.config.checkpoint.save_interval):
                exit_code = self._pause(self.save)
            if exit_code is None and self._weights_moved:
                exit_code = self._pause(self._capture_again)
            if exit_code is None and self._due(self.config.cuda_graph.cuda_graph_audit_interval):
                exit_code = self._pause(self.audit)
            if exit_code is None and self._profiler_turns():
                exit_code = self._pause(self._turn_profiler)
            if exit_code is None and self._due(training.exit_interval):
                self.console.say(
                    f"Iteration {progress.iteration} is a multiple of --exit-interval: stopping."
                )
                exit_code = ExitCode.DONE
        late = self._settle(self._late.flush())
        self.step.buffers.wait_params()
        if self.profiler is not None:
            with self._resting():
                self.profiler.end(progress.iteration)
        if late is not None and exit_code in (None, ExitCode.DONE):
            exit_code = late
        if (
            exit_code is None
            and training.validation_interval
            and progress.validated_at != progress.iteration
        ):
            self.validate()
        # After a non-finite step, too: weights and moments are clean, and nothing learned since the
        # last save is lost.
        if self._saved_at != progress.iteration:
            self.save()
        with self._resting():
            self._say_saved(self.state.saved(wait=True))
        if exit_code == ExitCode.PREEMPTED:
            kept = self.config.checkpoint.save is not None
            hint = (
                "Run the same command again to go on."
                if kept
                else "Nothing is kept: there is no --save."
            )
            self.console.say(f"Stopped on request. {hint}")
        if exit_code in (None, ExitCode.DONE) and progress.iteration >= self.last_iteration:
            self.evaluate_test()
        return ExitCode.DONE if exit_code is None else exit_code

    def validate(self) -> float | None:
        """Loss in nats per target token over the validation plan, on all ranks; None without
        validation data.
        """
        if self.valid is None:
            return None
        loss = self._evaluate(self.valid, "validation", "valid")
        self.state.progress.validated_at = self.state.progress.iteration
        self._saved_at = None  # a checkpoint of this iteration would not know of it
        return loss

    def evaluate_test(self) -> float | None:
        """As `validate`, over the test plan; None without test data."""
        return None if self.test is None else self._evaluate(self.test, "test", "test")

    def _evaluate(self, stream: Stream, name: str, field: str) -> float:
        """Loss in nats per target token over a finite plan, on all ranks: said, and written as
        ``{field}_loss``.
        """
        targets = 0
        self.step.validation_loss.zero_()
        with self._garbage.in_validation():
            for number in range(stream.plan.num_steps):
                targets += stream.plan.step(number).global_targets
                for micro_batch in self._loaded(stream, number):
                    self.step.validate(micro_batch)
        if self.heartbeat is not None:  # a whole validation may be queued by now
            self.step.beat()
            self.heartbeat.wait()
        loss_sum = all_reduce_sum(self.step.validation_loss, self.groups.dp_cp_group).item()
        loss = loss_sum / targets if targets else float("nan")
        iteration = self.state.progress.iteration
        self.console.say(f"{name} at step {iteration}: loss {loss:.4f} over {targets:,.0f} tokens")
        self._write(
            {
                "iteration": iteration,
                f"{field}_loss": loss,
                f"{field}_target_tokens": targets,
                "plan_hash": stream.plan.hash,
            }
        )
        return loss

    def audit(self) -> None:
        """Compares replay and eager on a micro-batch of the next step, if one of them would be
        replayed.

        Raises:
            AuditMismatchError: they differ.
        """
        graphs, progress = self.step.graphs, self.state.progress
        if graphs is None:
            return
        begun = time.perf_counter()
        for micro_batch in self.train.loader.micro_batches(progress.iteration):
            found = audit_graphs(
                graphs,
                self.step,
                micro_batch,
                deterministic=self.config.training.deterministic_mode,
                seed=progress.iteration,
            )
            if found is not None:
                seconds = time.perf_counter() - begun
                self.console.say(f"audit at step {progress.iteration}: {found}, in {seconds:.1f} s")
                return
        self.console.say(
            f"audit at step {progress.iteration}: no micro-batch of the next step would be replayed"
        )

    def _profiler_turns(self) -> bool:
        return self.profiler is not None and self.profiler.turns_at(self.state.progress.iteration)

    def _turn_profiler(self) -> None:
        assert self.profiler is not None
        with self._resting():
            self.profiler.turn(self.state.progress.iteration)

    def save(self) -> None:
        """A checkpoint of now, if ``--save`` is given; with ``--async-save`` only begun."""
        if self.config.checkpoint.save is None:
            return
        with self._resting():
            saved = self.state.save(self.config.checkpoint)
        self._saved_at = self.state.progress.iteration
        self._say_saved(saved)
        if self.progress_log is not None:
            self.progress_log.saved(self.state.progress, beside=self.config.checkpoint.async_save)

    def _resting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.heartbeat is None else self.heartbeat.resting()

    def _say_saved(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        self.console.say(
            f"saved {saved.path} ({saved.num_bytes / 2**20:,.1f} MiB in {saved.seconds:.1f} s)"
        )
        for warning in saved.warnings:
            self.console.warn(warning)
        if self.progress_log is not None and self.config.checkpoint.async_save:
            self.progress_log.published(saved.step)

    def _one_step(self) -> Arrived[StepFacts] | None:
        """Queues one step and takes the one before it."""
        progress = self.state.progress
        self.watch.step = progress.iteration + 1
        lr = self.schedule.at(progress.iteration)
        facts = self._facts(progress.iteration, lr)
        begun = time.perf_counter()
        micro_batches = self._micro_batches(progress.iteration)
        facts = replace(facts, data_wait_ms=1e3 * (time.perf_counter() - begun))
        counters = None if self.step.graphs is None else self.step.graphs.counters
        before = (0, 0) if counters is None else replays_and_fallbacks(counters)
        self._in_flight[facts.iteration] = micro_batches
        self.step(
            micro_batches,
            lr,
            stop_requested=self._stop_requested(),
            checks=self._checks(facts.iteration),
        )
        self.step.beat()
        facts = replace(facts, offload=self._end_offload())
        if counters is not None:
            facts = replace(facts, graphs=GraphFigures.since(before, counters))
            self._say_new_fallbacks(counters)
        progress.iteration += 1
        progress.consumed_packs += self.config.packs_per_step()
        progress.consumed_tokens = facts.consumed_tokens
        progress.flops += facts.flops
        return self._late.push(facts, self.step.numbers)

    def _end_offload(self) -> OffloadFigures | None:
        offload = self.step.model.offload
        if offload is None:
            return None
        offload.end_step()
        for sentence in offload.news():
            self.console.say(sentence)
        return offload.figures

    def _micro_batches(self, number: int) -> list[MicroBatch]:
        """Of this rank in a step; a rank with fewer than the others would wait for them in the
        wrong collective.
        """
        micro_batches = self._loaded(self.train, number)
        expected = self.config.packs_per_step() // self.groups.dp_size
        if len(micro_batches) != expected:
            raise DataError(
                f"the loader gave {len(micro_batches)} packs, but in a step every rank has {expected}"
            )
        return micro_batches

    def _loaded(self, stream: Stream, number: int) -> list[MicroBatch]:
        """An epoch may have to be packed for it, in the loader's thread."""
        with self._resting():
            return stream.loader.micro_batches(number)

    @cached_property
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(self.step.model, self.step.optimizer, self.groups, self._idle)

    def _checks(self, iteration: int) -> StepChecks:
        """Return what is checked inside a step."""
        training = self.config.training
        weights = training.check_weight_hash_across_dp_replicas_interval
        gradients = training.check_grad_hash_across_dp_replicas_interval
        return StepChecks(
            weights=self._replicas.weights if weights and iteration % weights == 0 else None,
            gradients=self._replicas.gradients
            if gradients and iteration % gradients == 0
            else None,
        )

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Wait for the device, and rest inside."""
        if self.heartbeat is not None:
            self.step.beat()
            self.heartbeat.wait()
        with self._resting():
            yield

    def _capture_again(self) -> None:
        assert self.step.graphs is not None
        self.console.say("weights have moved to other memory: CUDA graphs are captured again")
        capture_graphs(self.step.graphs, self.step, self.config.packs_per_step(), self.groups)
        self._weights_moved = False

    def _say_new_fallbacks(self, counters: GraphCounters) -> None:
        for reason in sorted(counters.fallbacks.keys() - self._known_fallbacks):
            self._known_fallbacks.add(reason)
            self.console.say(
                f"CUDA graphs: a micro-batch ran eagerly, with the same result: {reason}"
            )

    def _facts(self, number: int, lr: float) -> StepFacts:
        plan = self.train.plan.step(number)
        lengths = self.train.lengths(plan)
        real = plan.global_tokens
        slots = self.config.packs_per_step() * self.config.packing.tokens_per_pack
        return StepFacts(
            iteration=number + 1,
            learning_rate=lr,
            real_tokens=real,
            target_tokens=plan.global_targets,
            padded_tokens=slots - real,
            consumed_tokens=self.state.progress.consumed_tokens + real,
            num_seqs=len(lengths),
            num_packs=plan.global_packs,
            epoch=plan.epoch,
            flops=self.flops.training(lengths).total,
            plan_hash=self.train.plan.hash,
            dp_imbalance=plan.dp_imbalance,
        )

    def _settle(self, arrived: Arrived[StepFacts] | None) -> ExitCode | None:
        """Takes a finished step, or does it again if it was held; the exit code if it is a reason
        to stop.
        """
        if arrived is None:
            return None
        if self._values(arrived).held:
            return self._redo(arrived.facts)
        del self._in_flight[arrived.facts.iteration]
        return self._handle(arrived)

    def _values(self, arrived: Arrived[StepFacts]) -> StepValues:
        return StepValues.from_list(arrived.values[: self.step.metrics.numel()])

    def _redo(self, facts: StepFacts) -> ExitCode | None:
        """The step again, and behind it the one that was queued meanwhile. Reads: [Note: steps that
        are done again].
        """
        self.console.say(
            f"step {facts.iteration} needed more room for experts than --moe-expert-rank-capacity-factor leaves; it is "
            "done again with room for all of its tokens."
        )
        behind = self._late.flush()
        self._late.restart()
        self.step.redo(
            self._in_flight[facts.iteration],
            facts.learning_rate,
            stop_requested=self._stop_requested(),
            checks=self._checks(facts.iteration),
        )
        self._late.push(facts, self.step.numbers)
        exit_code = self._settle(self._late.flush())
        if behind is not None:  # it counts as done, whatever comes next
            micro_batches = self._in_flight[behind.facts.iteration]
            self.step(
                micro_batches,
                behind.facts.learning_rate,
                stop_requested=self._stop_requested(),
                checks=self._checks(behind.facts.iteration),
            )
            self._late.push(behind.facts, self.step.numbers)
        return exit_code

    def _handle(self, arrived: Arrived[StepFacts] | None) -> ExitCode | None:
        """Logs a finished step; the exit code if it is a reason to stop. See [Note: when a run may
        stop].
        """
        if arrived is None:
            return None
        training, progress = self.config.training, self.state.progress
        values, counts = self._values(arrived), self.step.counts_of(arrived.values)
        self._weights_moved |= values.weights_moved
        record = step_record(
            arrived.facts,
            loss=values.loss,
            aux_loss=values.aux_loss,
            grad_norm=values.grad_norm,
            skip_reason=skip_reason(values, training),
            medians={spike.name: spike.median for spike in values.spikes},
            seconds=max(arrived.seconds, 1e-9),
            world_size=self.groups.world_size,
            peak=self._peak,
            memory=MemoryFigures.now(self.groups.device),
            experts=ExpertFigures.of(
                counts["expert_counts"],
                self.step.model.num_moe_layers,
                arrived.facts.iteration,
                counts.get("dropped_assignments"),
            ),
            params_norm=values.params_norm if self.config.logging.log_params_norm else None,
            num_zeros=values.grad_zeros if self.config.logging.log_num_zeros_in_grad else None,
        )
        self.console.step(record)
        self._write(record.as_dict())
        count_incidents(progress, values, training)
        for sentence in sentences(
            record.iteration, values, progress, training, self.groups.tp_cp_size
        ):
            self.console.warn(sentence)
        if values.nonfinite and training.on_nonfinite == "stop":
            self.console.say(
                "Stopping, as --on-nonfinite stop asks; --on-nonfinite skip would go on."
            )
            return ExitCode.NONFINITE
        return ExitCode.PREEMPTED if values.stop_requested else None

    def _stop_requested(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        timed_out = limit is not None and time.perf_counter() - self._started > 60 * limit
        return self.signal.received is not None or timed_out

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.state.progress.iteration % interval == 0

    def _validation_due(self) -> bool:
        """At the last step, too: before its checkpoint, which knows of it then and is written once."""
        interval = self.config.training.validation_interval
        return self._due(interval) or (
            bool(interval) and self.state.progress.iteration == self.last_iteration
        )

    def _pause(self, action: Callable[[], object]) -> ExitCode | None:
        """Runs something that is no step: the last step's metrics are logged first, its time counts
        for no step.
        """
        exit_code = self._settle(self._late.flush())
        self.step.buffers.wait_params()
        if exit_code is None:
            action()
        self._late.restart()
        return exit_code

    def _write(self, record: dict[str, object]) -> None:
        """Numbers that cannot be kept (a full disk) are worth a warning, not the run."""
        for writer in self.writers:
            try:
                writer.write(record)
            except OSError as error:
                if writer not in self._complained:
                    self.console.warn(
                        f"the numbers of this run cannot be written: {error}; it goes on without them."
                    )
                    self._complained.append(writer)
