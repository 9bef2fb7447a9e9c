"""Measure of how often two documents that share a pack in one epoch share a pack in the next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_packed.data.packing.packer import Packs
from megatron_packed.packed.array_types import Int64Array, IntegerArray


class Companions(NamedTuple):
    """Counts of pairs of documents that share a pack, over two epochs of the same documents."""

    pairs: int
    """Pairs that share a pack in the first epoch."""
    again: int
    """Pairs that share a pack in both epochs."""
    by_chance: float
    """Expected number of pairs that share a pack in both epochs if the packs of the second epoch
    are filled at random. Documents that are alone in their pack in both epochs do not take part.
    """

    @property
    def share(self) -> float:
        """Share of the pairs of the first epoch that share a pack again in the second epoch."""
        return self.again / self.pairs if self.pairs else 0.0

    @property
    def chance(self) -> float:
        """Value of ``share`` expected by chance."""
        return self.by_chance / self.pairs if self.pairs else 0.0


def companions(first: Packs, second: Packs) -> Companions:
    """Count the pairs of documents that share a pack in both epochs.

    Example:
        The first epoch has the packs {0 1 2} and {3}, the second epoch {0 1 3} and {2}. One of
        the 3 pairs of the first epoch shares a pack again. By chance, 3 * 3 / 6 = 1.5 are expected.
    """
    in_first, in_second = _pack_of(first), _pack_of(second)
    pairs, pairs_second = _pairs(first.documents_per_pack), _pairs(second.documents_per_pack)
    _, together = np.unique(in_first * len(second) + in_second, return_counts=True)
    alone = (first.documents_per_pack[in_first] == 1) & (second.documents_per_pack[in_second] == 1)
    sociable = in_first.size - int(np.count_nonzero(alone))
    possible = sociable * (sociable - 1) // 2
    return Companions(pairs, _pairs(together), pairs * pairs_second / possible if possible else 0.0)


def _pack_of(packs: Packs) -> Int64Array:
    """Return the pack of each document, ``(S,)``."""
    pack_of = np.empty(packs.order.size, dtype=np.int64)
    pack_of[packs.order] = np.repeat(np.arange(len(packs)), packs.documents_per_pack)
    return pack_of


def _pairs(counts: IntegerArray) -> int:
    counts = counts.astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())
