"""Balanced packing of one window: full packs with few documents per pack.

1. *Longest first*: every document, longest first, goes into the emptiest bin. The bins get nearly
   equal numbers of tokens. The short documents are spread over all bins, so that no bin has many
   documents.
2. *Exchange*: bins with more than T tokens swap documents with bins below T until all bins fit. A
   swap keeps the number of documents of both bins. A document may also move into a free slot. The
   largest number of documents of a bin grows by at most `EXTRA`.
3. *Leave over*: documents are removed from bins that are still too full. They are packed in the
   next window.

Notation: B bins of T token slots, n documents, W documents considered per bin in one round of
exchange.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.packed.array_types import Int64Array

LEFT_OVER = -1
"""Value that marks a document as not packed in this window."""

JITTER = 0.5
"""Width of the random factor: documents are sorted by length times a factor within 1 +- JITTER / 2.

The factor changes the documents that share a pack from epoch to epoch, even if one window holds the
complete data set. `exchange` corrects the less even bins that the factor causes.
"""

EXCHANGE_ROUNDS = 30
"""Largest number of rounds of exchange."""

PATIENCE = 8
"""Number of successive rounds without a swap after which exchange stops."""

EXCHANGE_SLOTS = 64
"""Largest number of documents of a bin that exchange may move. The other documents of a bin with
more documents stay in the bin.
"""

EXTRA = 2
"""Number of documents that exchange may add to the largest count of a bin, within the limit."""

EXCHANGE_WIDTH = 16
"""W, the documents considered per bin in one round of exchange."""

PARTNERS = 64
"""Largest number of partner bins of one overfull bin in one round."""


def long_first_order(lengths: Int64Array, random: KeyedRandom) -> Int64Array:
    """Return the documents sorted by decreasing length, with random factors (`JITTER`)."""
    factors = 1024 + random.below(int(1024 * JITTER) + 1, (lengths.size,)) - int(512 * JITTER)
    return np.argsort(-lengths * factors, kind="stable")


def longest_first(
    lengths: Int64Array, num_bins: int, max_documents: int, random: KeyedRandom
) -> Int64Array:
    """Put every document, longest first, into the emptiest bin with fewer than ``max_documents``.

    The order has random factors (`JITTER`). Bins may get more tokens than a pack has slots;
    `exchange` corrects that.

    Args:
        lengths: ``(n,)``, with ``n <= num_bins * max_documents``.
    Returns:
        ``(n,)`` bin of each document.
    """
    order = long_first_order(lengths, random)
    longest = order[:num_bins]
    bins = np.arange(longest.size).tolist()
    # The heap stores each bin as one integer, tokens * num_bins + number, which is fast to compare.
    heap = (lengths[longest] * num_bins + np.arange(longest.size)).tolist()
    heapq.heapify(heap)
    counts = [1] * num_bins
    if max_documents == 1:
        heap = []
    replace, drop = heapq.heapreplace, heapq.heappop
    for length in lengths[order[num_bins:]].tolist():
        top = heap[0]
        emptiest = top % num_bins
        bins.append(emptiest)
        counts[emptiest] += 1
        if counts[emptiest] < max_documents:
            replace(heap, top + length * num_bins)
        else:
            drop(heap)
    bin_of = np.empty(lengths.size, dtype=np.int64)
    bin_of[order] = bins
    return bin_of


class _Bins(NamedTuple):
    """Table of the documents of each bin, in K slots per bin; K is at most `EXCHANGE_SLOTS`."""

    length: Int64Array
    """``(B, K)`` length of the document in each slot; 0 for a free slot."""
    document: Int64Array
    """``(B, K)`` number of the document in each slot; -1 for a free slot."""
    filled: Int64Array
    """``(B,)`` number of filled slots of each bin."""
    tokens: Int64Array
    """``(B,)`` tokens of all documents of each bin, including documents without a slot."""

    @classmethod
    def from_assignment(
        cls, lengths: Int64Array, bin_of: Int64Array, num_bins: int, max_documents: int
    ) -> _Bins:
        count = np.bincount(bin_of, minlength=num_bins)
        num_slots = min(int(count.max()) + EXTRA, max_documents, EXCHANGE_SLOTS)
        by_bin = np.argsort(bin_of, kind="stable")
        slot = np.arange(bin_of.size) - np.repeat(np.cumsum(count) - count, count)
        has_slot = slot < num_slots
        rows, slot, documents = bin_of[by_bin][has_slot], slot[has_slot], by_bin[has_slot]
        length = np.zeros((num_bins, num_slots), dtype=np.int64)
        document = np.full((num_bins, num_slots), -1, dtype=np.int64)
        length[rows, slot] = lengths[documents]
        document[rows, slot] = documents
        tokens = np.bincount(bin_of, weights=lengths, minlength=num_bins).astype(np.int64)
        return cls(length, document, np.minimum(count, num_slots), tokens)

    def choose(self, bins: Int64Array, random: KeyedRandom) -> Int64Array:
        """Choose the slots of each bin to consider, ``bins.shape + (W,)``.

        The choice is among the filled slots and the first free slot of a bin. If these are more
        than W, W of them are drawn at random.
        """
        num_slots = self.length.shape[1]
        filled = self.filled[bins][..., None]
        if num_slots <= EXCHANGE_WIDTH:
            return np.minimum(np.arange(num_slots), filled)
        return random.below(np.minimum(filled + 1, num_slots), (*bins.shape, EXCHANGE_WIDTH))

    def swap(
        self,
        bin_a: Int64Array,
        slot_a: Int64Array,
        bin_b: Int64Array,
        slot_b: Int64Array,
    ) -> None:
        """Swap pairs of documents; no bin may occur twice.

        If ``slot_b`` is the first free slot of a bin, a document moves there. The last document of
        the bin that it leaves then fills the gap.
        """
        a, b = (bin_a, slot_a), (bin_b, slot_b)
        moved = self.length[a] - self.length[b]
        self.tokens[bin_a] -= moved
        self.tokens[bin_b] += moved
        self.length[a], self.length[b] = self.length[b], self.length[a]
        self.document[a], self.document[b] = self.document[b], self.document[a]
        one_way = self.document[a] < 0
        self.filled[bin_b[one_way]] += 1
        left, gap = bin_a[one_way], slot_a[one_way]
        last = self.filled[left] - 1
        self.length[left, gap], self.document[left, gap] = (
            self.length[left, last],
            self.document[left, last],
        )
        self.length[left, last], self.document[left, last] = 0, -1
        self.filled[left] = last


def exchange(
    lengths: Int64Array,
    bin_of: Int64Array,
    num_bins: int,
    slots: int,
    max_documents: int,
    random: KeyedRandom,
) -> Int64Array:
    """Swap documents between bins until no bin has more than ``slots`` tokens, as far as possible.

    In each round every overfull bin considers several partner bins with free slots. No two overfull
    bins have the same partner. Each makes the swap after which the fewest tokens exceed ``slots``.
    Among equal swaps, the swap is chosen that makes the two bins most even. No bin gets more than
    `EXTRA` documents above the largest count, or more than ``max_documents``.

    Returns:
        ``(n,)`` the new bin of each document.
    """
    bins = _Bins.from_assignment(lengths, bin_of, num_bins, max_documents)
    idle = 0
    for _ in range(EXCHANGE_ROUNDS):
        overfull = np.flatnonzero(bins.tokens > slots)
        roomy = np.flatnonzero(bins.tokens < slots)
        if overfull.size == 0 or roomy.size == 0 or idle == PATIENCE:
            break
        if overfull.size > roomy.size:
            fullest = np.argsort(-bins.tokens[overfull], kind="stable")
            overfull = overfull[fullest[: roomy.size]]
        num_partners = min(roomy.size // overfull.size, PARTNERS)
        chosen = random.permutation(roomy.size)[: overfull.size * num_partners]
        partners = roomy[chosen].reshape(overfull.size, num_partners)
        idle = 0 if _exchange_round(bins, overfull, partners, slots, random) else idle + 1
    result: Int64Array = bin_of.copy()
    rows, columns = np.nonzero(bins.document >= 0)
    result[bins.document[rows, columns]] = rows
    return result


def _exchange_round(
    bins: _Bins,
    overfull: Int64Array,
    partners: Int64Array,
    slots: int,
    random: KeyedRandom,
) -> bool:
    """Make the best swap of each of the h overfull bins with one of its P partners.

    Returns:
        True if any swap was made.
    """
    slots_a = bins.choose(overfull, random)  # (h, W)
    slots_b = bins.choose(partners, random)  # (h, P, W)
    length_a = bins.length[overfull[:, None], slots_a]
    length_b = bins.length[partners[:, :, None], slots_b]
    moved = (
        length_a[:, None, :, None] - length_b[:, :, None, :]
    )  # (h, P, W, W) tokens by which a swap reduces the overfull bin
    excess = (bins.tokens[overfull] - slots)[:, None, None, None]
    room = (slots - bins.tokens[partners])[:, :, None, None]
    left = np.maximum(excess - moved, 0) + np.maximum(moved - room, 0)
    # difference of tokens between the two bins after the swap
    unevenness = np.abs(2 * moved - excess - room)
    score = np.where(
        moved > 0,
        left * (4 * slots) + np.minimum(unevenness, 4 * slots - 1),
        np.iinfo(np.int64).max,
    )
    best = score.reshape(overfull.size, -1).argmin(axis=1)
    row = np.arange(overfull.size)
    partner, at_a, at_b = np.unravel_index(best, score.shape[1:])
    helps = (left[row, partner, at_a, at_b] < excess[:, 0, 0, 0]) & (
        moved[row, partner, at_a, at_b] > 0
    )
    row, partner, at_a, at_b = row[helps], partner[helps], at_a[helps], at_b[helps]
    bins.swap(
        overfull[row], slots_a[row, at_a], partners[row, partner], slots_b[row, partner, at_b]
    )
    return bool(helps.any())


def leave_over(lengths: Int64Array, bin_of: Int64Array, num_bins: int, slots: int) -> Int64Array:
    """Remove documents from bins that are still overfull.

    If one document is long enough to make its bin fit, the shortest such document is removed. Else
    the longest document is removed first, until the bin fits.
    """
    result: Int64Array = bin_of.copy()
    tokens = np.bincount(bin_of, weights=lengths, minlength=num_bins).astype(np.int64)
    for number in np.flatnonzero(tokens > slots).tolist():
        inside = np.flatnonzero(bin_of == number)
        inside = inside[np.argsort(lengths[inside], kind="stable")]
        excess = int(tokens[number]) - slots
        while excess > 0:
            at = min(int(np.searchsorted(lengths[inside], excess)), inside.size - 1)
            excess -= int(lengths[inside[at]])
            result[inside[at]] = LEFT_OVER
            inside = np.delete(inside, at)
    return result


def balance(
    lengths: Int64Array, num_bins: int, slots: int, max_documents: int, random: KeyedRandom
) -> Int64Array:
    """Pack documents into ``num_bins`` bins by the three steps of this module.

    Returns:
        ``(n,)`` bin of each document; `LEFT_OVER` for a document that fits nowhere.
    """
    bin_of = longest_first(lengths, num_bins, max_documents, random)
    bin_of = exchange(lengths, bin_of, num_bins, slots, max_documents, random)
    return leave_over(lengths, bin_of, num_bins, slots)


def best_fit(lengths: Int64Array, slots: int, max_documents: int) -> Int64Array:
    """Put each document, in the given order, into the fullest bin where it fits, or into a new bin.

    Args:
        lengths: ``(n,)``, none above ``slots``.
        max_documents: largest number of documents of a bin.
    """
    room: list[int] = []  # sorted list of open bins, each as free slots * 2**32 + bin number
    counts: list[int] = []
    bins: list[int] = []
    for length in lengths.tolist():
        at = bisect_left(room, length << 32)
        if at < len(room):
            packed = room.pop(at)
            number, free = packed & 0xFFFFFFFF, (packed >> 32) - length
            counts[number] += 1
        else:
            number, free = len(counts), slots - length
            counts.append(1)
        bins.append(number)
        if free and counts[number] < max_documents:
            insort(room, free << 32 | number)
    return np.array(bins, dtype=np.int64)
