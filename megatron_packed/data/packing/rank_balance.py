"""Distribution of a step's packs over data-parallel ranks, so that all ranks have about equal work.

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

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_packed.packed.array_types import Float64Array, Int64Array

Costs = Float64Array


@dataclass(frozen=True, kw_only=True)
class PackCost:
    """Estimate of the work of a pack, in any unit.

    The estimate is linear in the tokens of the pack and in the squared lengths of its documents.
    """

    per_token: float = 1.0
    per_squared_length: float = 0.0
    """Work per squared length; 0 if no layer is quadratic in the length of a document."""

    def estimate(self, tokens: Int64Array, squares: Int64Array) -> Costs:
        """Return the costs of packs.

        Args:
            tokens: tokens of each pack.
            squares: sum of the squared lengths of the documents of each pack.
        """
        costs: Costs = self.per_token * tokens + self.per_squared_length * squares
        return costs


BY_TOKENS = PackCost()
"""Cost that counts only tokens, for use without a model."""


class Spread(NamedTuple):
    """Packs of each rank, and the balance of their work."""

    packs_SRB: Int64Array
    """Numbers of the packs of each step, rank and micro-batch (B = P / R)."""
    imbalance_S: Costs
    """Work of the busiest rank divided by the mean of all ranks; 1 for a step without work."""


def spread(costs_SP: Costs, ranks: int) -> Spread:
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


def _lightest_takes_heaviest(costs_SBR: Costs) -> tuple[Int64Array, Costs]:
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
