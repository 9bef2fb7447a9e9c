"""Context-parallel attention on the meta device: shapes, saved tensors, keys and values on their way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_packed.memory_purpose import Purpose
from megatron_packed.ops.context_parallel_attention.api import Peers
from megatron_packed.ops.on_meta import Memory, of_shape, workspace
from megatron_packed.ops.varlen_attention.on_meta import gradient_sums


def run(
    q_RNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    cu_seqlens: Tensor,
    *lengths: int,
    peers: Peers,
    **options: Any,
) -> Tensor:
    """Return a tensor of the shape of q; see `api.context_parallel_attention`."""
    rows, heads, _ = q_RNH.shape
    q_RNH, k_RKH, v_RKH = (x.contiguous() for x in (q_RNH, k_RKH, v_RKH))
    # ``all_gather`` receives keys and values of all ranks; ``p2p`` holds those of two ranks.
    ranks = peers.size if peers.comm_type == "all_gather" else 2
    travelling = workspace(
        2 * ranks, *k_RKH.shape, dtype=k_RKH.dtype, purpose=Purpose.COMMUNICATION
    )
    memory = Memory(
        saved=[workspace(heads, rows)],
        forward=[travelling],
        backward=[travelling, *gradient_sums(q_RNH, k_RKH, rows, cu_seqlens)],
        keeps_result=True,
    )
    return of_shape(q_RNH.shape, q_RNH, k_RKH, v_RKH, memory=memory)
