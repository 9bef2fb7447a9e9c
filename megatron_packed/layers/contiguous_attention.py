"""Attention over contiguous rows of context-parallel ranks.

Rank r has slots ``[r R, (r + 1) R)`` of a pack, R = T / c. Only the document of its first row can
have tokens on earlier ranks. So a rank receives keys and values of other ranks, and its queries see
those of their documents. No document needs padding. The kernel is any that takes keys before a
document's first query (`varlen_attention`).

``all_gather`` brings the rows of all ranks in one collective. ``p2p`` passes rows from rank to rank,
as far as the attention window reaches: without a window to all ranks. The ring is closed, so the
first ranks also receive rows of the last ones, which no query sees.

The last ranks of a long document see more keys than the first ones: twice the mean if the document
fills the pack, and more beside short documents. A zigzag (`packed.cp_partition`) has equal work on all
ranks, but pads documents.

Shapes: T token slots of the pack, c ranks, R = T / c rows of a rank, D documents. K key/value heads,
H head dimension. S rows of keys on a rank: all T, or with ``p2p`` those of some ranks, its own last.

Source of gathered keys: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.distributed.differentiable import gather_rows, pass_on
from megatron_packed.layers.context_parallel import P2P, ContextParallel
from megatron_packed.packed.params import PackedSeqParams


class RankOffsets(NamedTuple):
    """Beginnings and ends of documents in the rows of one rank."""

    queries: Tensor
    """``(D + 1,)`` int32 offsets in the rank's own rows."""
    keys: Mapping[int | None, Tensor]
    """Attention window -> ``(D + 1,)`` int32 offsets in the S rows of keys that the rank holds."""

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.queries, *self.keys.values())


@dataclass(frozen=True)
class EarlierKeys:
    """Keys and values of the tokens that a rank's queries see.

    Args:
        cp: context parallelism of this rank.
        window_size: number of tokens that a query sees, or None for all.
    """

    cp: ContextParallel
    window_size: int | None

    def reach(self, rows: int) -> int:
        """Return the number of rows before its own that a rank holds with ``p2p``.

        Args:
            rows: number of rows of a rank, R.
        """
        others = (self.cp.size - 1) * rows
        return others if self.window_size is None else min(others, self.window_size - 1)

    def hold(self, k_RKH: Tensor, v_RKH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values ``(S, K, H)`` that this rank holds. All ranks must call it."""
        kv_R2KH = torch.stack((k_RKH, v_RKH), dim=1)
        if self.cp.comm_type == P2P:
            rows = k_RKH.shape[0]
            held = [kv_R2KH]
            for missing in range(self.reach(rows), 0, -rows):
                held.insert(0, pass_on(held[0][-min(missing, rows) :], self.cp.group))
            kv_S2KH = torch.cat(held)
        else:
            kv_S2KH = gather_rows(kv_R2KH, self.cp.group)
        k_SKH, v_SKH = kv_S2KH.unbind(1)
        return k_SKH, v_SKH

    def offsets(self, packed: PackedSeqParams) -> Tensor:
        """Return the ``(D + 1,)`` offsets of each document's keys in the S rows.

        A document without queries on this rank has no keys. Rows that do not arrive are left out; no
        window reaches them.
        """
        rows = packed.total_tokens // self.cp.size
        begin = self.cp.rank * rows
        cu_seqlens = packed.cu_seqlens
        own = cu_seqlens.clamp(begin, begin + rows)
        first = torch.where(cu_seqlens <= begin, cu_seqlens, 0).max()
        keys = torch.where(own > begin, own, first)
        if self.cp.comm_type == P2P:
            keys = (keys - (begin - self.reach(rows))).clamp(min=0)
        return keys


def rank_offsets(
    windows: Sequence[int | None], cp: ContextParallel, packed: PackedSeqParams
) -> RankOffsets:
    """Return the offsets of a pack for attention with each of ``windows``, from its tensors."""
    rows = packed.total_tokens // cp.size
    begin = cp.rank * rows
    return RankOffsets(
        packed.cu_seqlens.clamp(begin, begin + rows) - begin,
        {window: EarlierKeys(cp, window).offsets(packed) for window in windows},
    )
