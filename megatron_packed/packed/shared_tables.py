"""`SharedTables`: tensors for all layers of a model, computed from a pack once per micro-batch.

The tables are computed on the device, only from tensors of `PackedSeqParams`. So a CUDA graph can
compute them: it writes to the same memory for each micro-batch, and the graphs of layers read the
tables at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

Found = TypeVar("Found", bound="KindTables")


class KindTables(Protocol):
    """Tables that only the layers of one kind read."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the tables."""


class RankOrder(NamedTuple):
    """Slots of a pack in rank order: all rows of context-parallel rank 0, then of rank 1, and so on."""

    slots_T: Tensor
    """``(T,)`` int64: slot at each position of the rank order."""
    places_T: Tensor
    """``(T,)`` int64: position of each slot in the rank order (the inverse of ``slots_T``)."""


class Samples(NamedTuple):
    """Division of a pack into B samples, for ``seq_aux_loss``.

    A sample is a document (``--moe-aux-loss-per-document``) or ``--seq-length`` consecutive slots;
    padding of documents is not counted, so that context parallelism, which pads them, gives the same
    samples.
    """

    sample_T: Tensor
    """``(T / c,)`` int64, sample of each row of this context-parallel rank."""
    num_valid_B: Tensor
    """``(B,)`` float32, number of real tokens of each sample on all ranks, at least 1."""
    number: Tensor
    """0-d float32, number of samples by which the sum of their losses is divided, at least 1."""


class DepthTables(NamedTuple):
    """Tables of one depth of multi-token prediction. See `later_tokens.py`."""

    reaches_T: Tensor
    """``(T,)`` bool: True if the slot has a token at this depth."""
    rank_reaches: Tensor
    """``(T / c,)`` bool, ``reaches_T`` of this context-parallel rank's rows."""
    num_valid: Tensor | None
    """0-d float32, number of slots that reach their token, at least 1; None without routers."""
    samples: Samples | None
    """Samples for ``seq_aux_loss``, which count only slots that reach their token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedTables:
    """Tensors that are computed from the metadata of one pack.

    A field is None if no layer of the model reads it. If a layer needs a field that is None, the
    layer computes the tensor itself.
    """

    of_kinds: Mapping[type, KindTables] = field(default_factory=dict)
    """Class of the tables of one kind of layer -> these tables; see `find`."""
    rope_position_ids: Tensor | None = None
    """``(T / c,)`` int32, positions of this context-parallel rank's rows; 0 on the tail."""
    rank_order: RankOrder | None = None
    """Order of the slots in attention over c context-parallel ranks; None if slots keep their order."""
    rank_valid: Tensor | None = None
    """``(T / c,)`` bool, ``valid`` of this context-parallel rank's rows; None if c is 1."""
    num_valid: Tensor | None = None
    """0-d float32, number of real tokens of the pack, at least 1; for losses of MoE routers."""
    samples: Samples | None = None
    """Samples of the pack; None if the pack is one sample, or if no loss is computed per sample."""
    depths: tuple[DepthTables, ...] = ()
    """Tables of depths 1, 2, ... of multi-token prediction; empty without it."""

    def find(self, tables: type[Found]) -> Found | None:
        """Return the tables of this class; None if no kernel needs any."""
        return cast("Found | None", self.of_kinds.get(tables))

    def tensors(self) -> tuple[Tensor, ...]:
        alone = (self.rope_position_ids, self.rank_valid, self.num_valid)
        of_kinds = (tensor for tables in self.of_kinds.values() for tensor in tables.tensors())
        several = (*of_kinds, *(self.rank_order or ()), *(self.samples or ()))
        of_depths = (
            tensor
            for depth in self.depths
            for tensor in (*depth[:3], *(depth.samples or ()))
            if tensor is not None
        )
        return (*several, *(x for x in alone if x is not None), *of_depths)


NO_TABLES = SharedTables()
"""Tables of a pack before any table was computed; all fields are None."""
