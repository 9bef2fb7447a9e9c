"""Plan of one step, and the table of pieces from which pack plans make packs and steps.

A step's packs are distributed over data-parallel ranks so that all ranks have about equal work.
Letters: S steps, P packs of a step, R ranks, B = P / R micro-batches of a rank.

Packs are distributed in turns, the packs with the most work first. In each turn every rank gets
one pack. All ranks then have the same number of packs, and micro-batch i is about equal work on
all ranks. Equal micro-batches matter if collectives make the ranks wait for each other within a
step.

The order of the ranks within a turn decides their total work. Equal totals matter if ranks wait
for each other only at the end of a step. Two orders are tried, and the better one is used:

- the rank with the least work so far gets the pack with the most work;
- the direction alternates: rank 0 to R - 1 in one turn, rank R - 1 to 0 in the next.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_packed.data.packing.packer import Packer, Packs
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.packed.array_types import Float64Array, Int64Array, IntegerArray

if TYPE_CHECKING:
    from megatron_packed.data.source_blend import SourceBlend

PieceNumbers = Int64Array
"""Numbers of the pieces (`Pieces`) of one pack, in the order of the pack; empty for a pack without
documents.
"""

_FORMAT = "pack plan 1"
"""Version of the packing. Change this text when a change of the code makes other packs from the
same inputs.

The version is part of the plan hash, so a resumed run detects such a change.
"""


@dataclass(frozen=True, kw_only=True)
class PackCost:
    """Estimate of the work of a pack, in any unit.

    The estimate is linear in the tokens of the pack and in the squared lengths of its documents.
    """

    per_token: float = 1.0
    per_squared_length: float = 0.0
    """Work per squared length; 0 if no layer is quadratic in the length of a document."""

    def estimate(self, tokens: Int64Array, squares: Int64Array) -> Float64Array:
        """Return the costs of packs.

        Args:
            tokens: tokens of each pack.
            squares: sum of the squared lengths of the documents of each pack.
        """
        costs: Float64Array = self.per_token * tokens + self.per_squared_length * squares
        return costs


BY_TOKENS = PackCost()
"""Cost that counts only tokens, for use without a model."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Packs of one step, by data-parallel rank and micro-batch."""

    step: int
    epoch: int
    """Epoch of the step's first pack."""
    packs: tuple[tuple[PieceNumbers, ...], ...]
    """``packs[dp_rank][micro_batch]``; every rank has the same number of packs."""
    global_targets: int
    """Target tokens of the step, over all ranks."""
    global_packs: int
    """Packs with at least one document, over all ranks."""
    global_tokens: int
    """Tokens of documents, over all ranks. The other slots are padding or tails of packs."""
    max_documents: int
    """Largest number of documents in one of the step's packs, over all ranks. It decides the
    capacity of the CUDA graphs that are replayed.
    """
    dp_imbalance: float = 1.0
    """Estimated work of the busiest data-parallel rank over the mean of all ranks."""
    depth_targets: tuple[int, ...] = ()
    """Targets of the step at each depth of multi-token prediction, over all ranks."""

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """Factors of a micro-batch's loss sum, of its auxiliary loss, and of the loss of each depth.

        The factors are 1 over ``global_targets``, ``global_packs`` and each of ``depth_targets``; a
        factor is 0 if its count is 0.
        """
        counts = (self.global_targets, self.global_packs, *self.depth_targets)
        return tuple(1.0 / count if count else 0.0 for count in counts)


@dataclass(kw_only=True, eq=False)
class PieceTable:
    """Pieces of a data set with their target counts, the packing rules, and the size of a step.

    Args:
        pieces: the pieces of the data set.
        targets: ``(S,)`` target tokens of each piece (`pieces.cut_documents`).
        packer: the packing rules; no piece is longer than ``packer.slots``.
        packs_per_step: P, over all ranks: ``global_batch_size // micro_batch_size``.
        dp_size: data-parallel ranks; divides P.
        seed: seed of the data order.
        cost: estimated work of a pack, used to distribute a step's packs over the ranks. The cost
            is not part of ``hash``, because it does not change which packs a step trains on.
        blend: selects the pieces of each epoch; None for every piece once.
        show_progress: show a progress bar while the main thread waits for packing.
        depth_targets: for each depth of multi-token prediction, the targets of each piece
            (`pieces.targets_of_depths`).
    Raises:
        ValueError: there are no pieces, the numbers of pieces and target counts differ, or P is
            not divisible by dp_size.
    """

    pieces: Pieces = field(kw_only=False)
    targets: IntegerArray = field(kw_only=False)
    packer: Packer
    packs_per_step: int
    dp_size: int = 1
    seed: int = 0
    cost: PackCost = BY_TOKENS
    blend: SourceBlend | None = None
    show_progress: bool = False
    depth_targets: Sequence[IntegerArray] = ()

    def __post_init__(self) -> None:
        check_ranks(self.packs_per_step, self.dp_size)
        if len(self.targets) != len(self.pieces):
            raise ValueError(
                f"there are {len(self.pieces)} pieces but {len(self.targets)} target counts; get both from "
                "cut_documents."
            )
        if len(self.pieces) == 0:
            raise ValueError(
                "there is no document to pack; check the data paths and the over-long policy."
            )
        self.targets = np.asarray(self.targets, dtype=np.int64)
        self.squares = self.pieces.length**2

    @property
    def alignment(self) -> int:
        """Alignment of pieces in a pack, in slots. Pieces begin at multiples of the alignment."""
        return self.packer.alignment

    @cached_property
    def hash(self) -> str:
        """Hash of the stream of packs, and of the packs of a step."""
        return self.hash_with(self.packs_per_step)

    def pack(self, epoch: int) -> Packs:
        """Pack one epoch: all pieces, or the pieces that the blend draws for the epoch."""
        drawn = None if self.blend is None else self.blend.epoch(epoch)
        lengths = self.pieces.length if drawn is None else self.pieces.length[drawn]
        # A thread that packs the next epoch in advance shows no progress: its bar would appear
        # between the log lines of the steps.
        show = self.show_progress and threading.current_thread() is threading.main_thread()
        with ProgressBar(f"packing epoch {epoch}", lengths.size, show) as progress:
            packs = self.packer.pack(lengths, self.seed, epoch, progress.update)
        return packs if drawn is None else Packs(drawn[packs.order], packs.offsets)

    def lengths_of(self, step: StepPlan) -> Int64Array:
        """Return the lengths in tokens of all pieces of a step, over all ranks."""
        numbers = [numbers for of_rank in step.packs for numbers in of_rank]
        return self.pieces.length[np.concatenate(numbers)]

    def hash_with(self, packs_per_step: int) -> str:
        """Hash lengths, targets, packing rules and seed to 64 hexadecimal digits.

        The number of ranks is not part of the hash.
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

    def deal(self, step: int, epoch: int, packs: Sequence[PieceNumbers]) -> StepPlan:
        """Distribute the packs of a step over the ranks so that their estimated work is even.

        Empty packs come last on each rank. See `spread`.
        """
        tokens = np.array([self.pieces.length[numbers].sum() for numbers in packs])
        squares = np.array([self.squares[numbers].sum() for numbers in packs])
        packs_SRB, imbalance_S = spread(self.cost.estimate(tokens, squares)[None], self.dp_size)
        return StepPlan(
            step=step,
            epoch=epoch,
            packs=tuple(tuple(packs[pack] for pack in of_rank) for of_rank in packs_SRB[0]),
            global_targets=sum(int(self.targets[numbers].sum()) for numbers in packs),
            global_packs=sum(numbers.size > 0 for numbers in packs),
            global_tokens=int(tokens.sum()),
            max_documents=max(numbers.size for numbers in packs),
            dp_imbalance=float(imbalance_S[0]),
            depth_targets=tuple(
                sum(int(targets[numbers].sum()) for numbers in packs)
                for targets in self.depth_targets
            ),
        )


def check_ranks(packs_per_step: int, dp_size: int) -> None:
    """Check that all data-parallel ranks run the same number of micro-batches.

    Raises:
        ValueError: ``packs_per_step`` is not a positive multiple of ``dp_size``.
    """
    if packs_per_step < 1 or dp_size < 1 or packs_per_step % dp_size:
        raise ValueError(
            f"packs_per_step ({packs_per_step}) is not a positive multiple of dp_size ({dp_size}), so ranks would run "
            "different numbers of micro-batches; make global_batch_size a multiple of micro_batch_size * dp_size."
        )


class Spread(NamedTuple):
    """Packs of each rank, and the balance of their work."""

    packs_SRB: Int64Array
    """Numbers of the packs of each step, rank and micro-batch (B = P / R)."""
    imbalance_S: Float64Array
    """Work of the busiest rank divided by the mean of all ranks; 1 for a step without work."""


def spread(costs_SP: Float64Array, ranks: int) -> Spread:
    """Distribute the packs of each step over the ranks.

    The result is a pure function of the costs. Ties are broken by the numbers of packs and ranks.

    Args:
        costs_SP: estimated work of each pack; P is a multiple of ``ranks``.
    Example:
        Packs of work ``[1, 8, 2, 5]`` on 2 ranks: rank 0 gets 8 and 1, rank 1 gets 5 and 2, and the
        imbalance is 9 / 8.
    """
    heaviest_first = np.argsort(-costs_SP, axis=1, kind="stable")
    in_turns = heaviest_first.reshape(len(costs_SP), -1, ranks)  # (S, B, R)
    costs_SBR = np.take_along_axis(costs_SP, heaviest_first, axis=1).reshape(in_turns.shape)
    places_SBR, sums_SR = _lightest_takes_heaviest(costs_SBR)
    other_SBR = np.broadcast_to(_back_and_forth(*in_turns.shape[1:]), in_turns.shape)
    other_sums_SR = np.take_along_axis(costs_SBR, other_SBR, axis=2).sum(axis=1)
    better_S1 = other_sums_SR.max(axis=1, keepdims=True) < sums_SR.max(axis=1, keepdims=True)
    places_SBR = np.where(better_S1[:, None], other_SBR, places_SBR)
    sums_SR = np.where(better_S1, other_sums_SR, sums_SR)
    mean_S = sums_SR.mean(axis=1)
    imbalance_S = np.divide(sums_SR.max(axis=1), mean_S, out=np.ones_like(mean_S), where=mean_S > 0)
    return Spread(np.take_along_axis(in_turns, places_SBR, axis=2).swapaxes(1, 2), imbalance_S)


def _lightest_takes_heaviest(costs_SBR: Float64Array) -> tuple[Int64Array, Float64Array]:
    """Give the pack with the most work of each turn to the rank with the least work so far.

    Returns:
        For each turn and rank, the position of the rank's pack within the turn, ``(S, B, R)``. The
        total work of each rank, ``(S, R)``.
    """
    sums_SR = np.zeros((costs_SBR.shape[0], costs_SBR.shape[2]))
    places_SBR = np.empty(costs_SBR.shape, dtype=np.int64)
    for turn in range(costs_SBR.shape[1]):
        lightest_first_SR = np.argsort(sums_SR, axis=1, kind="stable")
        places_SBR[:, turn] = np.argsort(
            lightest_first_SR, axis=1
        )  # inverse permutation: the place of each rank in that order
        sums_SR += np.take_along_axis(costs_SBR[:, turn], places_SBR[:, turn], axis=1)
    return places_SBR, sums_SR


def _back_and_forth(turns: int, ranks: int) -> Int64Array:
    """Return for each turn and rank the position of the rank's pack within the turn, ``(B, R)``.

    Turn 0 goes from the first rank to the last, turn 1 from the last to the first, and so on.
    """
    forth = np.arange(ranks)
    return np.stack([forth if turn % 2 == 0 else forth[::-1] for turn in range(turns)])
