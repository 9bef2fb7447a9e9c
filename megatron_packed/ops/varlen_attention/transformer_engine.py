"""TransformerEngine's packed attention, which runs cuDNN's kernels.

TransformerEngine's module chooses a kernel itself, and may choose an unfused kernel that allocates
T x T scores. ``run`` checks the choice and raises an error in this case. ``run`` passes
``pad_between_seqs=False`` explicitly; without it older versions compare offsets on the host.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention import dot_product_attention as te_attention

from megatron_packed.ops.varlen_attention.api import (
    WIDEST_HEAD,
    AttentionCall,
    VarlenAttentionInputs,
    capability_reasons,
    dtype_reasons,
    earlier_key_reasons,
    head_dim_reasons,
)

_OPTIONS = inspect.signature(DotProductAttention.forward).parameters
NO_PADDING: dict[str, Any] = {"pad_between_seqs": False} if "pad_between_seqs" in _OPTIONS else {}
"""Option of versions that otherwise compare offsets on the host."""

_ALLOW_ATOMICS = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    reasons = capability_reasons(inputs, 9) + dtype_reasons(inputs.dtype)
    reasons += earlier_key_reasons(inputs)
    reasons += head_dim_reasons(inputs.head_dim, WIDEST_HEAD["transformer_engine"])
    if inputs.oversized_square:
        reasons.append(
            f"cuDNN's deterministic backward pass would need a workspace for {inputs.oversized_square} scores "
            "(documents x heads x tokens^2); TransformerEngine allows less than 2^30"
        )
    return reasons


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, call: AttentionCall) -> Tensor:
    """Run TransformerEngine's attention.

    Raises:
        RuntimeError: TransformerEngine chose a kernel with unfused T x T scores.
    """
    num_heads, head_dim = q_TNH.shape[1:]
    module = _module(
        num_heads,
        k_TKH.shape[1],
        head_dim,
        call.softmax_scale,
        call.window_size,
        call.deterministic,
    )
    out: Tensor = module(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens_q=call.cu_seqlens,
        cu_seqlens_kv=call.cu_seqlens,
        max_seqlen_q=call.max_seqlen,
        max_seqlen_kv=call.max_seqlen,
        **NO_PADDING,
    )
    chosen = getattr(te_attention, "_attention_backends", {})
    if chosen.get("use_unfused_attention") and not (
        chosen["use_fused_attention"] or chosen["use_flash_attention"]
    ):
        raise RuntimeError(
            f"TransformerEngine has no fused kernel for q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)} {q_TNH.dtype} "
            f"with {call.cu_seqlens.shape[0] - 1} documents; choose another attention backend "
            "(NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints the reasons)."
        )
    return out.view(q_TNH.shape)


@lru_cache(maxsize=32)
def _module(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    softmax_scale: float,
    window_size: int | None,
    deterministic: bool,
) -> torch.nn.Module:
    """Return TransformerEngine's attention module for these options; it has no parameters."""
    window = None if window_size is None else (window_size - 1, 0)
    return attention_module(
        num_heads, num_kv_heads, head_dim, softmax_scale, deterministic, window_size=window
    )


def attention_module(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    softmax_scale: float,
    deterministic: bool,
    **options: Any,
) -> torch.nn.Module:
    """Return TransformerEngine's module for causal attention inside documents.

    Args:
        options: further arguments of the module.
    """
    with _deterministic_choice(deterministic):
        module: torch.nn.Module = DotProductAttention(
            num_heads,
            head_dim,
            num_gqa_groups=num_kv_heads,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            softmax_scale=softmax_scale,
            **options,
        )
    return module


@contextmanager
def _deterministic_choice(deterministic: bool) -> Iterator[None]:
    """Set TransformerEngine's environment variable for deterministic kernels inside a ``with`` block.

    TransformerEngine reads the variable when a module is created.
    """
    previous_value = os.environ.get(_ALLOW_ATOMICS)
    if deterministic:
        os.environ[_ALLOW_ATOMICS] = "0"
    try:
        yield
    finally:
        if deterministic and previous_value is None:
            del os.environ[_ALLOW_ATOMICS]
        elif deterministic and previous_value is not None:
            os.environ[_ALLOW_ATOMICS] = previous_value
