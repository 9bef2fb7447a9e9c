"""Attention by torch.nn.attention.varlen, the FlashAttention-2 kernels that torch contains.

The backend needs no additional package on CUDA. Its backward pass is deterministic only with a global
setting of torch, so the backend does not support ``deterministic``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.varlen_attention.backends import (
    WIDEST_HEAD,
    VarlenAttentionInputs,
    head_dim_reasons,
)
from megatron_packed.ops.varlen_attention.tables import KernelTables


@lru_cache(maxsize=1)
def _varlen_attn() -> tuple[Callable[..., Any], bool]:
    """Return torch's function, and True if it supports fewer key heads than query heads.

    torch 2.13 supports this; with torch 2.11 the key heads are repeated. The import is inside the
    function because it compiles for seconds, and a CPU run does not need it.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = []
    if inputs.capability is None or inputs.capability[0] < 8:
        reasons.append(
            f"the kernel needs CUDA capability 8 or later, found {inputs.capability or inputs.device_type}"
        )
    if inputs.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"the kernel supports bfloat16 and float16, not {inputs.dtype}")
    reasons += head_dim_reasons(inputs.head_dim, WIDEST_HEAD["torch_varlen"])
    if inputs.deterministic:
        reasons.append("the backward pass has no deterministic option")
    if inputs.oversized_backward:
        reasons.append(
            f"the padded gradient buffer would have {inputs.oversized_backward} elements, too many for 32-bit offsets; "
            "use fewer tokens or documents per pack"
        )
    return reasons


def run(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    seq_idx_1T: Tensor | None,
    softmax_scale: float,
    window_size: int | None,
    deterministic: bool,
    tables: KernelTables | None,
) -> Tensor:
    group = q_TNH.shape[1] // k_TKH.shape[1]
    varlen_attn, takes_groups = _varlen_attn()
    options: dict[str, Any] = {"enable_gqa": True} if takes_groups and group > 1 else {}
    if group > 1 and not takes_groups:
        k_TKH, v_TKH = (x.repeat_interleave(group, dim=1) for x in (k_TKH, v_TKH))
    window = (-1, 0) if window_size is None else (window_size - 1, 0)
    out_TNH = varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=softmax_scale,
        window_size=window,
        **options,
    )
    assert isinstance(out_TNH, Tensor)  # A pair is returned only if the log-sum-exp is requested.
    return out_TNH
