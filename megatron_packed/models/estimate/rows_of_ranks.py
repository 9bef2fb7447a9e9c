"""Work and padding of the two partitions of a pack over context-parallel ranks.

A zigzag gives all ranks equal work in attention, but pads documents. Contiguous rows need no padding,
but the later ranks of a long document have more work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_PACKS_TO_COMPARE = 32


@dataclass(frozen=True, kw_only=True)
class RowsOfRanks:
    """Costs of the partitions for the documents of a run."""

    zigzag_padding: float
    """Slots of padding over tokens of documents."""
    slowest_contiguous: float
    """Visible pairs of the slowest rank over the mean; see `slowest_rank`."""
    contiguous_flops: float
    """FLOPs of this rank in attention beyond the mean, over the FLOPs of a step on one rank."""

    @classmethod
    def for_documents(
        cls,
        lengths: NDArray[np.int64],
        tokens: int,
        ranks: int,
        window: int | None,
        *,
        attention: float,
    ) -> RowsOfRanks:
        """Compare the partitions.

        Args:
            attention: share of attention scores in the FLOPs of a step. For the other arguments see
                `slowest_rank`.
        """
        slowest = slowest_rank(lengths.astype(np.float64), tokens, ranks, window)
        return cls(
            zigzag_padding=float((-lengths % (2 * ranks)).sum() / lengths.sum()),
            slowest_contiguous=slowest,
            contiguous_flops=(slowest - 1) * attention,
        )

    @property
    def cheaper(self) -> str:
        """Return the partition of which a step needs fewer FLOPs on the slowest rank."""
        return "contiguous" if self.contiguous_flops <= self.zigzag_padding else "zigzag"


def slowest_rank(
    lengths: NDArray[np.float64], tokens: int, ranks: int, window: int | None
) -> float:
    """Return the visible pairs of the slowest rank over the mean, if ranks have contiguous rows.

    Documents fill some packs in a random order, which is always the same. The result is the work of the
    slowest ranks of these packs over the mean work.

    Args:
        lengths: tokens of the documents' pieces.
        tokens: slots of a pack.
        window: number of tokens that a token sees, or None.

    Example:
        A document that fills the pack of 4 ranks gives them 1, 3, 5 and 7 of 16 parts: 1.75.
    """
    random = np.random.default_rng(0)
    enough = int((_PACKS_TO_COMPARE + 1) * tokens / lengths.mean()) + 1
    if enough < lengths.size:
        drawn = lengths[random.integers(0, lengths.size, enough)]
    else:
        drawn = random.permutation(lengths)
    packs: list[NDArray[np.float64]] = []
    seen_T, filled = np.zeros(tokens), 0
    for length in drawn.astype(np.int64):
        if filled + length > tokens:
            packs.append(seen_T)
            seen_T, filled = np.zeros(tokens), 0
        seen = np.arange(length) + 0.5
        seen_T[filled : filled + length] = seen if window is None else np.minimum(seen, window)
        filled += length
    # The last pack may not be full, so it counts only if it is the only one.
    pairs = np.stack(packs[:_PACKS_TO_COMPARE] or [seen_T]).reshape(-1, ranks, tokens // ranks)
    pairs_PR = pairs.sum(axis=2)
    return float(pairs_PR.max(axis=1).sum() / pairs_PR.mean(axis=1).sum())
