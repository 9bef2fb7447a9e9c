"""Attention by flash-attn 2, which supports GPUs from Ampere on.

flash-attn 2 is slower than version 4 on Hopper, and padded ``cu_seqlens`` cost it more than other
backends. If only flash-attn 4 is installed, ``flash_attn`` is an empty namespace package, and the
import of ``flash_attn.flash_attn_interface`` fails. The dispatch reports this failure as the reason.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from torch import Tensor

from megatron_packed.ops.varlen_attention.api import (
    WIDEST_HEAD,
    AttentionCall,
    VarlenAttentionInputs,
    capability_reasons,
    dtype_reasons,
    offset_reasons,
)


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = capability_reasons(inputs, 8) + dtype_reasons(inputs.dtype)
    if inputs.head_dim > WIDEST_HEAD["flash_attn_2"]:
        reasons.append(
            f"the head dimension ({inputs.head_dim}) exceeds {WIDEST_HEAD['flash_attn_2']}"
        )
    reasons += offset_reasons(inputs)
    if not reasons:
        reasons += _missing_from_the_build(inputs.dtype, inputs.head_dim)
    return reasons


@lru_cache(maxsize=64)
def _missing_from_the_build(dtype: torch.dtype, head_dim: int) -> list[str]:
    """Run the kernel on one token, and return the reason if it fails.

    A build of flash-attn may lack dtypes and head dimensions, and only a call detects this. The test
    runs once per dtype and head dimension. It does not run during a capture, because a failed launch
    would invalidate the graph; the backend is chosen in the warm-up before the capture.
    """
    if torch.cuda.is_current_stream_capturing():
        return []
    with torch.no_grad():
        token = torch.zeros(1, 1, head_dim, dtype=dtype, device="cuda")
        offsets = torch.tensor([0, 1], dtype=torch.int32).to("cuda", non_blocking=True)
        try:
            flash_attn_varlen_func(token, token, token, offsets, offsets, 1, 1, causal=True)
        except RuntimeError as error:
            return [
                f"the installed build has no kernel for {dtype} with head dimension {head_dim}: {error}"
            ]
    return []


def run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, call: AttentionCall) -> Tensor:
    out_TNH: Tensor = flash_attn_varlen_func(
        q_TNH,
        k_SKH,
        v_SKH,
        call.cu_seqlens,
        call.cu_seqlens_k,
        max(min(call.max_seqlen, q_TNH.shape[0]), 2),  # with 1, it refuses empty documents
        call.max_seqlen,
        softmax_scale=call.softmax_scale,
        causal=True,
        window_size=(-1, -1) if call.window_size is None else (call.window_size - 1, 0),
        deterministic=call.deterministic,
    )
    return out_TNH
