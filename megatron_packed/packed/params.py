"""`PackedSeqParams`: how the token slots of one micro-batch divide into documents.

Built once per micro-batch on the host, outside anything captured, and shared by all layers. Nothing
in it asks the device a question: what Python needs to know is a host integer, what kernels need is
a tensor.
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
    cu_seqlens_from_lengths,
    lengths_from_cu_seqlens,
    longest_document,
)
from megatron_packed.packed.host_to_device_buffer import BufferLayout
from megatron_packed.packed.seq_idx import position_ids_from_cu_seqlens, seq_idx_from_cu_seqlens
from megatron_packed.packed.shared_tables import NO_TABLES, SharedTables


def packed_fields(
    total_tokens: int, capacity: int
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return name, dtype and shape of each device tensor of a `PackedSeqParams`, in buffer order.

    ``cu_seqlens`` comes last: it alone depends on the capacity, so every other tensor has the same
    offset for all capacities, and one buffer at a fixed address serves the graphs of all of them.
    """
    return [
        ("seq_idx", torch.int32, (1, total_tokens)),
        ("position_ids", torch.int32, (total_tokens,)),
        ("valid", torch.bool, (total_tokens,)),
        ("cu_seqlens", torch.int32, (capacity + 2,)),
    ]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedSeqParams:
    """The documents of one pack of T slots with room for N documents (see `cu_seqlens.py` for the
    layout and an example).

    Immutable: the tensors are never written after construction, except by a CUDA-graph slot that
    owns its own copy.
    """

    cu_seqlens: Tensor
    """``(N + 2,)`` int32, on the device: 0, document ends, T, T repeated."""
    max_seqlen: int
    """Upper bound of the longest row in tokens, at least 1. **The tail counts**, since kernels run
    over it like over any document. Exact unless a larger bound was asked for (under capture it must
    be constant).
    """
    seq_idx: Tensor
    """``(1, T)`` int32, document number of each slot; the tail's is ``num_seqs``."""
    position_ids: Tensor
    """``(T,)`` int32, from 0 in each document and in the tail."""
    valid: Tensor
    """``(T,)`` bool, False on the tail and on a document's padding."""
    num_seqs: int
    """Real documents, between 0 and N; the tail is not one."""
    cu_seqlens_cpu: Tensor
    """``(N + 2,)`` int32, host twin of ``cu_seqlens`` in memory of its own, so that it outlives a
    reused buffer.
    """
    total_tokens: int
    """Token slots T of the pack."""
    tables: SharedTables = NO_TABLES
    """Tensors that all layers derive from the others, once per micro-batch."""

    def __repr__(self) -> str:
        facts = vars(self)  # past the guards of subclasses: what is stale can be shown
        return (
            f"{type(self).__name__}({facts['num_seqs']} documents in {facts['total_tokens']} slots, "
            f"room for {facts['cu_seqlens'].shape[0] - 2}, longest row {facts['max_seqlen']}, "
            f"{facts['cu_seqlens'].device})"
        )

    @property
    def capacity(self) -> int:
        """Real documents there is room for, N."""
        return self.cu_seqlens.shape[0] - 2

    @property
    def document_lengths(self) -> NDArray[np.int32]:
        """Slots of each real document, its padding included, ``(num_seqs,)`` int32, on the host."""
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
        """Pack documents of ``lengths`` tokens, in this order, into ``total_tokens`` slots; an
        empty list is all tail.

        The tensors share one buffer and reach ``device`` in one copy.

        Args:
            capacity: real documents to leave room for; None for exactly ``len(lengths)``.
            max_seqlen: upper bound to report instead of the exact longest row.
            alignment: documents begin and end at multiples of it.
        Raises:
            ValueError: the documents do not fit, or ``max_seqlen`` is below the longest row.
        """
        cu_seqlens = cu_seqlens_from_lengths(aligned(lengths, alignment), total_tokens, capacity)
        layout = BufferLayout.of(packed_fields(total_tokens, cu_seqlens.size - 2))
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
        """Wrap the tensors named in `packed_fields`; other entries of ``views`` are left alone."""
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
        """Return the same pack with ``tables`` in place of those that it has."""
        return replace(self, tables=tables)

    def to_megatron_core(self) -> Any:
        """Return this pack as megatron.core's class of the same name, without a device
        synchronisation.

        Its constructor would compute ``seq_idx`` on the device with a data-dependent size, so ours
        is set afterwards. There is no padding between documents (theirs is a part of them), and we
        say so; TransformerEngine would else compare offsets on device.
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
    """Fill the host tensors named in `packed_fields` from the offsets and the documents' tokens,
    padding excluded.
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


def bounded_max_seqlen(cu_seqlens: Int32Array, max_seqlen: int | None) -> int:
    """Return the longest row, or the larger bound that was requested.

    Raises:
        ValueError: ``max_seqlen`` is below the longest row, so kernels would skip its end.
    """
    longest = longest_document(cu_seqlens)
    if max_seqlen is None:
        return longest
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen ({max_seqlen}) is below the longest row of the pack ({longest} tokens, the tail included); "
            f"pass at least {longest}, or total_tokens to be safe for every pack."
        )
    return max_seqlen
