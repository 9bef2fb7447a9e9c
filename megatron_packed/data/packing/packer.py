"""Packing of documents, as a pure function of (lengths, packing rules, seed, epoch).

Every epoch shuffles the documents, cuts the stream into windows of equal size (at least
`Packer.window` documents), and packs one window after the other. Each document is in exactly one
pack of each epoch.

Methods:
    balanced: full packs with few documents per pack (see `balanced_packer`). Documents that a
        window could not place are packed first in the next window. So are documents at the end of
        a window that would have opened a nearly empty pack. Only the last window of an epoch then
        has a partly empty pack. If more than `GOOD_WASTE` of the slots stay empty, best fit with a
        limit on documents is tried too, in shuffled order and with the long documents first. The
        plan with the lowest expected cost is used.
    best_fit_decreasing: in each window, every document, longest first, goes into the fullest pack
        in which it fits. The packs are the fullest, but the last packs of a window consist of short
        documents and therefore have by far the most documents.
    sequential: packs are filled in the order of the shuffled stream. A document that does not fit
        opens a new pack.

The expected cost of a plan, per packed token, is ``packs * (1 + DOCUMENT_COST * most documents in
a pack) / tokens``. A pack costs the same time whether it is full or not. The kernels also take time
for the capacity in documents, which is set by the pack with the most documents.

With an alignment, all lengths in this module are rounded up to it, because padding occupies slots
as tokens do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.data.packing.balanced_packer import (
    LEFT_OVER,
    balance,
    best_fit,
    long_first_order,
)
from megatron_packed.packed.array_types import Int64Array, IntegerArray
from megatron_packed.packed.capture_sizes import DOCUMENT_COST
from megatron_packed.packed.cu_seqlens_and_seq_idx import aligned, as_lengths

METHODS = ("balanced", "best_fit_decreasing", "sequential")

GOOD_WASTE = 0.01
"""Share of empty slots above which best fit is tried too for a window."""
_MOST_SHOWN = 5
"""Number of documents that an error names."""


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs of pieces. Pack i has the pieces ``order[offsets[i] : offsets[i + 1]]``, in this order."""

    order: Int64Array
    offsets: Int64Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> Int64Array:
        return self.order[self.offsets[pack] : self.offsets[pack + 1]]

    def part(self, first: int, count: int) -> list[Int64Array]:
        """Return ``count`` packs from pack ``first`` on; fewer at the end."""
        return [self[pack] for pack in range(first, min(first + count, len(self)))]

    @property
    def documents_per_pack(self) -> Int64Array:
        return np.diff(self.offsets)

    def sums(self, values: IntegerArray) -> Int64Array:
        """Sum a value per piece (lengths, targets, squared lengths) over each pack, ``(packs,)``."""
        running = np.concatenate([[0], np.cumsum(values[self.order], dtype=np.int64)])
        sums: Int64Array = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return sums


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packing rules.

    Example:
        ``Packer(slots=8).pack_lengths([5, 3, 4, 4, 6])`` gives ``[[0, 1], [3, 2], [4]]``: documents
        0 and 1 fill the first pack, documents 3 and 2 the second, and document 4 is alone.
    """

    slots: int
    """Token slots T of a pack."""
    method: str = "balanced"
    """One of `METHODS`."""
    window: int = 4096
    """Smallest number of documents that are packed together."""
    max_documents: int | None = None
    """Largest number of documents of a pack; None for no limit."""
    room: int | None = None
    """Largest number of documents that the CUDA graphs can hold; None without graphs.

    Each epoch is first packed without this limit. If a pack has more documents, the epoch is packed
    again with this value as `max_documents`. Epochs within the limit are therefore packed the same
    with and without graphs.
    """
    alignment: int = 1
    """Each piece is padded to a multiple of this number of slots, which must divide `slots`."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"unknown packing method {self.method!r}; choose one of {', '.join(METHODS)}."
            )
        for name in ("slots", "window", "max_documents", "room", "alignment"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.slots % self.alignment:
            raise ValueError(
                f"alignment ({self.alignment}) does not divide the {self.slots} slots of a pack, so a document that "
                "fills a pack would not fit; choose an alignment that divides the slots."
            )

    @classmethod
    def from_config(cls, config: PackingConfig, alignment: int = 1) -> Packer:
        """Return the rules of ``config``; ``alignment`` is `RunConfig.document_alignment`."""
        return cls(
            slots=config.tokens_per_pack,
            method=config.packing_method,
            window=config.packing_window,
            max_documents=config.max_documents_per_pack,
            alignment=alignment,
        )

    def keeping_to(self, room: int) -> Packer:
        """Return the same rules with ``room``. If `max_documents` is at most ``room``, return ``self``."""
        if self.max_documents is not None and self.max_documents <= room:
            return self
        return replace(self, room=room)

    def pack_lengths(
        self, lengths: Iterable[int] | IntegerArray, *, seed: int = 1234, epoch: int = 0
    ) -> list[list[int]]:
        """Return the numbers of the documents of each pack of one epoch, in training order.

        Each document is in exactly one pack. The packs are those of `PackedDataset` and of a
        training run with documents of these lengths, the same rules, seed and epoch.

        Args:
            lengths: ``(S,)`` tokens of each document, between 1 and `slots`.
            seed: seed of the document order.
            epoch: epoch, from 0; epochs differ in their packs.
        Raises:
            ValueError: a length is no whole number or does not fit into a pack; the seed or the
                epoch is no whole number, or the epoch is negative.
        """
        check_integers(seed=seed, epoch=epoch)
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; the first epoch is 0.")
        sized = lengths if isinstance(lengths, Sized) else list(lengths)
        packs = self.pack(as_lengths(sized), seed, epoch)
        return [pack.tolist() for pack in packs.part(0, len(packs))]

    def pack(
        self,
        lengths: IntegerArray,
        seed: int,
        epoch: int = 0,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> Packs:
        """Pack one epoch and return its packs in training order.

        Args:
            lengths: ``(S,)`` tokens of each piece, between 1 and ``slots``.
            on_progress: called after each window with the number of pieces packed so far.
        Raises:
            ValueError: a length is out of range.
        """
        tokens: Int64Array = np.asarray(lengths, dtype=np.int64)
        _check_lengths(tokens, self.slots)
        tokens = aligned(tokens, self.alignment)
        packs = self._pack(tokens, seed, epoch, on_progress)
        if self.room is None or packs.documents_per_pack.max(initial=0) <= self.room:
            return packs
        return replace(self, max_documents=self.room, room=None)._pack(
            tokens, seed, epoch, on_progress
        )

    def _pack(
        self, tokens: Int64Array, seed: int, epoch: int, on_progress: Callable[[int], None]
    ) -> Packs:
        if tokens.size == 0:
            return Packs(np.zeros(0, np.int64), np.zeros(1, np.int64))
        stream = KeyedRandom(seed, "documents", epoch).permutation(tokens.size)
        pack_of = self._pack_stream(tokens[stream], KeyedRandom(seed, "packs", epoch), on_progress)
        # The packs get a random order; the documents within a pack keep the order of the stream.
        rank = KeyedRandom(seed, "order", epoch).permutation(int(pack_of.max()) + 1)
        shuffled = rank[pack_of]
        order = stream[np.argsort(shuffled, kind="stable")]
        return Packs(order, np.concatenate([[0], np.cumsum(np.bincount(shuffled))]))

    def _pack_stream(
        self, lengths: Int64Array, random: KeyedRandom, on_progress: Callable[[int], None]
    ) -> Int64Array:
        """Return the pack of each document of a stream, ``(S,)``, numbered from 0 without gaps."""
        if self.method == "sequential":
            return _sequential(lengths, self.slots, self.max_documents or lengths.size)
        num_windows = max(1, lengths.size // self.window)
        windows = np.array_split(np.arange(lengths.size), num_windows)
        pack_of = np.empty(lengths.size, dtype=np.int64)
        num_packs = 0
        waiting = windows[0][:0]
        balancer = _Balancer(self.slots, self.max_documents or lengths.size, random)
        for number, window in enumerate(windows):
            candidates = np.concatenate([waiting, window])
            if self.method == "balanced":
                bin_of = balancer.pack(lengths[candidates], last=number == num_windows - 1)
            else:
                bin_of = _best_fit_decreasing(
                    lengths[candidates], self.slots, self.max_documents or lengths.size
                )
            packed = bin_of != LEFT_OVER
            pack_of[candidates[packed]] = num_packs + bin_of[packed]
            num_packs += int(bin_of.max(initial=LEFT_OVER)) + 1
            waiting = candidates[~packed]
            on_progress(int(window[-1]) + 1)
        return pack_of


def check_integers(**values: Any) -> None:
    """Check that each value is an integer.

    Raises:
        ValueError: with the name and the value.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give an integer.")


def _check_lengths(lengths: Int64Array, slots: int) -> None:
    """Check that each document fits into a pack of ``slots`` tokens.

    Raises:
        ValueError: with the first documents that do not fit, and the cure.
    """
    misfits = np.flatnonzero((lengths < 1) | (lengths > slots))
    if misfits.size:
        named = ", ".join(f"document {n} has {lengths[n]}" for n in misfits[:_MOST_SHOWN])
        suffix = ", ..." if misfits.size > _MOST_SHOWN else ""
        raise ValueError(
            f"{misfits.size} of {lengths.size} documents do not fit into a pack of {slots} tokens: {named}{suffix}. "
            f"Documents have 1 to {slots} tokens; apply an over-long policy first: split, shorten or leave out the "
            "others."
        )


def _sequential(lengths: Int64Array, slots: int, max_documents: int) -> Int64Array:
    ends = np.cumsum(lengths)
    starts = [0]
    while (start := starts[-1]) < lengths.size:
        filled = int(ends[start - 1]) if start else 0
        starts.append(
            min(int(np.searchsorted(ends, filled + slots, side="right")), start + max_documents)
        )
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _best_fit_decreasing(lengths: Int64Array, slots: int, max_documents: int) -> Int64Array:
    order = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(lengths.size, dtype=np.int64)
    bin_of[order] = best_fit(lengths[order], slots, max_documents)
    return bin_of


class _Plan(NamedTuple):
    """Plan of one window: the bin of each document, or `LEFT_OVER` for the next window."""

    bin_of: Int64Array
    num_bins: int
    most: int
    """Largest number of documents in a bin."""
    tokens: int
    """Tokens of the documents in bins."""
    left: int
    """Tokens of the documents that are left for the next window."""

    @classmethod
    def from_bins(cls, bin_of: Int64Array, num_bins: int, lengths: Int64Array) -> _Plan:
        packed = bin_of != LEFT_OVER
        most = int(np.bincount(bin_of[packed], minlength=1).max())
        tokens = int(lengths[packed].sum())
        return cls(bin_of, num_bins, most, tokens, int(lengths.sum()) - tokens)


@dataclass
class _Balancer:
    """Balanced packer of the windows of one epoch; it starts each window from the choices of
    earlier windows."""

    _slots: int
    _limit: int
    """Largest number of documents of a pack."""
    _random: KeyedRandom
    _packs: int = 0
    _tokens: int = 0
    _most: int = 0
    _by_fit: bool = False
    """True if best fit cost less in the first window; then best fit packs the other windows."""
    _waste: float = 0.0
    """Smallest share of its slots that a window left empty, an estimate of the share that cannot be
    filled with these lengths.
    """

    def pack(self, lengths: Int64Array, last: bool) -> Int64Array:
        """Return the bin of each document, ``(n,)``, or `LEFT_OVER` for the next window.

        The last window leaves no document over.
        """
        count = lengths.size if last else self._prefix(lengths)
        bin_of = np.full(lengths.size, LEFT_OVER, dtype=np.int64)
        if count == 0:
            return bin_of
        plan = self._choose(lengths[:count], last)
        waste = 1 - plan.tokens / (plan.num_bins * self._slots)
        self._waste = waste if self._packs == 0 else min(self._waste, waste)
        self._packs += plan.num_bins
        self._tokens += plan.tokens
        self._most = max(self._most, plan.most)
        bin_of[:count] = plan.bin_of
        return bin_of

    def _cost(self, plan: _Plan) -> float:
        """Return the expected cost per token of the epoch up to this window, with this plan.

        The largest number of documents of any window counts for all packs of the epoch.
        """
        packs = self._packs + plan.num_bins
        return (
            packs
            * (1 + DOCUMENT_COST * max(self._most, plan.most))
            / max(self._tokens + plan.tokens, 1)
        )

    def _prefix(self, lengths: Int64Array) -> int:
        """Return the number of leading documents that fill complete packs.

        The documents after them would open a nearly empty pack and wait for the next window.
        """
        ends = np.cumsum(self._occupied(lengths))
        full_packs = int(ends[-1]) // self._slots
        if (
            max(self._large(lengths), lengths.size // self._limit) > full_packs
            # large documents or the limit on documents set the number of packs, not tokens
        ):
            return lengths.size
        return int(np.searchsorted(ends, full_packs * self._slots, side="right"))

    def _occupied(self, lengths: Int64Array) -> Int64Array:
        """Return the slots that each document occupies.

        A document occupies a complete pack if not even the shortest document fits next to it.
        """
        return np.where(lengths + lengths.min() > self._slots, self._slots, lengths)

    def _large(self, lengths: Int64Array) -> int:
        """Count the documents that are longer than half a pack; each needs a pack of its own."""
        return int(np.count_nonzero(2 * lengths > self._slots))

    def _choose(self, lengths: Int64Array, last: bool) -> _Plan:
        if self._by_fit:
            return self._best_fit(lengths, min(2 * self._most + 2, self._limit))
        first = self._most == 0
        plan = self._first(lengths, last) if first else self._next(lengths, last)
        if plan.tokens >= (1 - GOOD_WASTE) * plan.num_bins * self._slots:
            return plan
        fitted = self._best_fit(lengths, min(2 * plan.most + 2, self._limit))
        self._by_fit = first and self._cost(fitted) < self._cost(plan)
        return min(plan, fitted, key=self._cost)

    def _first(self, lengths: Int64Array, last: bool) -> _Plan:
        """Plan the first window of an epoch: lower the limit on documents while the cost falls."""
        plan = self._fewest_bins(lengths, last, self._limit)
        while plan.most > 1:
            lower = self._fewest_bins(lengths, last, plan.most - max(1, plan.most // 50))
            if self._cost(lower) >= self._cost(plan):
                break
            plan = lower
        return plan

    def _next(self, lengths: Int64Array, last: bool) -> _Plan:
        """Plan a later window with the limit on documents of the windows before it.

        A higher limit is used if it lowers the expected cost.
        """
        cap, step, start = self._most, max(1, self._most // 50), self._start(lengths)
        plan = higher = self._fewest_bins(lengths, last, cap)
        while (
            higher.num_bins > start
            and cap < self._limit
            and (higher.most == cap or cap * start < lengths.size)
        ):
            cap, step = min(cap + step, self._limit), 2 * step
            higher = self._fewest_bins(lengths, last, cap)
            plan = min(plan, higher, key=self._cost)
        return plan

    def _best_fit(self, lengths: Int64Array, cap: int) -> _Plan:
        """Plan a window by best fit, in shuffled order or longest first, whichever costs less."""
        plans = []
        for order in (np.arange(lengths.size), long_first_order(lengths, self._random)):
            bin_of = np.empty(lengths.size, dtype=np.int64)
            bin_of[order] = best_fit(lengths[order], self._slots, cap)
            plans.append(_Plan.from_bins(bin_of, int(bin_of.max()) + 1, lengths))
        return min(plans, key=self._cost)

    def _start(self, lengths: Int64Array) -> int:
        """Return the number of bins to try first.

        The number is a lower bound, or slightly below the number expected from earlier windows.
        """
        tokens = int(lengths.sum())
        by_tokens = -(-int(self._occupied(lengths).sum()) // self._slots)
        by_waste = int(0.998 * tokens / (self._slots * (1 - self._waste)))
        return max(by_tokens, by_waste, self._large(lengths), -(-lengths.size // self._limit))

    def _fewest_bins(self, lengths: Int64Array, last: bool, cap: int) -> _Plan:
        """Plan a window by `balance` with the fewest bins that leave few enough tokens over.

        The last window must leave nothing over. Other windows may leave over the tokens of one
        pack, or 0.2 % of all slots if that is more. Larger leftovers would accumulate from window
        to window.
        """
        num_bins = max(self._start(lengths), -(-lengths.size // cap))
        while True:
            bin_of = balance(lengths, num_bins, self._slots, cap, self._random)
            plan = _Plan.from_bins(bin_of, num_bins, lengths)
            allowed = 0 if last else max(self._slots, num_bins * self._slots // 500)
            if plan.left <= allowed:
                return plan
            num_bins += max(1, (plan.left - allowed) // self._slots)
