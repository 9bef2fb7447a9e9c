"""Backends of causal attention inside documents, in order, and the inputs that determine the choice.

Shapes: T token slots of the pack, H head dimension.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op
from megatron_packed.ops.varlen_attention.tables import KernelTables
from megatron_packed.ops.work import OpWork

_INT32_LIMIT = 2**31
_DETERMINISTIC_SQUARE_LIMIT = 2**30

# Order of speed on an H200, fastest first (README, 'Order'). 'auto' chooses the first backend that
# supports the inputs.
OP = Op(
    "varlen_attention",
    (
        GPUBackend("flash_attn_4", "megatron_packed.ops.varlen_attention.flash_attn_4"),
        GPUBackend("transformer_engine", "megatron_packed.ops.varlen_attention.transformer_engine"),
        GPUBackend("flex", "megatron_packed.ops.varlen_attention.flex"),
        GPUBackend("flash_attn_2", "megatron_packed.ops.varlen_attention.flash_attn_2"),
        GPUBackend("torch_varlen", "megatron_packed.ops.varlen_attention.torch_varlen"),
        Backend("reference", "megatron_packed.ops.varlen_attention.reference"),
        Backend("sdpa", "megatron_packed.ops.varlen_attention.sdpa", automatic=False),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.varlen_attention.on_meta"),
    on_device=lambda backend, inputs, device: (
        backend,
        replace(inputs, device_type=device.type, capability=_capability(device)),
    ),
    # The score of a pair, and its term of the weighted sum.
    work=lambda inputs: OpWork(
        per_visible_pair=4 * inputs.num_heads * inputs.head_dim, window=inputs.window_size
    ),
)


WIDEST_HEAD = {
    "flash_attn_4": 256,
    "transformer_engine": 128,
    "flex": 256,
    "flash_attn_2": 256,
    "torch_varlen": 256,
}
"""Largest head dimension of each backend. cuDNN errs 84 times as much as plain bf16 with 256."""
WIDEST_HEAD_OF_FLASH_ATTN_4_AFTER_HOPPER = 128


@dataclass(frozen=True, kw_only=True)
class VarlenAttentionInputs:
    """Shapes, dtypes and options that determine the choice of a backend.

    The values are equal for all micro-batches of a run, so that the choice is made once.
    """

    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None
    """CUDA compute capability; None on a CPU."""
    window_size: int | None
    deterministic: bool
    automatic: bool = True
    """True if the user did not request a backend by name."""
    oversized_backward: int = 0
    """Elements of flash-attn's padded varlen gradient buffer if they exceed 32-bit offsets, else 0."""
    oversized_square: int = 0
    """Documents x heads x tokens^2 if cuDNN must be deterministic and the product is 2^30 or more.

    Otherwise 0. cuDNN's deterministic workspace has the tokens of the pack in place of the longest
    document: 64 GiB for 16 documents of 512 tokens. `auto` counts as many documents as tokens. A
    pack that falls back to eager execution has a smaller capacity than its graph, but must use the
    same kernel to have the same bits.
    """


class AttentionCall(NamedTuple):
    """Arguments of a call besides q, k and v; see `api.varlen_attention`."""

    cu_seqlens: Tensor
    max_seqlen: int
    softmax_scale: float
    window_size: int | None
    """Number of visible tokens, at least 1 and less than T; None for all."""
    deterministic: bool
    tables: KernelTables | None
    """Tables of the backend for this window; of any kind for a backend without tables."""


def capability_reasons(inputs: VarlenAttentionInputs, oldest: int) -> list[str]:
    """Return the reason against a device with a CUDA capability before ``oldest``."""
    if inputs.capability is not None and inputs.capability[0] >= oldest:
        return []
    return [
        f"the kernel needs CUDA capability {oldest} or later, found {inputs.capability or inputs.device_type}"
    ]


def dtype_reasons(dtype: torch.dtype) -> list[str]:
    """Return the reason against a dtype of other than 16 bits."""
    if dtype in (torch.bfloat16, torch.float16):
        return []
    return [f"the kernel supports bfloat16 and float16, not {dtype}"]


def offset_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    """Return the reason against packs whose gradient buffer exceeds 32-bit offsets."""
    if not inputs.oversized_backward:
        return []
    return [
        f"the padded gradient buffer would have {inputs.oversized_backward} elements, too many for 32-bit offsets; "
        "use fewer tokens or documents per pack"
    ]


def head_dim_reasons(head_dim: int, widest: int, multiple: int = 8) -> list[str]:
    """Return the reason against a head dimension that is no ``multiple`` or exceeds ``widest``."""
    if head_dim % multiple == 0 and 0 < head_dim <= widest:
        return []
    return [f"the head dimension ({head_dim}) must be a multiple of {multiple} up to {widest}"]


def padded_gradient_elements(tokens: int, num_sequences: int, num_heads: int, head_dim: int) -> int:
    """Return the elements of the padded gradient buffer of flash-attn's varlen backward pass.

    The kernel addresses this buffer with 32-bit offsets. Each document is padded by up to 128 rows,
    and the head dimension to a multiple of 32. With 16 heads of 128 the limit is about 8,100
    documents. Source: unsloth #8957.
    """
    return (tokens + 128 * num_sequences) * num_heads * (-(-head_dim // 32) * 32)


def attention_inputs(
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_sequences: int,
    window_size: int | None,
    deterministic: bool,
    automatic: bool,
) -> VarlenAttentionInputs:
    """Return the inputs that determine the choice of a backend.

    Args:
        num_sequences: number of documents, plus 1 for the tail.
        window_size: number of visible tokens, at least 1, or None for all.
        automatic: True if the user did not request a backend by name.
    """
    elements = padded_gradient_elements(tokens, num_sequences, num_heads, head_dim)
    square = (tokens + 1 if automatic else num_sequences) * num_heads * tokens**2
    # TransformerEngine reads the same environment variable.
    exact = deterministic or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    return VarlenAttentionInputs(
        tokens=tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device_type=device.type,
        capability=_capability(device),
        window_size=window_size,
        deterministic=deterministic,
        automatic=automatic,
        oversized_backward=elements if elements >= _INT32_LIMIT else 0,
        oversized_square=square if exact and square >= _DETERMINISTIC_SQUARE_LIMIT else 0,
    )


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for other devices, or if there is no GPU here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)
