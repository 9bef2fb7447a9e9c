"""`PackedSeqParams`, the division of a micro-batch's token slots into documents, and `SharedTables`.

The host builds `PackedSeqParams` once per micro-batch, outside captured code, and all layers share
it. It never reads the device: values that Python needs are integers on the host, and values that kernels need are
tensors. If every layer of a 0.6 B transformer derives its mask from the device instead, a step takes
1.20 to 1.33 times as long on an H200 (2026-11-29).

`SharedTables` are tensors for all layers of a model, computed from a pack once per micro-batch. They
are computed on the device, only from tensors of `PackedSeqParams`. So a CUDA graph can compute them:
it writes to the same memory for each micro-batch, and the graphs of layers read the tables at fixed
addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_packed.packed.cu_seqlens_and_seq_idx import (
    Int32Array,
    aligned,
    as_lengths,
    bounded_max_seqlen,
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
    position_ids_from_cu_seqlens,
    seq_idx_from_cu_seqlens,
)
from megatron_packed.packed.host_to_device_buffer import BufferLayout

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


def packed_fields(
    total_tokens: int, capacity: int
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of each device tensor of a `PackedSeqParams`, in buffer order.

    ``cu_seqlens`` is last, because it is the only tensor whose size depends on the capacity. So the
    offsets of all tensors are the same for all capacities, and graphs of all capacities can use one
    buffer at a fixed address.
    """
    return [
        ("seq_idx", torch.int32, (1, total_tokens)),
        ("position_ids", torch.int32, (total_tokens,)),
        ("valid", torch.bool, (total_tokens,)),
        ("cu_seqlens", torch.int32, (capacity + 2,)),
    ]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedSeqParams:
    """Metadata of one pack with T slots and a capacity of N documents.

    `cu_seqlens_and_seq_idx.py` describes the layout with an example. The object is immutable: tensors are not
    written after construction, except in the buffer of a CUDA-graph slot.
    """

    cu_seqlens: Tensor
    """``(N + 2,)`` int32, on the device: 0, document ends, T, T repeated."""
    max_seqlen: int
    """Upper bound of the longest row in tokens, at least 1, **including the tail**.

    Kernels process the tail like a document. The value is exact unless a larger bound was requested;
    under capture it must be constant.
    """
    seq_idx: Tensor
    """``(1, T)`` int32, document number of each slot; ``num_seqs`` for slots of the tail."""
    position_ids: Tensor
    """``(T,)`` int32, position of each slot, from 0 in each document and in the tail."""
    valid: Tensor
    """``(T,)`` bool, False on the tail and on a document's padding."""
    num_seqs: int
    """Number of real documents, between 0 and N, without the tail."""
    cu_seqlens_cpu: Tensor
    """``(N + 2,)`` int32, copy of ``cu_seqlens`` on the host, in separate memory.

    So the copy stays valid when the buffer of the other tensors is reused.
    """
    total_tokens: int
    """Number of token slots of the pack, T."""
    tables: SharedTables = NO_TABLES
    """Tensors for all layers that are computed from the other fields, once per micro-batch."""

    def __repr__(self) -> str:
        facts = vars(self)  # subclasses raise errors for stale attributes, but a repr must work
        return (
            f"{type(self).__name__}({facts['num_seqs']} documents in {facts['total_tokens']} slots, "
            f"capacity {facts['cu_seqlens'].shape[0] - 2}, longest row {facts['max_seqlen']}, "
            f"{facts['cu_seqlens'].device})"
        )

    @property
    def capacity(self) -> int:
        """Largest number of real documents, N."""
        return self.cu_seqlens.shape[0] - 2

    @property
    def document_lengths(self) -> NDArray[np.int32]:
        """Number of slots of each real document, including padding, ``(num_seqs,)`` int32, host."""
        return lengths_from_cu_seqlens(self.cu_seqlens_cpu.numpy(), self.num_seqs)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | NDArray[np.integer],
        total_tokens: int,
        capacity: int | None = None,
        max_seqlen: int | None = None,
        device: torch.device | str = "cpu",
        alignment: int = 1,
    ) -> PackedSeqParams:
        """Build the metadata of documents of ``lengths`` tokens, in this order.

        The tensors share one buffer, which one copy moves to ``device``.

        Args:
            lengths: number of tokens of each document; without documents the pack is only the tail.
            total_tokens: number of token slots, T.
            capacity: capacity in real documents; None for ``len(lengths)``.
            max_seqlen: upper bound of the longest row; None for the exact value.
            device: device of the tensors.
            alignment: documents begin and end at multiples of this number of slots.
        Raises:
            ValueError: the documents do not fit, or ``max_seqlen`` is below the longest row.
        """
        cu_seqlens = cu_seqlens_from_lengths(aligned(lengths, alignment), total_tokens, capacity)
        layout = BufferLayout.from_fields(packed_fields(total_tokens, cu_seqlens.size - 2))
        buffer = layout.allocate()
        write_packed(layout.views(buffer), cu_seqlens, as_lengths(lengths))
        return cls.from_views(
            layout.views(buffer.to(device)),
            num_seqs=len(lengths),
            max_seqlen=bounded_max_seqlen(cu_seqlens, max_seqlen),
            cu_seqlens_cpu=torch.from_numpy(cu_seqlens),
        )

    @classmethod
    def from_views(
        cls, views: Mapping[str, Tensor], *, num_seqs: int, max_seqlen: int, cu_seqlens_cpu: Tensor
    ) -> PackedSeqParams:
        """Build the metadata from the tensors named in `packed_fields`; ignore other ``views``."""
        return cls(
            cu_seqlens=views["cu_seqlens"],
            max_seqlen=max_seqlen,
            seq_idx=views["seq_idx"],
            position_ids=views["position_ids"],
            valid=views["valid"],
            num_seqs=num_seqs,
            cu_seqlens_cpu=cu_seqlens_cpu,
            total_tokens=views["position_ids"].shape[0],
        )

    def with_tables(self, tables: SharedTables) -> PackedSeqParams:
        """Return the metadata of the same pack with other ``tables``."""
        return replace(self, tables=tables)

    def to_megatron_core(self) -> Any:
        """Return this metadata as megatron.core's `PackedSeqParams`, without synchronization.

        The constructor of megatron.core's class would compute ``seq_idx`` on the device with a
        data-dependent size, if it had ``total_tokens``. So this method sets both attributes after
        the constructor.
        ``pad_between_seqs`` is False, because padding is a part of the documents. With None,
        TransformerEngine would compare offsets on the device.
        """
        from megatron.core.packed_seq_params import PackedSeqParams as MegatronPackedSeqParams

        params = MegatronPackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )
        params.total_tokens = self.total_tokens
        params.seq_idx = self.seq_idx
        params.pad_between_seqs = False
        return params


def write_packed(
    views: Mapping[str, Tensor], cu_seqlens: Int32Array, lengths: NDArray[np.integer]
) -> None:
    """Fill the host tensors named in `packed_fields`.

    Args:
        views: the tensors, by name.
        cu_seqlens: offsets, including padding.
        lengths: number of tokens of each document, without padding.
    """
    views["cu_seqlens"].numpy()[:] = cu_seqlens
    views["seq_idx"].numpy()[0] = seq_idx_from_cu_seqlens(cu_seqlens)
    views["position_ids"].numpy()[:] = position_ids_from_cu_seqlens(cu_seqlens)
    tokens_of_row = np.zeros(cu_seqlens.size - 1, dtype=np.int32)
    tokens_of_row[: lengths.size] = lengths
    np.less(
        views["position_ids"].numpy(),
        tokens_of_row[views["seq_idx"].numpy()[0]],
        out=views["valid"].numpy(),
    )
