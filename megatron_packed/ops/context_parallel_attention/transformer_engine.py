"""TransformerEngine's context-parallel attention, which communicates itself on a separate stream.

TransformerEngine uses the same zigzag layout as this package. The op passes the offsets of the
complete pack both as ``cu_seqlens`` and as the padded offsets, because a document's padding belongs
to the document. The padding follows the document's last token, so no real token sees it. Since both
arguments are the same tensor, TransformerEngine does not compare their values. TransformerEngine
divides ``max_seqlen`` by 2c, so it is rounded up to a multiple of 2c.

If TransformerEngine has no kernel for the inputs, its module raises an error. It has no slow
fallback under context parallelism.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.context_parallel_attention.api import ContextParallelAttentionInputs, Peers
from megatron_packed.ops.varlen_attention.api import (
    WIDEST_HEAD,
    dtype_reasons,
    head_dim_reasons,
)
from megatron_packed.ops.varlen_attention.transformer_engine import NO_PADDING, attention_module


def not_supported_reasons(inputs: ContextParallelAttentionInputs) -> list[str]:
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(f"TransformerEngine runs on CUDA devices, not on {inputs.device_type}")
    reasons += dtype_reasons(inputs.dtype)
    reasons += head_dim_reasons(inputs.head_dim, WIDEST_HEAD["transformer_engine"])
    if inputs.window_size is not None:
        reasons.append(
            f"attention windows are not measured with {inputs.comm_type} of TransformerEngine"
        )
    return reasons


def run(
    q_RNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    seq_idx_1T: Tensor,
    slots_T: Tensor,
    peers: Peers,
    softmax_scale: float,
    window_size: int | None,
    deterministic: bool,
) -> Tensor:
    """Run TransformerEngine's attention; ``seq_idx_1T`` and ``slots_T`` are not used."""
    module = _module(
        q_RNH.shape[1],
        k_RKH.shape[1],
        q_RNH.shape[2],
        softmax_scale,
        deterministic,
        peers.comm_type,
        peers.group,
        tuple(peers.global_ranks),
        q_RNH.device,
    )
    longest = -(-max_seqlen // (2 * peers.size)) * 2 * peers.size
    out: Tensor = module(
        q_RNH.contiguous(),
        k_RKH.contiguous(),
        v_RKH.contiguous(),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **NO_PADDING,
    )
    return out.view(q_RNH.shape)


@lru_cache(maxsize=32)
def _module(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    softmax_scale: float,
    deterministic: bool,
    comm_type: str,
    group: Any,
    global_ranks: tuple[int, ...],
    device: torch.device,
) -> torch.nn.Module:
    """Return TransformerEngine's attention module for these options.

    The module has no parameters. All attention layers share the module and its stream.
    """
    return attention_module(
        num_heads,
        num_kv_heads,
        head_dim,
        softmax_scale,
        deterministic,
        cp_group=group,
        cp_global_ranks=list(global_ranks),
        cp_stream=torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        cp_comm_type=comm_type,
    )
