"""Causal attention inside each document of a pack: its backends, in order, and their choice.

Shapes: T rows of queries; S rows of keys and values, T unless they have offsets of their own. N query
heads, K key/value heads (N a multiple of K), H head dimension, D documents.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op, OpWork
from megatron_packed.ops.varlen_attention.tables import (
    TABLES,
    BlockTables,
    KernelTables,
    MaskTable,
    build_tables,
    document_numbers,
)

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
    earlier_keys: bool = False
    """True if keys have offsets of their own: documents have keys before their first query."""
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
    cu_seqlens_k: Tensor
    """``cu_seqlens``, unless documents have keys before their first query."""
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


def earlier_key_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    """Return the reason against keys before a document's first query."""
    if not inputs.earlier_keys:
        return []
    return ["documents have keys on earlier context-parallel ranks, which is not built for it"]


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
    earlier_keys: bool = False,
) -> VarlenAttentionInputs:
    """Return the inputs that determine the choice of a backend.

    Args:
        tokens: rows of keys.
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
        earlier_keys=earlier_keys,
        oversized_backward=elements if elements >= _INT32_LIMIT else 0,
        oversized_square=square if exact and square >= _DETERMINISTIC_SQUARE_LIMIT else 0,
    )


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for other devices, or if there is no GPU here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def varlen_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    seq_idx_1T: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    deterministic: bool = False,
    tables: KernelTables | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal softmax attention inside documents.

    A token sees itself and the earlier tokens of its own document.

    Args:
        q_TNH, k_SKH, v_SKH: bfloat16, float16 or float32; the last dimension is contiguous, the
            others may have any strides.
        cu_seqlens: int32 ``(D + 1,)`` on the tensors' device, first 0, last T. Documents of length
            0, which have no rows, are allowed at any position.
        max_seqlen: host integer, at least the longest document (S under capture).
        cu_seqlens_k: int32 ``(D + 1,)`` offsets of each document's keys in the S rows; None if they
            are the offsets of the queries. The last query of a document belongs to its last key, so
            a document has at least as many keys as queries. Rows outside all documents may hold
            anything, and get zeros as gradients.
        seq_idx_1T: int32 ``(1, T)`` document number of each token. Only the mask backends read it;
            None derives it from ``cu_seqlens``.
        softmax_scale: scale of the scores; None means 1 / sqrt(H).
        window_size: a token sees itself and the ``window_size - 1`` tokens before it. None, 0 and
            at least S mean no window.
        deterministic: equal inputs give equal bits in all gradients in each run.
        tables: result of ``prepare_tables`` for this micro-batch; if None, a mask backend builds
            its own tables.
        backend: ``auto`` or a name of ``OP.names()``.
    Returns:
        ``(T, N, H)`` in the dtype of q.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend, or with ``auto`` each backend, does not support the
            inputs; the message lists the reasons.
    """
    _check(q_TNH, k_SKH, v_SKH, cu_seqlens, cu_seqlens_k, max_seqlen)
    tokens, num_heads, head_dim = q_TNH.shape
    window = effective_window(window_size, k_SKH.shape[0])
    inputs = attention_inputs(
        tokens=k_SKH.shape[0],
        num_heads=num_heads,
        num_kv_heads=k_SKH.shape[1],
        head_dim=head_dim,
        dtype=q_TNH.dtype,
        device=q_TNH.device,
        num_sequences=cu_seqlens.shape[0] - 1,
        window_size=window,
        deterministic=deterministic,
        automatic=backend == "auto",
        earlier_keys=cu_seqlens_k is not None,
    )
    chosen = OP.chosen[backend, inputs]
    if backend == "auto":
        _warn_if_slow(inputs)
    kind = TABLES.get(chosen.name)
    if kind and not (isinstance(tables, kind) and tables.window_size == window):
        seq_idx_1T = document_numbers(cu_seqlens, tokens) if seq_idx_1T is None else seq_idx_1T
        tables = build_tables(chosen.name, seq_idx_1T, window)
    if cu_seqlens_k is not None:
        k_SKH, v_SKH = (_with_zeros_outside(x_SKH, cu_seqlens_k) for x_SKH in (k_SKH, v_SKH))
    call = AttentionCall(
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        # With 1, flash-attn 2 refuses grouped heads beside empty documents.
        max_seqlen=max(max_seqlen, 2),
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window_size=window,
        deterministic=deterministic,
        tables=tables,
    )
    out_TNH: Tensor = chosen.loaded.run(q_TNH, k_SKH, v_SKH, call)
    return out_TNH


class _ZerosOutside(torch.autograd.Function):
    """Autograd function: the identity, whose gradient is zero outside all documents.

    Kernels write the gradients of a document's rows only, and other rows of their results may hold
    anything.
    """

    @staticmethod
    def forward(ctx: Any, x_SKH: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        ctx.save_for_backward(cu_seqlens_k)
        return x_SKH.view_as(x_SKH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_SKH: Tensor) -> tuple[Tensor, None]:
        (cu_seqlens_k,) = ctx.saved_tensors
        row_S = torch.arange(dx_SKH.shape[0], device=dx_SKH.device)
        outside_S = (row_S < cu_seqlens_k[0]) | (row_S >= cu_seqlens_k[-1])
        return dx_SKH.masked_fill(outside_S[:, None, None], 0), None


def _with_zeros_outside(x_SKH: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    return cast(Tensor, _ZerosOutside.apply(x_SKH, cu_seqlens_k))  # type: ignore[no-untyped-call]


def prepare_tables(
    backend: str,
    seq_idx_1T: Tensor,
    cu_seqlens: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window_size: int | None = None,
    deterministic: bool = False,
) -> BlockTables | MaskTable | None:
    """Build the kernel tables that all attention layers of one micro-batch share.

    Return None if the backend reads no tables. For equal inputs this function chooses the same
    backend as ``varlen_attention``. Call it once per micro-batch and window size. Shapes are static
    and there is no host sync. For a captured graph, ``tables.copy_from(other)`` refills the tables
    in place.
    """
    window = effective_window(window_size, seq_idx_1T.shape[-1])
    inputs = attention_inputs(
        tokens=seq_idx_1T.shape[-1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=seq_idx_1T.device,
        num_sequences=cu_seqlens.shape[0] - 1,
        window_size=window,
        deterministic=deterministic,
        automatic=backend == "auto",
    )
    name = OP.select(inputs, backend).name
    return build_tables(name, seq_idx_1T, window) if name in TABLES else None


def effective_window(window_size: int | None, tokens: int) -> int | None:
    """Return the window that a pack of ``tokens`` slots needs; None if every token sees all others.

    The result depends on the size of the pack, and not on its documents. So a captured graph and an
    eager pass run the same kernel.
    """
    if window_size is not None and window_size < 0:
        raise ValueError(
            f"window_size ({window_size}) is negative; pass the number of visible tokens, or None for all."
        )
    return window_size if window_size and window_size < tokens else None


@lru_cache(maxsize=64)
def _warn_if_slow(inputs: VarlenAttentionInputs) -> None:
    """Log a warning once per kind of inputs if ``auto`` chooses the reference on a GPU.

    The reference is correct on any device, but slow on a GPU.
    """
    if inputs.device_type == "cuda" and OP.select(inputs).name == "reference":
        logging.getLogger(__name__).warning(
            "varlen_attention runs its slow reference on the GPU, because no kernel supports %s: %s",
            inputs,
            OP.explain(inputs),
        )


def _check(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen: int,
) -> None:
    shapes = f"q {tuple(q_TNH.shape)}, k {tuple(k_SKH.shape)}, v {tuple(v_SKH.shape)}"
    if q_TNH.dim() != 3 or k_SKH.dim() != 3 or k_SKH.shape != v_SKH.shape:
        raise ValueError(f"Expected q (T, N, H) and k, v of one shape (S, K, H); got {shapes}.")
    same_rows = q_TNH.shape[0] == k_SKH.shape[0] or cu_seqlens_k is not None
    if not same_rows or q_TNH.shape[2] != k_SKH.shape[2] or q_TNH.shape[1] % k_SKH.shape[1]:
        raise ValueError(
            "q and k need equal H, N a multiple of K, and equal rows unless cu_seqlens_k is given; "
            f"got {shapes}."
        )
    if not q_TNH.dtype == k_SKH.dtype == v_SKH.dtype:
        raise ValueError(
            f"q, k and v need one dtype; got {q_TNH.dtype}, {k_SKH.dtype}, {v_SKH.dtype}."
        )
    offsets_of = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    for name, offsets in offsets_of.items():
        if offsets is None or (
            offsets.dtype == torch.int32
            and offsets.shape == (cu_seqlens.numel(),)
            and offsets.device == q_TNH.device
        ):
            continue
        raise ValueError(
            f"{name} must be int32, one-dimensional and on {q_TNH.device}, and cu_seqlens_k as long as "
            f"cu_seqlens ({cu_seqlens.numel()}); got {offsets.dtype} {tuple(offsets.shape)} on {offsets.device}."
        )
    if max_seqlen < 1:
        raise ValueError(
            f"max_seqlen ({max_seqlen}) must be at least 1: the longest document, or S under capture."
        )
