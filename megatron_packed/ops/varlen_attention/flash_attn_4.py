"""Attention by flash-attn 4 (``flash_attn.cute``), the fastest varlen kernel on Hopper and Blackwell.

flash-attn 4 is in the same namespace package ``flash_attn`` as flash-attn 2, but does not need it.
Its kernels are compiled on first use for each dtype, head dimension and option. The forward pass is
deterministic. Without ``deterministic``, the backward pass sums dQ (and, with grouped heads, dK and
dV) in a changing order.
"""

from __future__ import annotations

from flash_attn.cute.interface import flash_attn_varlen_func
from torch import Tensor

from megatron_packed.ops.varlen_attention.api import (
    WIDEST_HEAD,
    WIDEST_HEAD_OF_FLASH_ATTN_4_AFTER_HOPPER,
    AttentionCall,
    VarlenAttentionInputs,
    dtype_reasons,
    head_dim_reasons,
)

HEAD_MULTIPLE = 32
"""For other head dimensions the gradients can be wrong.

On Hopper the backward kernel pads the head dimension to a multiple of 16, but other kernels read and
clear its dQ with a multiple of 32. Source: flash-attention #2896; for later GPUs #2698.
"""


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = []
    if inputs.capability is None or not 9 <= inputs.capability[0] <= 12:
        reasons.append(
            f"the backward pass needs CUDA capability 9 to 12, found {inputs.capability or inputs.device_type}"
        )
    elif inputs.capability[0] == 12 and inputs.deterministic:
        reasons.append("the backward pass has no deterministic version on CUDA capability 12")
    reasons += dtype_reasons(inputs.dtype)
    hopper = inputs.capability is not None and inputs.capability[0] == 9
    widest = WIDEST_HEAD["flash_attn_4"] if hopper else WIDEST_HEAD_OF_FLASH_ATTN_4_AFTER_HOPPER
    reasons += head_dim_reasons(inputs.head_dim, widest, HEAD_MULTIPLE)
    if inputs.oversized_backward:
        reasons.append(
            f"the padded gradient buffer would have {inputs.oversized_backward} elements, too many for 32-bit offsets; "
            "use fewer tokens per pack"
        )
    return reasons


def run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, call: AttentionCall) -> Tensor:
    out_TNH: Tensor = flash_attn_varlen_func(
        q_TNH,
        k_SKH,
        v_SKH,
        cu_seqlens_q=call.cu_seqlens,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=min(call.max_seqlen, q_TNH.shape[0]),
        max_seqlen_k=call.max_seqlen,
        softmax_scale=call.softmax_scale,
        causal=True,
        window_size=(None, None) if call.window_size is None else (call.window_size - 1, 0),
        deterministic=call.deterministic,
    )[0]
    return out_TNH
