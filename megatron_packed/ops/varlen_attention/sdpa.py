"""Attention by torch's scaled_dot_product_attention with a boolean (T, T) mask.

This backend is a last resort if no varlen kernel supports the inputs. Its time and memory grow with
T^2, independent of the documents, so it is used only if it is requested by name. On a GPU the module
forces the memory-efficient kernel. Otherwise torch may choose its math backend, which allocates
T x T scores for each head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_packed.ops.varlen_attention.api import (
    AttentionCall,
    VarlenAttentionInputs,
    earlier_key_reasons,
)
from megatron_packed.ops.varlen_attention.tables import MaskTable

_LONGEST = 16384
"""Largest number of tokens.

The mask then takes 256 MiB, and the kernel's bias another 512 MiB.
"""


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = earlier_key_reasons(inputs)
    if inputs.tokens > _LONGEST:
        reasons.append(
            f"T ({inputs.tokens}) exceeds {_LONGEST}, above which a (T, T) mask needs too much memory"
        )
    if inputs.device_type == "cuda":
        if inputs.tokens % 8 or inputs.head_dim % 8:
            reasons.append(
                f"the kernel needs T ({inputs.tokens}) and the head dimension ({inputs.head_dim}) to be multiples of 8"
            )
        if inputs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            reasons.append(f"the kernel does not support {inputs.dtype}")
        if inputs.deterministic:
            reasons.append("the memory-efficient backward kernel adds dQ in a changing order")
    return reasons


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, call: AttentionCall) -> Tensor:
    assert isinstance(call.tables, MaskTable)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    # Repeat grouped key and value heads: the memory-efficient kernel needs as many of them as query
    # heads.
    k_TNH, v_TNH = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k_TKH, v_TKH))
    pinned: AbstractContextManager[None] = nullcontext()
    if q_TNH.is_cuda:
        pinned = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with pinned:
        q_1NTH, k_1NTH, v_1NTH = (x.transpose(0, 1)[None] for x in (q_TNH, k_TNH, v_TNH))
        out_1NTH = F.scaled_dot_product_attention(
            q_1NTH, k_1NTH, v_1NTH, attn_mask=call.tables.mask_TT, scale=call.softmax_scale
        )
    return out_1NTH[0].transpose(0, 1)
