"""The pack plan: which pieces of documents share a pack, in which step, on which data-parallel
rank, in which micro-batch.

A pure function of (document lengths, packing rules, seed, epoch) that every rank computes for
itself. Packs form one endless stream, epoch after epoch; step s takes packs ``s * P`` to ``(s + 1)
* P`` of it (P packs per step, over all ranks), so a step's packs, targets and loss do not depend on
the number of data-parallel ranks. P decides nothing else: a run that goes on with another P takes
the stream up where it was (`PackPlan.resume`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.packing.packer import Packer, Packs
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.rank_balance import BY_TOKENS, PackCost, spread
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.data.source_blend import SourceBlend

PieceNumbers = NDArray[np.int64]
"""Numbers of the pieces (`Pieces`) of one pack, in their order in the pack; empty for a pack that
is all tail.
"""

_FORMAT = "pack plan 1"
"""Changed whenever the same inputs would give other packs, so that a resumed run notices by its
plan hash.
"""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The packs of one step."""

    step: int
    epoch: int
    """Epoch of the step's first pack."""
    packs: tuple[tuple[PieceNumbers, ...], ...]
    """``packs[dp_rank][micro_batch]``; every rank has equally many."""
    global_targets: int
    """Target tokens of the step, over all ranks."""
    global_packs: int
    """Packs with at least one document, over all ranks."""
    global_tokens: int
    """Tokens of documents, over all ranks; the rest of the slots is tail or padding of documents."""
    max_documents: int
    """Most documents in one of the step's packs, over all ranks: what decides the capacity of a
    replay.
    """
    dp_imbalance: float = 1.0
    """Estimated work of the busiest data-parallel rank over the mean of all ranks."""

    @property
    def scales(self) -> tuple[float, float]:
        """What a micro-batch multiplies its loss sum and its auxiliary loss by; 0 where the step
        has nothing to divide by.
        """
        return (
            1.0 / self.global_targets if self.global_targets else 0.0,
            1.0 / self.global_packs if self.global_packs else 0.0,
        )


class _Table:
    """The pieces, and what is known of each."""

    def __init__(
        self,
        pieces: Pieces,
        targets: NDArray[np.integer],
        packer: Packer,
        seed: int,
        cost: PackCost,
        blend: SourceBlend | None,
        show_progress: bool = False,
    ) -> None:
        if len(targets) != len(pieces):
            raise ValueError(
                f"{len(pieces)} pieces come with {len(targets)} target counts; count them with cut_documents."
            )
        if len(pieces) == 0:
            raise ValueError(
                "there is no document to pack; check the data paths and the over-long policy."
            )
        self.pieces = pieces
        self.targets = np.asarray(targets, dtype=np.int64)
        self.squares = pieces.length**2
        self.cost = cost
        self.packer = packer
        self.seed = seed
        self.blend = blend
        self.show_progress = show_progress

    def pack(self, epoch: int) -> Packs:
        """The packs of an epoch, of all pieces or of those that a blend draws."""
        drawn = None if self.blend is None else self.blend.epoch(epoch)
        lengths = self.pieces.length if drawn is None else self.pieces.length[drawn]
        # The thread that packs ahead is not waited for, and would write into the lines of the
        # steps.
        show = self.show_progress and threading.current_thread() is threading.main_thread()
        with ProgressBar(f"packing epoch {epoch}", lengths.size, show) as progress:
            packs = self.packer.pack(lengths, self.seed, epoch, progress.update)
        return packs if drawn is None else Packs(drawn[packs.order], packs.offsets)

    def hash(self, packs_per_step: int) -> str:
        """64 hexadecimal digits of lengths, targets, rules and seed; the number of ranks is no part
        of it.
        """
        rules = {
            "format": _FORMAT,
            "slots": self.packer.slots,
            "method": self.packer.method,
            "window": self.packer.window,
            "max_documents": self.packer.max_documents,
            "packs_per_step": packs_per_step,
            "seed": self.seed,
        }
        if self.packer.room is not None:
            rules["room"] = self.packer.room
        if self.packer.alignment > 1:
            rules["alignment"] = self.packer.alignment
        if self.blend is not None:
            rules["blend"] = [self.blend.quotas, self.blend.sizes]
        digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode())
        for array in (
            self.pieces.document,
            self.pieces.start,
            self.pieces.length,
            self.targets,
        ):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()

    def step(self, step: int, epoch: int, packs: Sequence[PieceNumbers], dp_size: int) -> StepPlan:
        """Deal the packs of a step out to the ranks, even by estimated work, empty packs last. See
        `spread`.
        """
        tokens = np.array([self.pieces.length[numbers].sum() for numbers in packs])
        squares = np.array([self.squares[numbers].sum() for numbers in packs])
        packs_SRB, imbalance_S = spread(self.cost.of(tokens, squares)[None], dp_size)
        return StepPlan(
            step=step,
            epoch=epoch,
            packs=tuple(tuple(packs[pack] for pack in of_rank) for of_rank in packs_SRB[0]),
            global_targets=sum(int(self.targets[numbers].sum()) for numbers in packs),
            global_packs=sum(numbers.size > 0 for numbers in packs),
            global_tokens=int(tokens.sum()),
            max_documents=max(numbers.size for numbers in packs),
            dp_imbalance=float(imbalance_S[0]),
        )


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
        _check_ranks(packs_per_step, dp_size)
        self._table = _Table(pieces, targets, packer, seed, cost, blend, show_progress)
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
        """What pieces begin and end at multiples of in their pack."""
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


class EvaluationPlan:
    """A finite plan: every document once (of a blend: its first epoch), or the first ``max_steps``
    steps of that; the same packs at every evaluation.

    The last step is filled up with empty packs, so that every rank runs equally many. Arguments and
    errors as `PackPlan`.
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
        max_steps: int | None = None,
    ) -> None:
        _check_ranks(packs_per_step, dp_size)
        self._table = _Table(pieces, targets, packer, seed, cost, blend)
        self._packs = self._table.pack(0)
        self.packs_per_step = packs_per_step
        self.dp_size = dp_size
        steps = -(-len(self._packs) // packs_per_step)
        self.num_steps = steps if max_steps is None else min(steps, max_steps)
        self.hash = self._table.hash(packs_per_step)

    @property
    def pieces(self) -> Pieces:
        return self._table.pieces

    @property
    def alignment(self) -> int:
        """What pieces begin and end at multiples of in their pack."""
        return self._table.packer.alignment

    @property
    def documents_per_pack(self) -> NDArray[np.int64]:
        """Documents of each pack of the steps, the empty ones at the end left out."""
        return self._packs.documents_per_pack[: self.num_steps * self.packs_per_step]

    @property
    def num_targets(self) -> int:
        """Targets of all steps: what the mean loss is taken over."""
        return int(
            self._packs.sums(self._table.targets)[: self.num_steps * self.packs_per_step].sum()
        )

    def __len__(self) -> int:
        return self.num_steps

    def step(self, step: int) -> StepPlan:
        """The plan of one step, 0 to ``num_steps - 1``."""
        if not 0 <= step < self.num_steps:
            raise ValueError(
                f"step is {step}; this evaluation has steps 0 to {self.num_steps - 1}."
            )
        first = step * self.packs_per_step
        end = min(first + self.packs_per_step, len(self._packs))
        packs = [self._packs[pack] for pack in range(first, end)]
        empty = np.zeros(0, dtype=np.int64)
        packs += [empty] * (self.packs_per_step - len(packs))
        return self._table.step(step, 0, packs, self.dp_size)


def _check_ranks(packs_per_step: int, dp_size: int) -> None:
    if packs_per_step < 1 or dp_size < 1 or packs_per_step % dp_size:
        raise ValueError(
            f"packs_per_step ({packs_per_step}) is not a positive multiple of dp_size ({dp_size}), so ranks would run "
            "different numbers of micro-batches; make global_batch_size a multiple of micro_batch_size * dp_size."
        )
