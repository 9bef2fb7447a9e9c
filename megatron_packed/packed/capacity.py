"""How many documents a pack needs room for: percentiles of the counts, and the share of packs that a capacity covers.

A CUDA graph is captured for a capacity in documents; packs with more run eagerly. These functions turn a list of
documents per pack (of a data set, an epoch, or a run so far) into the numbers by which to choose.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def percentile(documents_per_pack: NDArray[np.integer], share: float) -> int:
    """The smallest count that at least ``share`` of the packs do not exceed (nearest rank, so a count that occurs).

    ``share`` 0.5 is the median, 0.99 the P99, 1.0 the maximum: also the smallest capacity that covers ``share`` of
    the packs.

    Raises:
        ValueError: no packs, or ``share`` outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; give a number above 0 and up to 1, such as 0.99.")
    counts = np.sort(np.asarray(documents_per_pack))
    if counts.size == 0:
        raise ValueError("there are no packs, so no percentile of their documents.")
    rank = int(np.ceil(share * counts.size - 1e-9))  # 0.9 * 10 must be the 9th, not the 10th
    return int(counts[max(rank, 1) - 1])


def coverage(documents_per_pack: NDArray[np.integer], capacities: Iterable[int]) -> dict[int, float]:
    """Share of the packs that each capacity covers (packs with at most that many documents).

    Example:
        counts [1, 3, 3, 9] and capacities (2, 3, 16): ``{2: 0.25, 3: 0.75, 16: 1.0}``.
    Raises:
        ValueError: no packs.
    """
    counts = np.sort(np.asarray(documents_per_pack))
    if counts.size == 0:
        raise ValueError("there are no packs to cover.")
    return {capacity: int(np.searchsorted(counts, capacity, side="right")) / counts.size for capacity in capacities}
