"""Packs of one epoch, as the numbers of their pieces, and the check that pieces fit into packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_packed.packed.array_types import Int64Array, IntegerArray

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

    @property
    def documents_per_pack(self) -> Int64Array:
        return np.diff(self.offsets)

    def sums(self, values: IntegerArray) -> Int64Array:
        """Sum a value per piece (lengths, targets, squared lengths) over each pack, ``(packs,)``."""
        running = np.concatenate([[0], np.cumsum(values[self.order], dtype=np.int64)])
        sums: Int64Array = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return sums


def check_lengths(lengths: Int64Array, slots: int) -> None:
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
