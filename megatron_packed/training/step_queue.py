"""Queue of training steps: each step is queued on the device, and its metrics are read one step late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters
from megatron_packed.data.errors import DataError
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import RngState
from megatron_packed.inputs.run_data import Stream
from megatron_packed.memory.offload_figures import OffloadFigures
from megatron_packed.models.flops import FlopCounter
from megatron_packed.optim.lr_schedule import Schedule
from megatron_packed.optim.weight_decay_schedule import WeightDecaySchedule
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.step_record import GraphFigures, StepFacts, replays_and_fallbacks
from megatron_packed.training.expert_bounds import ExpertBounds
from megatron_packed.training.late_metrics import Arrived, LateMetrics
from megatron_packed.training.replica_checks import StepChecks
from megatron_packed.training.train_step import TrainStep


class _Queued(NamedTuple):
    """Arguments of a queued step, for its repeat."""

    micro_batches: Sequence[MicroBatch]
    rng: RngState | None
    """Random generators before the step; None if a repeat draws no random numbers."""


@dataclass(kw_only=True)
class StepQueue:
    """Queue of the current and the previous step. See [Note: late metrics protocol]."""

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    progress: RunProgress
    """Progress of the run, advanced whenever a step is queued."""
    schedule: Schedule
    weight_decay: WeightDecaySchedule
    train: Stream[PackPlan]
    flops: FlopCounter
    console: Console
    watch: FailureWatch
    load: Callable[[Stream[PackPlan], int], list[MicroBatch]]
    checks: Callable[[int], StepChecks]
    """Returns the checks that run in an iteration."""
    stop_requested: Callable[[], bool]
    waits: Callable[[], None]
    """Function that is called repeatedly while the host waits for a step."""

    def __post_init__(self) -> None:
        self._late: LateMetrics[StepFacts] = LateMetrics(
            self.step.numbers.numel(), self.groups.device, waits=self.waits
        )
        self._queued: dict[int, _Queued] = {}
        self._known_fallbacks: set[str] = set()

    @property
    def _plan(self) -> PackPlan:
        return self.train.plan

    @cached_property
    def bounds(self) -> ExpertBounds:
        """Bounds of the expert buffers."""
        packs = self.config.packs_per_step()
        return ExpertBounds(self.step, self.groups, packs_per_step=packs, say=self.console.say)

    def observe_routing(self) -> None:
        """Set the first bounds of expert buffers from the next step's packs; a collective.

        Call it before graphs are captured, because the bounds are sizes inside the graphs.
        """
        if self.bounds.unknown and not self.config.training.skip_train:
            self.bounds.observe(self.load(self.train, self.progress.iteration))

    def flush(self) -> Arrived[StepFacts] | None:
        """Wait for the last step that was queued."""
        return self._late.flush()

    def restart(self) -> None:
        """Start the time measurement of the next step now."""
        self._late.restart()

    def forget(self, facts: StepFacts) -> None:
        """Release the micro-batches of a step that was applied."""
        del self._queued[facts.iteration]

    def queue_next(self) -> Arrived[StepFacts] | None:
        """Queue one step, and return the previous step, whose metrics have arrived."""
        progress = self.progress
        self.watch.step = progress.iteration + 1
        facts = self._facts(progress.iteration)
        begun = time.perf_counter()
        micro_batches = self._micro_batches(progress.iteration)
        facts = replace(facts, data_wait_ms=1e3 * (time.perf_counter() - begun))
        counters = None if self.step.graphs is None else self.step.graphs.counters
        # The counters are totals of the run, and the log reports their increase in this step.
        before = (0, 0) if counters is None else replays_and_fallbacks(counters)
        # Keep the micro-batches until the step's metrics have arrived: `redo` may need them.
        self._queued[facts.iteration] = _Queued(micro_batches, self._rng())
        self.step(
            micro_batches,
            facts.learning_rate,
            weight_decay=facts.weight_decay,
            stop_requested=self.stop_requested(),
            checks=self.checks(facts.iteration),
        )
        self.step.beat()
        # These figures are on the host, so reading them needs no wait for the device.
        facts = replace(facts, offload=self._end_offload())
        if counters is not None:
            facts = replace(facts, graphs=GraphFigures.since(before, counters))
            self._say_new_fallbacks(counters)
        # The host counts a step when the step is queued. A save first waits for the step's metrics.
        progress.consumed_packs += self._plan.packs_of_step(progress.iteration)
        progress.iteration += 1
        progress.consumed_tokens = facts.consumed_tokens
        progress.flops += facts.flops
        return self._late.push(facts, self.step.numbers)

    def _end_offload(self) -> OffloadFigures | None:
        offload = self.step.model.offload
        if offload is None:
            return None
        offload.end_step()
        for sentence in offload.messages():
            self.console.say(sentence)
        return offload.figures

    def _micro_batches(self, number: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step."""
        micro_batches = self.load(self.train, number)
        expected = self._plan.packs_of_step(number) // self.groups.dp.size
        # With fewer packs, this rank would enter a different collective than the other ranks.
        if len(micro_batches) != expected:
            raise DataError(
                f"the data loader returned {len(micro_batches)} packs, but every rank needs {expected} per step"
            )
        return micro_batches

    def _rng(self) -> RngState | None:
        """Return the random generators' state, if a step draws numbers and may be repeated."""
        model = self.step.model
        draws = model.config.hidden_dropout > 0 and model.bounds_expert_buffers
        return RngState.capture(self.groups.device) if draws else None

    def _say_new_fallbacks(self, counters: GraphCounters) -> None:
        for reason in sorted(counters.fallbacks.keys() - self._known_fallbacks):
            self._known_fallbacks.add(reason)
            self.console.say(
                f"CUDA graphs: a micro-batch ran eagerly, with the same result: {reason}"
            )

    def _facts(self, number: int) -> StepFacts:
        """Return the numbers of a step that the host knows before the device runs it."""
        # The host counts all steps. The device's count leaves out skipped steps, but learning rate
        # and weight decay advance with them, too.
        done = self._plan.full_steps_before(number)
        decay = self.weight_decay
        plan = self._plan.step(number)
        lengths = self.train.lengths(plan)
        real = plan.global_tokens
        slots = self._plan.packs_of_step(number) * self.config.packing.tokens_per_pack
        return StepFacts(
            iteration=number + 1,
            learning_rate=self.schedule.at(done),
            weight_decay=decay.at(done) if decay.changes else None,
            real_tokens=real,
            target_tokens=plan.global_targets,
            padded_tokens=slots - real,
            consumed_tokens=self.progress.consumed_tokens + real,
            num_seqs=len(lengths),
            num_packs=plan.global_packs,
            epoch=plan.epoch,
            flops=self.flops.training(lengths).total,
            plan_hash=self.train.plan.hash,
            dp_imbalance=plan.dp_imbalance,
        )

    def redo(
        self, facts: StepFacts, take_redone: Callable[[Arrived[StepFacts] | None], ExitCode | None]
    ) -> ExitCode | None:
        """Run a held step again, and then the step that was queued after it.

        See [Note: steps that are done again].

        Args:
            facts: numbers of the held step.
            take_redone: handles the repeated step as a finished step.
        Returns:
            The exit code if the repeated step is a reason to stop; otherwise None.
        """
        self.console.say(
            f"step {facts.iteration} needed more room for experts than the bound of "
            "--moe-expert-rank-capacity-factor; the step is repeated with room for all rows."
        )
        self.bounds.room.repeats += 1
        # The following step is already queued, and the device held it as well. So it is repeated
        # after the first held step.
        after = self._late.flush()
        self._late.restart()
        self.bounds.make_room()
        micro_batches, rng = self._queued[facts.iteration]
        # The repeated steps draw the dropout masks of a run without repeats.
        if rng is not None:
            rng.restore(self.groups.device)
        self.step.redo(
            micro_batches,
            facts.learning_rate,
            weight_decay=facts.weight_decay,
            stop_requested=self.stop_requested(),
            checks=self.checks(facts.iteration),
        )
        self._late.push(facts, self.step.numbers)
        redone = self._late.flush()
        assert redone is not None, "the repeated step was queued above"
        exit_code = take_redone(redone)
        # Before the next step, so that it is replayed and does not overflow like this one.
        self.bounds.raise_for(self.step.layout.counts_of(redone.values))
        # The host has already counted the following step. So it runs even if the run stops now.
        if after is not None:
            self.step(
                self._queued[after.facts.iteration].micro_batches,
                after.facts.learning_rate,
                weight_decay=after.facts.weight_decay,
                stop_requested=self.stop_requested(),
                checks=self.checks(after.facts.iteration),
            )
            self._late.push(after.facts, self.step.numbers)
        return exit_code
