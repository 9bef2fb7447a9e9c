"""Causal attention inside each document of a pack.

Shapes: T token slots of the pack, N query heads, K key/value heads (N a multiple of K), H head
dimension, D documents.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from megatron_packed.ops.varlen_attention.backends import (
    OP,
    AttentionCall,
    VarlenAttentionInputs,
    attention_inputs,
)
from megatron_packed.ops.varlen_attention.tables import (
    BlockTables,
    KernelTables,
    MaskTable,
    build_tables,
    document_numbers,
    fits,
)


def varlen_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
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
        q_TNH, k_TKH, v_TKH: bfloat16, float16 or float32; the last dimension is contiguous, the
            others may have any strides.
        cu_seqlens: int32 ``(D + 1,)`` on the tensors' device, first 0, last T. Documents of length
            0, which have no rows, are allowed at any position.
        max_seqlen: host integer, at least the longest document (T under capture).
        seq_idx_1T: int32 ``(1, T)`` document number of each token. Only the mask backends read it;
            None derives it from ``cu_seqlens``.
        softmax_scale: scale of the scores; None means 1 / sqrt(H).
        window_size: a token sees itself and the ``window_size - 1`` tokens before it. None, 0 and
            at least T mean no window.
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
    _check(q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen)
    tokens, num_heads, head_dim = q_TNH.shape
    window = effective_window(window_size, tokens)
    inputs = attention_inputs(
        tokens=tokens,
        num_heads=num_heads,
        num_kv_heads=k_TKH.shape[1],
        head_dim=head_dim,
        dtype=q_TNH.dtype,
        device=q_TNH.device,
        num_sequences=cu_seqlens.shape[0] - 1,
        window_size=window,
        deterministic=deterministic,
        automatic=backend == "auto",
    )
    chosen = OP.chosen[backend, inputs]
    if backend == "auto":
        _warn_if_slow(inputs)
    if not fits(chosen.name, tables, window):
        seq_idx_1T = document_numbers(cu_seqlens, tokens) if seq_idx_1T is None else seq_idx_1T
        tables = build_tables(chosen.name, seq_idx_1T, window)
    call = AttentionCall(
        cu_seqlens=cu_seqlens,
        # With 1, flash-attn 2 refuses grouped heads beside empty documents.
        max_seqlen=max(max_seqlen, 2),
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window_size=window,
        deterministic=deterministic,
        tables=tables,
    )
    out_TNH: Tensor = chosen.loaded.run(q_TNH, k_TKH, v_TKH, call)
    return out_TNH


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
    return build_tables(OP.select(inputs, backend).name, seq_idx_1T, window)


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
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> None:
    shapes = f"q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)}, v {tuple(v_TKH.shape)}"
    if q_TNH.dim() != 3 or k_TKH.dim() != 3 or k_TKH.shape != v_TKH.shape:
        raise ValueError(f"Expected q (T, N, H) and k, v of one shape (T, K, H); got {shapes}.")
    if (
        q_TNH.shape[0] != k_TKH.shape[0]
        or q_TNH.shape[2] != k_TKH.shape[2]
        or q_TNH.shape[1] % k_TKH.shape[1]
    ):
        raise ValueError(f"q and k need equal T and H, and N a multiple of K; got {shapes}.")
    if not q_TNH.dtype == k_TKH.dtype == v_TKH.dtype:
        raise ValueError(
            f"q, k and v need one dtype; got {q_TNH.dtype}, {k_TKH.dtype}, {v_TKH.dtype}."
        )
    if (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or cu_seqlens.device != q_TNH.device
    ):
        raise ValueError(
            f"cu_seqlens must be int32, one-dimensional and on {q_TNH.device}; "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device}."
        )
    if max_seqlen < 1:
        raise ValueError(
            f"max_seqlen ({max_seqlen}) must be at least 1: the longest document, or T under capture."
        )
