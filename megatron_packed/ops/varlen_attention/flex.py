"""Attention by torch's FlexAttention over static block tables, the fastest for very short documents.

FlexAttention does not need padded ``cu_seqlens``. The compiled function takes plain tensors and
builds the block mask inside. So another packing changes only the contents of the tensors and never
causes a recompilation. A captured graph uses the tables that ``tables.copy_from`` has written. There
are no atomics, so the results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_packed import torch_private
from megatron_packed.ops.varlen_attention.api import (
    OP,
    WIDEST_HEAD,
    AttentionCall,
    VarlenAttentionInputs,
    capability_reasons,
    earlier_key_reasons,
)
from megatron_packed.ops.varlen_attention.tables import BLOCK, BlockTables

COMPILED_SIZES = 256
"""Most sizes that a process compiles; it is also torch's limit for one function in all its forms.

Each number of tokens and heads is compiled alone. Layers with other sizes, evaluation and generation
add theirs, and torch's own limit of 8 would end the run with an error.
"""


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = capability_reasons(inputs, 8) + earlier_key_reasons(inputs)
    if inputs.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"the kernel is tested for bfloat16 and float16, not {inputs.dtype}")
    if inputs.tokens % BLOCK:
        reasons.append(
            f"T ({inputs.tokens}) is not a multiple of {BLOCK}, the block size of the kernel's tables"
        )
    widest = WIDEST_HEAD["flex"]
    if inputs.head_dim & (inputs.head_dim - 1) or not 16 <= inputs.head_dim <= widest:
        reasons.append(
            f"the head dimension ({inputs.head_dim}) must be a power of 2 from 16 to {widest}"
        )
    group = inputs.num_heads // inputs.num_kv_heads
    if group & (group - 1):
        reasons.append(f"{group} query heads per key head is not a power of 2")
    if inputs.automatic and inputs.head_dim > 128 and not reasons:
        reasons += [
            f"{backend.name} is faster for heads above 128"
            for backend in OP.backends
            if backend.name in ("flash_attn_2", "torch_varlen") and not backend.reasons(inputs)
        ]
    return reasons


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, call: AttentionCall) -> Tensor:
    assert isinstance(call.tables, BlockTables)
    grouped = q_TNH.shape[1] != k_TKH.shape[1]
    attend = compiled_attention(call.window_size, call.softmax_scale, grouped)
    # (T, N, H) -> (1, N, T, H)
    q_1NTH, k_1KTH, v_1KTH = (x.transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKH))
    out_1NTH: Tensor = attend(q_1NTH, k_1KTH, v_1KTH, *call.tables.tensors())
    return out_1NTH[0].transpose(0, 1)


@lru_cache(maxsize=32)
def compiled_attention(
    window_size: int | None, softmax_scale: float, grouped: bool, backend: str = "inductor"
) -> Callable[..., Tensor]:
    """Compile ``attend(q, k, v, *tables.tensors())`` for these constants.

    q, k and v are (1, heads, T, H). The compiled function is cached.
    """

    def attend(q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor, *tensors: Tensor) -> Tensor:
        tables = BlockTables.from_tensors(tensors, window_size)
        tokens = q_1NTH.shape[2]
        block_mask = BlockMask(
            seq_lengths=(tokens, tokens),
            kv_num_blocks=tables.kv_num,
            kv_indices=tables.kv_index,
            full_kv_num_blocks=tables.full_kv_num,
            full_kv_indices=tables.full_kv_index,
            q_num_blocks=tables.q_num,
            q_indices=tables.q_index,
            full_q_num_blocks=tables.full_q_num,
            full_q_indices=tables.full_q_index,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=tables.mask_mod(),
        )
        out: Any = flex_attention(
            q_1NTH, k_1KTH, v_1KTH, block_mask=block_mask, scale=softmax_scale, enable_gqa=grouped
        )
        result: Tensor = out
        return result

    torch_private.allow_recompilations(COMPILED_SIZES)
    compiled: Callable[..., Tensor] = torch.compile(
        attend, backend=backend, dynamic=False, fullgraph=True
    )
    return compiled
