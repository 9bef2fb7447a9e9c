"""Attention on the meta device: shapes, what the kernels save, and sums of flash-attn's backward."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.on_meta import Memory, Workspace, of_shape, workspace
from megatron_packed.ops.varlen_attention.api import AttentionCall

_BLOCK = 128
"""Multiple of rows to which backward pads the sums of each document."""


def run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, call: AttentionCall) -> Tensor:
    """Return a tensor of the output's shape; output and log-sum-exp are saved too."""
    tokens, heads, _ = q_TNH.shape
    memory = Memory(
        saved=[workspace(heads, tokens)],
        backward=gradient_sums(q_TNH, k_SKH, tokens, call.cu_seqlens),
        keeps_result=True,
    )
    return of_shape((tokens, heads, v_SKH.shape[2]), q_TNH, k_SKH, v_SKH, memory=memory)


def gradient_sums(q_TNH: Tensor, k_SKH: Tensor, tokens: int, cu_seqlens: Tensor) -> list[Workspace]:
    """Return the fp32 sums of dq and two statistics, and of dk and dv of grouped heads."""
    (_, heads, width), (keys, groups, _) = q_TNH.shape, k_SKH.shape
    padding, wide = cu_seqlens.shape[0] * _BLOCK, -(-width // 32) * 32
    sums = [workspace(tokens + padding, heads, wide + 2)]
    return sums + [workspace(keys + padding, groups, wide)] * 2 if heads > groups else sums
