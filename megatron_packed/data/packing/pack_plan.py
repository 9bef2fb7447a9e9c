"""Pack plan of training: the step, data-parallel rank, micro-batch and pack of every piece.

The plan is a pure function of (document lengths, packing rules, seed, epoch). Every rank computes
the plan itself, without communication. The packs of all epochs form one endless stream. With P
packs per step over all ranks, step s uses packs ``s * P`` to ``(s + 1) * P - 1`` of the stream.
The packs, targets and loss of a step therefore do not depend on the number of data-parallel ranks.
A run that resumes with another P continues at the same place of the stream (`PackPlan.resume`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import ClassVar

from megatron_packed.config.sections.packing import BatchRamp, BatchStage, stage_of
from megatron_packed.data.packing.packer import Packs
from megatron_packed.data.packing.step_plan import (
    PieceNumbers,
    PieceTable,
    StepPlan,
    spread,
)
from megatron_packed.packed.array_types import Float64Array

_KEPT_STEPS = 4
"""Plans of single steps that are kept, for the loader and the training loop."""


@dataclass(kw_only=True, eq=False)
class PackPlan(PieceTable):
    """Endless plan of the packs of training.

    Args:
        ramp: growth of P at the start of the run; ``packs_per_step`` is then the final P.
        epoch_starts: place in the stream of the first pack of each epoch whose start is known, of
            an earlier plan with the same `hash`. With this argument a run that resumes in a later
            epoch does not pack the earlier epochs again. The argument does not change the packs.
    For other arguments and errors see `PieceTable`.
    """

    num_steps: ClassVar[None] = None
    """Number of steps; an endless plan has none."""
    ramp: BatchRamp | None = None
    epoch_starts: Sequence[int] = (0,)
    """Place in the stream of the first pack of each epoch whose start is known. The last entry
    belongs to an epoch that is not packed yet.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch_starts = tuple(self.epoch_starts)
        self._epochs: OrderedDict[int, Packs] = OrderedDict()
        self._steps: OrderedDict[int, StepPlan] = OrderedDict()
        self._lock = threading.Lock()
        constant = [BatchStage(0, 0, self.packs_per_step)]
        self._stages = constant if self.ramp is None else self.ramp.stages()

    @property
    def origin(self) -> int:
        """Place in the stream where step 0 would begin with `packs_per_step` packs in every step.

        The value is 0 unless some steps of the run have another number of packs. The value is
        negative if they have fewer packs.
        """
        last = self._stages[-1]
        return last.pack - last.step * last.packs

    def packs_of_step(self, step: int) -> int:
        """Return the number of packs of a step, over all ranks."""
        return self._stage(step).packs

    def full_steps_before(self, step: int) -> float:
        """Return the step that would begin at the same place if every step had `packs_per_step`
        packs and began at `origin`.
        """
        return (self._first_pack(step) - self.origin) / self.packs_per_step

    def _stage(self, step: int) -> BatchStage:
        # Most runs have steps of one size.
        return self._stages[0] if len(self._stages) == 1 else stage_of(self._stages, step)

    def _first_pack(self, step: int) -> int:
        stage = self._stage(step)
        return stage.pack + (step - stage.step) * stage.packs

    def resume(self, step: int, pack: int, samples: int = 0) -> None:
        """Let ``step`` begin with the given pack of the stream (counted from 0).

        Later steps continue from there. ``samples`` are those of the run so far, which decide the
        batch size while it grows.
        """
        with self._lock:
            self._steps.clear()
            if self.ramp is not None:
                self._stages = self.ramp.stages(step, pack, samples)
            else:
                packs = self.packs_per_step
                self._stages = [BatchStage(0, pack - step * packs, packs)]

    @property
    def room(self) -> int | None:
        """Largest number of documents that the CUDA graphs can hold; see `Packer.room`."""
        return self.packer.room

    def epoch(self, epoch: int) -> Packs:
        """Return all packs of one epoch, in training order.

        The last two epochs are cached, because the packs of a step may come from two epochs.
        """
        with self._lock:
            return self._epoch(epoch)

    def packs_of(self, epochs: float) -> int:
        """Return the number of packs of the first ``epochs`` epochs, rounded up.

        Each epoch may have another number of packs, so all of them are packed once.
        """
        # The shortest decimal that gives the float: 0.1 of 10 packs is 1 pack, not 2.
        exact = Fraction(repr(epochs))
        full_epochs, last = exact.numerator // exact.denominator, ceil(exact)
        with self._lock:
            while len(self.epoch_starts) <= last:
                number = len(self.epoch_starts) - 1
                # Not `_epoch`: the cache must keep the epochs that training begins with.
                packs = self._epochs.get(number)
                packs = self.pack(number) if packs is None else packs
                self.epoch_starts = (*self.epoch_starts, self.epoch_starts[number] + len(packs))
            first, end = self.epoch_starts[full_epochs], self.epoch_starts[last]
        return first + ceil((exact - full_epochs) * (end - first))

    def epochs_of(self, first: int, stop: int) -> Iterator[Packs]:
        """Yield the epochs that contain packs ``first`` to ``stop - 1`` of the stream.

        At least the epoch of pack ``first`` is yielded.
        """
        with self._lock:
            number = self._epoch_of(first)
        while True:
            yield self.epoch(number)
            number += 1
            if self.epoch_starts[number] >= stop:
                return

    def step(self, step: int) -> StepPlan:
        """Return the plan of one step, counted from 0. Several threads may call this method."""
        with self._lock:
            plan = self._steps.get(step)
            if plan is not None:
                return plan
            first, count = self._first_pack(step), self.packs_of_step(step)
            earliest = self._stages[0]
            if step < earliest.step or first < 0:
                at = earliest.step + max(-(earliest.pack // earliest.packs), 0)
                raise ValueError(f"step is {step}; the first step of this plan is {at}.")
            epoch = self._epoch_of(first)
            packs: list[PieceNumbers] = []
            at, number = first - self.epoch_starts[epoch], epoch
            while len(packs) < count:
                packs += self._epoch(number).part(at, count - len(packs))
                at, number = 0, number + 1
            plan = self.deal(step, epoch, packs)
            # The loader prepares a step before the training loop asks for its numbers.
            self._steps[step] = plan
            while len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
            return plan

    def dp_imbalance(self, epoch: int = 0) -> Float64Array:
        """Return `StepPlan.dp_imbalance` of every full step of one epoch's packs.

        If the epoch has fewer packs than a step, the step is filled up with empty packs.
        """
        packs = self.epoch(epoch)
        costs = self.cost.estimate(packs.sums(self.pieces.length), packs.sums(self.squares))
        steps = max(len(costs) // self.packs_per_step, 1)
        costs.resize(
            steps * self.packs_per_step, refcheck=False
        )  # drop the packs of an incomplete step, or add empty packs to the only step
        return spread(costs.reshape(steps, -1), self.dp_size).imbalance_S

    def keeping_to(self, room: int) -> PackPlan:
        """Return this plan with the limit ``room`` for the documents of a pack.

        Only epochs that have a pack of more than ``room`` documents are packed differently; see
        `Packer.room`. If the first epoch is already packed and within the limit, it is reused.
        """
        plan = replace(self, packer=self.packer.keeping_to(room), epoch_starts=(0,))
        with self._lock:
            first = self._epochs.get(0)
        if first is not None and first.documents_per_pack.max() <= room:
            plan._epochs[0] = first
            plan.epoch_starts = (0, len(first))
        return plan

    def _epoch_of(self, pack: int) -> int:
        """Return the epoch that contains a pack of the stream.

        Earlier epochs are packed if their numbers of packs are not known.
        """
        while pack >= self.epoch_starts[-1]:
            self._epoch(len(self.epoch_starts) - 1)
        return bisect_right(self.epoch_starts, pack) - 1

    def _epoch(self, epoch: int) -> Packs:
        packs = self._epochs.get(epoch)
        if packs is None:
            packs = self.pack(epoch)
            self._epochs[epoch] = packs
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
            end = self.epoch_starts[epoch] + len(packs) if epoch < len(self.epoch_starts) else None
            if epoch == len(self.epoch_starts) - 1:
                self.epoch_starts = (*self.epoch_starts, self.epoch_starts[epoch] + len(packs))
            elif end is not None and end != self.epoch_starts[epoch + 1]:
                raise ValueError(
                    f"epoch {epoch} has {len(packs)} packs, but epoch_starts gives it "
                    f"{self.epoch_starts[epoch + 1] - self.epoch_starts[epoch]}; epoch_starts comes from a plan with "
                    "other data or packing rules."
                )
        return packs
