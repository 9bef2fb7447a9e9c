"""Attention by torch.nn.attention.varlen, the FlashAttention-2 kernels that torch contains.

The backend needs no additional package on CUDA. Its backward pass is deterministic only with a global
setting of torch, so the backend does not support ``deterministic``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from megatron_packed.ops.varlen_attention.api import (
    WIDEST_HEAD,
    AttentionCall,
    VarlenAttentionInputs,
    capability_reasons,
    dtype_reasons,
    earlier_key_reasons,
    head_dim_reasons,
    offset_reasons,
)


@lru_cache(maxsize=1)
def _varlen_attn() -> tuple[Callable[..., Any], bool]:
    """Return torch's function, and True if it supports fewer key heads than query heads.

    torch 2.13 supports this; with torch 2.11 the key heads are repeated. The import is inside the
    function because it compiles for seconds, and a CPU run does not need it.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = capability_reasons(inputs, 8) + dtype_reasons(inputs.dtype)
    reasons += head_dim_reasons(inputs.head_dim, WIDEST_HEAD["torch_varlen"])
    if inputs.deterministic:
        reasons.append("the backward pass has no deterministic option")
    return reasons + offset_reasons(inputs) + earlier_key_reasons(inputs)


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, call: AttentionCall) -> Tensor:
    group = q_TNH.shape[1] // k_TKH.shape[1]
    varlen_attn, takes_groups = _varlen_attn()
    options: dict[str, Any] = {"enable_gqa": True} if takes_groups and group > 1 else {}
    if group > 1 and not takes_groups:
        k_TKH, v_TKH = (x.repeat_interleave(group, dim=1) for x in (k_TKH, v_TKH))
    window = (-1, 0) if call.window_size is None else (call.window_size - 1, 0)
    out_TNH = varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        scale=call.softmax_scale,
        window_size=window,
        **options,
    )
    assert isinstance(out_TNH, Tensor)  # A pair is returned only if the log-sum-exp is requested.
    return out_TNH
