"""`SharedTables`: tensors that all layers of a model derive from a pack, once per micro-batch.

They are computed on the device from tensors of `PackedSeqParams` alone, without the host. So a CUDA
graph can compute them too: it refills the same memory for each micro-batch, and the graphs of the
layers read them at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionTables(Protocol):
    """Mask or block lists that an attention kernel reads, for one window of visible tokens."""

    @property
    def window_size(self) -> int | None:
        """Visible tokens, or None for all."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors alone."""


class RankOrder(NamedTuple):
    """The slots of a pack in the order of the ranks that hold them: all rows of rank 0, all of rank
    1, and so on.
    """

    slots_T: Tensor
    """``(T,)`` int64: the slot that lies at each place."""
    places_T: Tensor
    """``(T,)`` int64: the place of each slot, the inverse."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedTables:
    """Tensors derived from one pack.

    A field is None where the model has no layer that reads it. A layer that misses a field computes
    it for itself.
    """

    attention: AttentionTables | None = None
    """Input of the attention kernel; None if the chosen kernel needs none."""
    rope_position_ids: Tensor | None = None
    """``(T / c,)`` int32, positions of this context-parallel rank's rows; 0 on the tail."""
    rank_order: RankOrder | None = None
    """Order of the pack's slots among c context-parallel ranks; None if it is the pack's own."""
    rank_valid: Tensor | None = None
    """``(T / c,)`` bool, ``valid`` of this context-parallel rank's rows; None if c is 1."""
    num_valid: Tensor | None = None
    """0-d float32, real tokens of the pack, at least 1; for the losses of experts."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        alone = (self.rope_position_ids, self.rank_valid, self.num_valid)
        attention = () if self.attention is None else self.attention.tensors()
        return (*attention, *(self.rank_order or ()), *(x for x in alone if x is not None))


NO_TABLES = SharedTables()
"""Tables of a pack from which nothing has been derived yet."""
