"""Share of the documents in one pack of an epoch that share a pack again in the next epoch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.packing.packer import Packs


class Companions(NamedTuple):
    """Pairs of documents in one pack, over two epochs of the same documents."""

    pairs: int
    """Pairs that share a pack in the first epoch."""
    again: int
    """Pairs of these that share one in the second epoch too."""
    by_chance: float
    """Pairs that would meet again if the second epoch's packs were filled at random with the
    documents that have company in either epoch. Documents that fill a pack alone, in both, cannot
    meet anybody and are left out.
    """

    @property
    def share(self) -> float:
        """Share of pairs that meet again."""
        return self.again / self.pairs if self.pairs else 0.0

    @property
    def chance(self) -> float:
        """The share expected by chance."""
        return self.by_chance / self.pairs if self.pairs else 0.0


def companions(first: Packs, second: Packs) -> Companions:
    """Compare two epochs.

    Example:
        packs {0 1 2} {3} and then {0 1 3} {2}: of 3 pairs 1 meets again; by chance 3 x 3 / 6 = 1.5.
    """
    in_first, in_second = _pack_of(first), _pack_of(second)
    pairs, pairs_second = _pairs(first.documents_per_pack), _pairs(second.documents_per_pack)
    _, together = np.unique(in_first * len(second) + in_second, return_counts=True)
    alone = (first.documents_per_pack[in_first] == 1) & (second.documents_per_pack[in_second] == 1)
    sociable = in_first.size - int(np.count_nonzero(alone))
    possible = sociable * (sociable - 1) // 2
    return Companions(pairs, _pairs(together), pairs * pairs_second / possible if possible else 0.0)


def _pack_of(packs: Packs) -> NDArray[np.int64]:
    """``(S,)`` the pack of each document."""
    pack_of = np.empty(packs.order.size, dtype=np.int64)
    pack_of[packs.order] = np.repeat(np.arange(len(packs)), packs.documents_per_pack)
    return pack_of


def _pairs(counts: NDArray[np.integer]) -> int:
    counts = counts.astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())
