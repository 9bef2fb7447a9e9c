"""Capture sizes: the static sizes of CUDA graphs, and how many documents packs need room for.

A CUDA graph is captured for one capture size: a capacity in documents and a bound of the longest
row. A pack replays the smallest capture size that holds it; one that no capture size holds runs
eagerly. These functions turn a list of documents per pack (of a data set, an epoch, or a run so
far) into the numbers by which to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DOCUMENT_COST = 1e-3
"""Cost of room for one more document, as a share of a pack's time. On an H200, with 8,192 tokens
and attention a fifth of the step, 116 more rows cost 2e-4 of a step each with flash-attention 4 and
cuDNN, 2e-3 with flash-attention 2.
"""

CAPACITY_COST = 0.01
"""Cost of one more capacity: the share of a pack's mean time that it must save to be worth its
capture. A choice, not a measurement: a hundredth of a run pays for capturing every layer once more
(seconds) and for the graphs' memory.
"""

MOST_CAPACITIES = 4
"""Capacities at most: the graphs of each hold memory, and warm-up and capture go through all of
them.
"""


@dataclass(frozen=True, order=True)
class CaptureSize:
    """One static size that graphs are captured for. Smaller ones come first: fewer documents, then
    shorter rows.

    Raises:
        ValueError: a size below 1.
    """

    capacity: int
    """Real documents there is room for, N."""
    max_seqlen: int
    """Upper bound of the longest row in tokens, the tail included; T where it does not step."""

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.max_seqlen < 1:
            raise ValueError(
                f"a capture size for {self.capacity} documents and rows of {self.max_seqlen} tokens holds nothing; "
                "both must be at least 1."
            )

    def holds(self, num_seqs: int, longest: int) -> bool:
        """Return whether a pack of so many documents, whose longest row (tail included) has so many
        tokens, fits.
        """
        return num_seqs <= self.capacity and longest <= self.max_seqlen


@dataclass(frozen=True)
class CaptureSizes:
    """Sizes that graphs are captured for, sorted.

    Raises:
        ValueError: no capture sizes.
    Example:
        ``CaptureSizes.of([64, 16], 8192)``: a pack of 9 documents gets the size for 16, one of 17
        that for 64, one of 65 none.
    """

    sizes: tuple[CaptureSize, ...]
    """Sorted, each once, whatever order they were given in."""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError(
                "CUDA graphs need at least one capture size; give a capacity in documents, such as 64."
            )
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @classmethod
    def of(cls, capacities: Iterable[int], total_tokens: int) -> CaptureSizes:
        """Cells of several capacities, each for rows of any length up to the ``total_tokens`` of a
        pack.
        """
        return cls(tuple(CaptureSize(capacity, total_tokens) for capacity in capacities))

    @property
    def capacities(self) -> tuple[int, ...]:
        """The different capacities, smallest first."""
        return tuple(sorted({size.capacity for size in self.sizes}))

    @property
    def largest(self) -> int:
        """Documents of the largest capture size."""
        return self.sizes[-1].capacity

    def words(self, size: CaptureSize) -> str:
        """Return a size in words; the bound of rows only where two sizes have its capacity.

        Example:
            ``"up to 16 documents"``; ``"up to 16 documents and rows of 2048 tokens"``.
        """
        alike = sum(other.capacity == size.capacity for other in self.sizes)
        rows = f" and rows of {size.max_seqlen} tokens" if alike > 1 else ""
        return f"up to {size.capacity} documents{rows}"

    def smallest_for(self, num_seqs: int, longest: int) -> CaptureSize | None:
        """Return the smallest capture size that holds a pack; None if the pack is larger than all.

        Args:
            num_seqs: real documents of the pack.
            longest: its longest row in tokens, the tail included (``PackedSeqParams.max_seqlen``).
        """
        return next((size for size in self.sizes if size.holds(num_seqs, longest)), None)


def choose_capacities(
    documents_per_pack: NDArray[np.integer] | Sequence[int],
    *,
    document_cost: float = DOCUMENT_COST,
    capacity_cost: float = CAPACITY_COST,
    most_capacities: int = MOST_CAPACITIES,
) -> tuple[int, ...]:
    """The capacities that cover every pack at least expected cost, smallest first; the fewest of
    those that tie.

    A pack costs ``1 + document_cost * capacity``, with the smallest capacity that holds it; to the
    mean of that over the packs comes ``capacity_cost`` for each capacity. The largest capacity is
    the largest count (at least 1).

    Method: a capacity that is no count that occurs could be lowered to one. Over the sorted
    distinct counts ``c_j``, of which ``n_j`` packs do not exceed ``c_j``, the least total room with
    k capacities for the packs up to ``c_j`` is ``room_k(j) = min_(i < j) room_(k-1)(i) + c_j (n_j -
    n_i)``: whole numbers, so that all machines choose alike.

    Args:
        documents_per_pack: ``(packs,)`` real documents of each pack.
        most_capacities: capacities at most.
    Raises:
        ValueError: no packs, a negative count or cost, or no capacity allowed.
    Example:
        Counts [3, 3, 3, 3, 100] with the default costs: ``(3, 100)``; the second capacity saves
        0.097 for 4 of 5 packs.
    """
    counts = np.asarray(documents_per_pack, dtype=np.int64)
    if counts.size == 0:
        raise ValueError("there are no packs, so no capacity to choose.")
    least = int(np.min(counts))
    if least < 0 or document_cost < 0 or capacity_cost < 0 or most_capacities < 1:
        raise ValueError(
            f"counts (the least is {least}) and costs (document {document_cost}, capacity {capacity_cost}) must not be "
            f"negative, and there must be at least one capacity (most_capacities is {most_capacities})."
        )
    distinct, packs = np.unique(np.maximum(counts, 1), return_counts=True)
    below = np.concatenate(
        [[0], np.cumsum(packs)]
    )  # (D + 1,) packs with one of the first j distinct counts
    room = distinct * below[1:]  # one capacity
    steps: list[NDArray[np.int64]] = []  # steps[k - 2][j]: the capacity under c_j, of k
    best, chosen = float("inf"), 1
    for count in range(1, min(most_capacities, distinct.size) + 1):
        if count > 1:
            room, under = _one_capacity_more(room, distinct, below)
            steps.append(under)
        cost = document_cost * int(room[-1]) / counts.size + capacity_cost * count
        if cost < best:
            best, chosen = cost, count
    at = distinct.size - 1
    capacities = [int(distinct[at])]
    for under in reversed(steps[: chosen - 1]):
        at = int(under[at])
        capacities.append(int(distinct[at]))
    return tuple(reversed(capacities))


_UNREACHABLE = np.iinfo(np.int64).max // 4
"""Room of a prefix with fewer distinct counts than capacities."""


def _one_capacity_more(
    room: NDArray[np.int64], distinct: NDArray[np.int64], below: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``room_k`` of ``room_(k-1)``, and where the capacity under the last one stands; both
    ``(D,)``.
    """
    more = np.full_like(room, _UNREACHABLE)
    under = np.zeros_like(room)
    for j in range(1, distinct.size):
        total = room[:j] + distinct[j] * (below[j + 1] - below[1 : j + 1])
        under[j] = np.argmin(total)
        more[j] = min(int(total[under[j]]), _UNREACHABLE)
    return more, under


def percentile(documents_per_pack: NDArray[np.integer], share: float) -> int:
    """The smallest count that at least ``share`` of the packs do not exceed (nearest rank, so a
    count that occurs).

    ``share`` 0.5 is the median, 0.99 the P99, 1.0 the maximum: also the smallest capacity that
    covers ``share`` of the packs.

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


def coverage(
    documents_per_pack: NDArray[np.integer], capacities: Iterable[int]
) -> dict[int, float]:
    """Share of the packs that each capacity covers (packs with at most that many documents).

    Example:
        counts [1, 3, 3, 9] and capacities (2, 3, 16): ``{2: 0.25, 3: 0.75, 16: 1.0}``.
    Raises:
        ValueError: no packs.
    """
    counts = np.sort(np.asarray(documents_per_pack))
    if counts.size == 0:
        raise ValueError("there are no packs to cover.")
    return {
        capacity: int(np.searchsorted(counts, capacity, side="right")) / counts.size
        for capacity in capacities
    }
