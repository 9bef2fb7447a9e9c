"""Reordering of rows around attention, for models whose other layers need contiguous rows.

[Note: reordered rows]
Mamba layers that pass states need contiguous rows, and attention with ``all_gather`` or ``p2p``
needs a zigzag. There are fewer attention layers than others, so the rows between layers are
contiguous. Queries, keys and values move to the zigzag, and the outputs move back. The number of
rows that a rank owes another one depends on the documents, but CUDA graphs need fixed sizes. So
each move is two all-to-alls of equal parts: rows are exchanged for columns, reordered locally, and
exchanged back.

Letters: T tokens of the pack, c ranks, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.distributed.all_to_all import heads_to_rows, rows_to_columns
from megatron_packed.layers.context_parallel import ContextParallel, permute_rows
from megatron_packed.packed.params import PackedSeqParams


def to_zigzag(
    tensors: Sequence[Tensor], cp: ContextParallel, packed: PackedSeqParams
) -> list[Tensor]:
    """Move ``(T / c, ...)`` tensors from contiguous rows to this rank's rows in attention."""
    columns = [x.flatten(1) for x in tensors]
    moved_TC = _moved(torch.cat(columns, dim=1), cp, packed, back=False)
    parts = torch.split(moved_TC, [x_TC.shape[1] for x_TC in columns], dim=1)
    return [torch.unflatten(part, 1, x.shape[1:]) for part, x in zip(parts, tensors)]


def from_zigzag(x: Tensor, cp: ContextParallel, packed: PackedSeqParams) -> Tensor:
    """Move a ``(T / c, ...)`` tensor back to contiguous rows: the inverse of `to_zigzag`."""
    return torch.unflatten(_moved(x.flatten(1), cp, packed, back=True), 1, x.shape[1:])


def _moved(x_TC: Tensor, cp: ContextParallel, packed: PackedSeqParams, *, back: bool) -> Tensor:
    """Reorder the rows of all ranks. See [Note: reordered rows]."""
    order = cp.attention_order(packed)
    assert order is not None, "cp_comm_type a2a needs no reordering"
    channels, (slots_T, places_T) = x_TC.shape[1], order
    # (T / c, C) -> (T, C / c)
    columns_TC = rows_to_columns((pad(x_TC, (0, -channels % cp.size)),), cp.exchange)
    index_T, inverse_T = (places_T, slots_T) if back else (slots_T, places_T)
    reordered_TC = permute_rows(columns_TC, index_T, inverse_T)
    # (T, C / c) -> (T / c, C)
    (moved_TC,) = heads_to_rows((reordered_TC,), cp.exchange)
    return moved_TC[:, :channels]
