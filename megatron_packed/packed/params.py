"""`PackedSeqParams`: the division of a micro-batch's token slots into documents.

The host builds it once per micro-batch, outside captured code, and all layers share it. It never
reads the device: values that Python needs are integers on the host, and values that kernels need are
tensors. If every layer of a 0.6 B transformer derives its mask from the device instead, a step takes
1.20 to 1.33 times as long on an H200 (2026-11-29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_packed.packed.cu_seqlens import (
    Int32Array,
    aligned,
    as_lengths,
    bounded_max_seqlen,
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
)
from megatron_packed.packed.host_to_device_buffer import BufferLayout
from megatron_packed.packed.seq_idx import position_ids_from_cu_seqlens, seq_idx_from_cu_seqlens
from megatron_packed.packed.shared_tables import NO_TABLES, SharedTables


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

    `cu_seqlens.py` describes the layout with an example. The object is immutable: tensors are not
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
