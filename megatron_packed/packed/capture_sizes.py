"""Capture sizes: the static sizes of CUDA graphs, and the choice of document capacities.

A CUDA graph is captured for one capture size: a capacity in documents and an upper bound of the
longest row. A row is a document or the tail of a pack. A pack replays the graphs of the smallest
capture size that holds the pack. A pack larger than all capture sizes runs eagerly. The functions
take the number of documents in each pack (of a data set, an epoch, or a run so far), and compute
capacities, percentiles and coverage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

DOCUMENT_COST = 1e-3
"""Cost of capacity for one more document, as a share of a pack's time.

Measured on an H200 with packs of 8,192 tokens and 116 additional rows, where attention takes a
fifth of the step. Each row costs 2e-4 of a step with flash-attention 4 and cuDNN, and 2e-3 with
flash-attention 2.
"""

CAPACITY_COST = 0.01
"""Cost of one more capacity: the share of a pack's mean time that the capacity must save.

This is a choice, not a measurement: one hundredth of a run pays for one more capture of every layer
(seconds), and for the memory of the graphs.
"""

MOST_CAPACITIES = 4
"""Largest number of capacities. The graphs of each capacity hold memory and need warm-up and capture."""


@dataclass(frozen=True, order=True)
class CaptureSize:
    """One static size for which graphs are captured.

    Sizes are ordered by capacity, then by ``max_seqlen``.

    Raises:
        ValueError: ``capacity`` or ``max_seqlen`` is below 1.
        TypeError: one of them is not a whole number.
    """

    capacity: int
    """Largest number of real documents, N."""
    max_seqlen: int
    """Upper bound of the longest row in tokens, including the tail; T if there is no smaller bound."""

    def __post_init__(self) -> None:
        for name in ("capacity", "max_seqlen"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(
                    f"{name} {value!r} is of type {type(value).__name__}; give a whole number."
                )
        if self.capacity < 1 or self.max_seqlen < 1:
            raise ValueError(
                f"a capture size of {self.capacity} documents and {self.max_seqlen} tokens per row cannot hold a "
                "pack; both numbers must be at least 1."
            )

    def holds(self, num_seqs: int, longest: int) -> bool:
        """Return whether a pack fits into this size.

        Args:
            num_seqs: number of real documents of the pack.
            longest: longest row of the pack in tokens, including the tail.
        """
        return num_seqs <= self.capacity and longest <= self.max_seqlen


@dataclass(frozen=True)
class CaptureSizes:
    """Sorted sizes for which graphs are captured.

    Raises:
        ValueError: no capture sizes.
    Example:
        ``CaptureSizes.from_capacities([64, 16], 8192)``: a pack of 9 documents gets the size with capacity 16, a
        pack of 17 documents the size with capacity 64, and a pack of 65 documents no size.
    """

    sizes: tuple[CaptureSize, ...]
    """Sizes, sorted and without duplicates."""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError(
                "CUDA graphs need at least one capture size; give a capacity in documents, for example 64."
            )
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @classmethod
    def from_capacities(cls, capacities: Iterable[int], total_tokens: int) -> CaptureSizes:
        """Build the sizes of several capacities, each with ``total_tokens`` as bound of the rows."""
        return cls(tuple(CaptureSize(capacity, total_tokens) for capacity in capacities))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Capacities of all sizes, without duplicates, smallest first."""
        return tuple(sorted({size.capacity for size in self.sizes}))

    @property
    def largest(self) -> int:
        """Capacity of the largest capture size, in documents."""
        return self.sizes[-1].capacity

    def words(self, size: CaptureSize) -> str:
        """Return a description of a size for messages.

        The description names the bound of the rows only if two sizes have the same capacity.

        Example:
            ``"up to 16 documents"``; ``"up to 16 documents and rows of 2048 tokens"``.
        """
        same_capacity = sum(other.capacity == size.capacity for other in self.sizes)
        rows = f" and rows of {size.max_seqlen} tokens" if same_capacity > 1 else ""
        return f"up to {size.capacity} documents{rows}"

    def smallest_for(self, num_seqs: int, longest: int) -> CaptureSize | None:
        """Return the smallest capture size that holds a pack; None if no size holds the pack.

        A pack without a size runs eagerly. `require` raises an error in its place.

        Args:
            num_seqs: number of real documents of the pack.
            longest: longest row of the pack in tokens, including the tail
                (``PackedSeqParams.max_seqlen``).
        """
        return next((size for size in self.sizes if size.holds(num_seqs, longest)), None)

    def require(self, num_seqs: int, longest: int) -> CaptureSize:
        """Return the smallest capture size that holds a pack.

        Args:
            num_seqs, longest: as for `smallest_for`.
        Raises:
            ValueError: no size holds the pack; the error lists the sizes.
        """
        size = self.smallest_for(num_seqs, longest)
        if size is None:
            listed = ", ".join(f"{size.capacity} x {size.max_seqlen}" for size in self.sizes)
            raise ValueError(
                f"no capture size holds a pack of {num_seqs} documents with rows of up to {longest} tokens; the sizes "
                f"(documents x tokens of a row) are {listed}. Put fewer or shorter documents into the pack, add a "
                "larger size, or run the pack eagerly."
            )
        return size


def choose_capacities(
    documents_per_pack: NDArray[np.integer] | Sequence[int],
    *,
    document_cost: float = DOCUMENT_COST,
    capacity_cost: float = CAPACITY_COST,
    most_capacities: int = MOST_CAPACITIES,
) -> tuple[int, ...]:
    """Choose the capacities that hold every pack at the lowest cost; of equal costs the fewest.

    A pack costs ``1 + document_cost * capacity``, where the capacity is the smallest that holds the
    pack. The total cost is the mean over all packs, plus ``capacity_cost`` for each capacity. The
    largest capacity is the largest count of documents (at least 1).

    Method: only document counts that occur need to be considered as capacities. Let ``c_j`` be the
    sorted distinct counts, and ``n_j`` the number of packs with at most ``c_j`` documents. Let
    ``room_k(j)`` be the smallest sum of capacities over these packs with k capacities. Then
    ``room_k(j) = min_(i < j) room_(k-1)(i) + c_j (n_j - n_i)``. All terms are integers, so the
    result is the same on all machines.

    Args:
        documents_per_pack: ``(packs,)`` number of real documents in each pack.
        document_cost, capacity_cost: as `DOCUMENT_COST` and `CAPACITY_COST`.
        most_capacities: largest number of capacities.
    Returns: the capacities, smallest first.
    Raises:
        ValueError: no packs, a negative count or cost, or ``most_capacities`` below 1.
    Example: counts [3, 3, 3, 3, 100] with the default costs give ``(3, 100)``; the second capacity
        saves 0.097 for 4 of 5 packs.
    """
    counts = np.asarray(documents_per_pack, dtype=np.int64)
    if counts.size == 0:
        raise ValueError(
            "documents_per_pack is empty, so no capacity can be chosen; pass at least one pack."
        )
    least = int(np.min(counts))
    if least < 0 or document_cost < 0 or capacity_cost < 0 or most_capacities < 1:
        raise ValueError(
            f"documents_per_pack (smallest {least}), document_cost ({document_cost}) and capacity_cost "
            f"({capacity_cost}) must not be negative, and most_capacities ({most_capacities}) must be at least 1."
        )
    distinct, packs = np.unique(np.maximum(counts, 1), return_counts=True)
    below = np.concatenate(
        [[0], np.cumsum(packs)]
    )  # (D + 1,) number of packs with one of the first j distinct counts
    room = distinct * below[1:]  # room_1: one capacity for all packs
    steps: list[NDArray[np.int64]] = []  # steps[k - 2][j]: index of the next smaller capacity of k
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
"""Value of ``room_k(j)`` for fewer distinct counts than capacities, which is impossible."""


def _one_capacity_more(
    room: NDArray[np.int64], distinct: NDArray[np.int64], below: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute ``room_k`` from ``room_(k-1)``.

    Returns:
        ``(D,)`` ``room_k``, and ``(D,)`` the index of the next smaller capacity.
    """
    new_room = np.full_like(room, _UNREACHABLE)
    under = np.zeros_like(room)
    for j in range(1, distinct.size):
        total = room[:j] + distinct[j] * (below[j + 1] - below[1 : j + 1])
        under[j] = np.argmin(total)
        new_room[j] = min(int(total[under[j]]), _UNREACHABLE)
    return new_room, under


def percentile(documents_per_pack: NDArray[np.integer], share: float) -> int:
    """Return the smallest document count that at least ``share`` of the packs do not exceed.

    The result is a count that occurs (nearest-rank percentile). ``share`` 0.5 is the median, 0.99
    the P99, 1.0 the maximum. The result is also the smallest capacity that holds ``share`` of the
    packs.

    Raises:
        ValueError: no packs, or ``share`` outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; it must be above 0 and at most 1, for example 0.99.")
    counts = np.sort(np.asarray(documents_per_pack))
    if counts.size == 0:
        raise ValueError(
            "documents_per_pack is empty, so it has no percentile; pass at least one pack."
        )
    # 1e-9 compensates rounding: 0.9 of 10 packs must be rank 9, not rank 10.
    rank = int(np.ceil(share * counts.size - 1e-9))
    return int(counts[max(rank, 1) - 1])


def coverage(
    documents_per_pack: NDArray[np.integer], capacities: Iterable[int]
) -> dict[int, float]:
    """Return the share of the packs that each capacity holds.

    Returns:
        Capacity -> share of packs with at most this number of documents.
    Example:
        Counts [1, 3, 3, 9] and capacities (2, 3, 16): ``{2: 0.25, 3: 0.75, 16: 1.0}``.
    Raises:
        ValueError: no packs.
    """
    counts = np.sort(np.asarray(documents_per_pack))
    if counts.size == 0:
        raise ValueError(
            "documents_per_pack is empty, so there is no coverage; pass at least one pack."
        )
    return {
        capacity: int(np.searchsorted(counts, capacity, side="right")) / counts.size
        for capacity in capacities
    }
