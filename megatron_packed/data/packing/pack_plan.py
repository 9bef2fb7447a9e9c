"""The pack plan: which pieces of documents share a pack, in which step, on which data-parallel
rank, in which micro-batch.

A pure function of (document lengths, packing rules, seed, epoch) that every rank computes for
itself. Packs form one endless stream, epoch after epoch; step s takes packs ``s * P`` to ``(s + 1)
* P`` of it (P packs per step, over all ranks), so a step's packs, targets and loss do not depend on
the number of data-parallel ranks. P decides nothing else: a run that goes on with another P takes
the stream up where it was (`PackPlan.resume`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.packer import Packer, Packs
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.rank_balance import BY_TOKENS, PackCost, spread
from megatron_packed.data.packing.step_plan import (
    PieceNumbers,
    PieceTable,
    StepPlan,
    check_ranks,
)
from megatron_packed.data.source_blend import SourceBlend


class PackPlan:
    """The endless plan of training.

    Args:
        pieces: the pieces of the data set.
        targets: ``(S,)`` target tokens of each piece (`token_accounting.cut_documents`).
        packer: the packing rules; no piece is longer than ``packer.slots``.
        packs_per_step: P, over all ranks: ``global_batch_size // micro_batch_size``.
        dp_size: data-parallel ranks; divides P.
        seed: of the data order.
        cost: estimated work on a pack, by which a step's packs are dealt out to the ranks. No part
            of ``hash``: it decides who computes, not what.
        blend: which pieces each epoch holds; None for every piece once.
        epoch_starts: what an earlier plan with equal `hash` reported under this name; spares a run
            that resumes in a late epoch from packing the earlier ones again. Changes no result.
        show_progress: shows how far packing is, where the main thread waits for it.
    Raises:
        ValueError: no pieces, as many target counts as pieces are not given, or P is not divisible
            by dp_size.
    """

    def __init__(
        self,
        pieces: Pieces,
        targets: NDArray[np.integer],
        *,
        packer: Packer,
        packs_per_step: int,
        dp_size: int = 1,
        seed: int = 0,
        cost: PackCost = BY_TOKENS,
        blend: SourceBlend | None = None,
        epoch_starts: Sequence[int] = (0,),
        show_progress: bool = False,
    ) -> None:
        check_ranks(packs_per_step, dp_size)
        self._table = PieceTable(pieces, targets, packer, seed, cost, blend, show_progress)
        self.packs_per_step = packs_per_step
        self.dp_size = dp_size
        self._starts = list(epoch_starts)
        """First pack of each epoch that is known, in the stream; the last entry starts an epoch not
        yet packed.
        """
        self._epochs: OrderedDict[int, Packs] = OrderedDict()
        self._lock = threading.Lock()
        self._origin = 0
        self.hash = self._table.hash(packs_per_step)

    @property
    def pieces(self) -> Pieces:
        return self._table.pieces

    @property
    def origin(self) -> int:
        """Place in the stream where step 0 would begin: not 0 in a run whose earlier steps had
        another number of packs, and negative where they had fewer.
        """
        return self._origin

    def resume(self, step: int, pack: int) -> None:
        """From now on ``step`` begins with the given pack of the stream (0 the first), and later
        steps follow it.
        """
        with self._lock:
            self._origin = pack - step * self.packs_per_step

    def hash_with(self, packs_per_step: int) -> str:
        """`hash` of the same stream divided into steps of another number of packs."""
        return self._table.hash(packs_per_step)

    @property
    def blend(self) -> SourceBlend | None:
        return self._table.blend

    @property
    def alignment(self) -> int:
        """Pieces begin and end at multiples of it in their pack."""
        return self._table.packer.alignment

    @property
    def room(self) -> int | None:
        """Documents that packs keep to; see `Packer.room`."""
        return self._table.packer.room

    @property
    def epoch_starts(self) -> tuple[int, ...]:
        """Place in the stream of the first pack of each epoch known so far; see the argument of the
        same name.
        """
        with self._lock:
            return tuple(self._starts)

    def epoch(self, epoch: int) -> Packs:
        """All packs of one epoch, in training order. Two epochs are kept, since a step may reach
        into the next.
        """
        with self._lock:
            return self._epoch(epoch)

    def epochs_of(self, first: int, stop: int) -> Iterator[Packs]:
        """The epochs that hold packs ``first`` to ``stop - 1`` of the stream, and at least the
        first of them.
        """
        with self._lock:
            number = self._epoch_of(first)
        while True:
            yield self.epoch(number)
            number += 1
            if self.epoch_starts[number] >= stop:
                return

    def step(self, step: int) -> StepPlan:
        """The plan of one step, 0 the first. Safe to call from several threads."""
        with self._lock:
            first = self._origin + step * self.packs_per_step
            if step < 0 or first < 0:
                at = max(-(self._origin // self.packs_per_step), 0)
                raise ValueError(f"step is {step}; the first step of this plan is {at}.")
            epoch = self._epoch_of(first)
            packs: list[PieceNumbers] = []
            at, number = first - self._starts[epoch], epoch
            while len(packs) < self.packs_per_step:
                current = self._epoch(number)
                wanted = self.packs_per_step - len(packs)
                packs += [current[pack] for pack in range(at, min(at + wanted, len(current)))]
                at, number = 0, number + 1
        return self._table.step(step, epoch, packs, self.dp_size)

    def dp_imbalance(self, epoch: int = 0) -> NDArray[np.float64]:
        """`StepPlan.dp_imbalance` of every step that could be made of one epoch's packs; of all of
        them if too few.
        """
        packs, table = self.epoch(epoch), self._table
        costs = table.cost.of(packs.sums(table.pieces.length), packs.sums(table.squares))
        steps = max(len(costs) // self.packs_per_step, 1)
        costs.resize(
            steps * self.packs_per_step, refcheck=False
        )  # cuts off the rest, or fills up with empty packs
        return spread(costs.reshape(steps, -1), self.dp_size).imbalance_S

    def keeping_to(self, room: int) -> PackPlan:
        """The same plan, except that epochs with a pack of more than ``room`` documents are packed
        with that limit.

        See `Packer.room`. A first epoch that was packed here and keeps to it is not packed again.
        """
        table = self._table
        plan = PackPlan(
            table.pieces,
            table.targets,
            packer=table.packer.keeping_to(room),
            packs_per_step=self.packs_per_step,
            dp_size=self.dp_size,
            seed=table.seed,
            cost=table.cost,
            blend=table.blend,
            show_progress=table.show_progress,
        )
        with self._lock:
            first = self._epochs.get(0)
        if first is not None and first.documents_per_pack.max() <= room:
            plan._epochs[0] = first
            plan._starts = [0, len(first)]
        return plan

    def evaluation(self, max_steps: int | None = None) -> EvaluationPlan:
        """A finite plan over the same pieces; see `EvaluationPlan`."""
        table = self._table
        return EvaluationPlan(
            table.pieces,
            table.targets,
            packer=table.packer,
            packs_per_step=self.packs_per_step,
            dp_size=self.dp_size,
            seed=table.seed,
            cost=table.cost,
            blend=table.blend,
            max_steps=max_steps,
        )

    def _epoch_of(self, pack: int) -> int:
        """The epoch that holds a pack of the stream; earlier epochs are packed if their sizes are
        not known.
        """
        while pack >= self._starts[-1]:
            self._epoch(len(self._starts) - 1)
        return bisect_right(self._starts, pack) - 1

    def _epoch(self, epoch: int) -> Packs:
        packs = self._epochs.get(epoch)
        if packs is None:
            packs = self._table.pack(epoch)
            self._epochs[epoch] = packs
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
            end = self._starts[epoch] + len(packs) if epoch < len(self._starts) else None
            if epoch == len(self._starts) - 1:
                self._starts.append(self._starts[epoch] + len(packs))
            elif end is not None and end != self._starts[epoch + 1]:
                raise ValueError(
                    f"epoch {epoch} has {len(packs)} packs, but epoch_starts says it has "
                    f"{self._starts[epoch + 1] - self._starts[epoch]}; it was saved by a plan of other data or rules."
                )
        return packs
