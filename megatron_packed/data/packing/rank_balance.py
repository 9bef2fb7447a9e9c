"""Distribution of a step's packs over data-parallel ranks, so that all ranks have about the same to
compute.

Letters: S steps, P packs of a step, R ranks.

The packs of a step go in turns, the heaviest first, one to each rank in a turn: every rank then has
as many, and its micro-batch i weighs about what the others' do, which counts where collectives make
them wait for each other within a step. Who takes which of a turn decides about the sums, which
count where they wait at its end alone. Two ways are tried and the better one is taken: the lightest
rank so far takes the heaviest pack, or turns go back and forth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PackCost:
    """Estimated work on a pack, in any unit: linear in its tokens and in the squared lengths of its
    documents.
    """

    per_token: float = 1.0
    per_squared_length: float = 0.0
    """0 where no layer is quadratic in the length of a document."""

    def of(self, tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> Costs:
        """Costs of packs with so many tokens, whose documents' squared lengths sum to ``squares``."""
        costs: Costs = self.per_token * tokens + self.per_squared_length * squares
        return costs


BY_TOKENS = PackCost()
"""Cost of a pack if nothing is known of the model."""


class Spread(NamedTuple):
    """Packs of each rank, and the balance of their work."""

    packs_SRB: NDArray[np.int64]
    """Numbers of the packs of each step, rank and micro-batch (B = P / R)."""
    imbalance_S: Costs
    """Work of the busiest rank over the mean of all; 1 where there is none."""


def spread(costs_SP: Costs, ranks: int) -> Spread:
    """Deal out the packs of each step; a pure function of the costs, ties in the order of packs and
    ranks.

    Args:
        costs_SP: estimated work on each pack; P is a multiple of ``ranks``.
    Example:
        Packs of work ``[1, 8, 2, 5]`` on 2 ranks: 8 and 1 on rank 0, 5 and 2 on rank 1, imbalance 9
        / 8.
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


def _lightest_takes_heaviest(costs_SBR: Costs) -> tuple[NDArray[np.int64], Costs]:
    """``(S, B, R)`` which pack of a turn each rank takes, and the sums of the ranks."""
    sums_SR = np.zeros((costs_SBR.shape[0], costs_SBR.shape[2]))
    places_SBR = np.empty(costs_SBR.shape, dtype=np.int64)
    for turn in range(costs_SBR.shape[1]):
        lightest_first_SR = np.argsort(sums_SR, axis=1, kind="stable")
        places_SBR[:, turn] = np.argsort(
            lightest_first_SR, axis=1
        )  # the inverse: place of each rank in that order
        sums_SR += np.take_along_axis(costs_SBR[:, turn], places_SBR[:, turn], axis=1)
    return places_SBR, sums_SR


def _back_and_forth(turns: int, ranks: int) -> NDArray[np.int64]:
    """``(B, R)``: turn 0 from the first rank to the last, turn 1 from the last to the first, and so
    on.
    """
    forth = np.arange(ranks)
    return np.stack([forth if turn % 2 == 0 else forth[::-1] for turn in range(turns)])
