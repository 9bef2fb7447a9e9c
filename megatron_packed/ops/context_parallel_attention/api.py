"""Causal attention inside each document of a pack that is split over ranks in zigzag layout.

Shapes: T token slots of the pack, c ranks, R = T / c rows of this rank, N query heads, K key/value
heads, H head dimension, D documents. ``packed/cp_partition.py`` defines the zigzag layout: each
document is split into 2c chunks, and rank r has chunks r and 2c - 1 - r of each document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, NoBackendError, Op
from megatron_packed.ops.varlen_attention.api import effective_window

OP = Op(
    "context_parallel_attention",
    (
        GPUBackend(
            "transformer_engine",
            "megatron_packed.ops.context_parallel_attention.transformer_engine",
        ),
        Backend("reference", "megatron_packed.ops.context_parallel_attention.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.context_parallel_attention.on_meta"),
    on_device=lambda backend, inputs, device: (
        resolved_backend(backend, device.type),
        replace(inputs, device_type=device.type),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Ranks that share the pack, and two differentiable communication functions."""

    rank: int
    size: int
    comm_type: str
    """Exchange of keys and values: ``all_gather`` in one collective, ``p2p`` in a ring of steps."""
    gather_rows: Callable[[Tensor], Tensor]
    """Function that gathers ``(R, ...)`` of all ranks as ``(T, ...)``, in the order of ranks."""
    pass_on: Callable[[Tensor], Tensor]
    """Function that sends a tensor to the next rank and returns the tensor of the previous rank."""
    group: Any = None
    """Process group of the ranks, for libraries that communicate themselves."""
    global_ranks: Sequence[int] = ()
    """Global ranks of the members of ``group``."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelAttentionInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    comm_type: str
    deterministic: bool
    window_size: int | None = None


def context_parallel_attention(
    q_RNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    seq_idx_1T: Tensor,
    slots_T: Tensor,
    peers: Peers,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute causal softmax attention for the rows of this rank.

    A token sees the earlier tokens of its own document, and itself. All ranks of ``peers`` must
    call this function together.

    Args:
        q_RNH, k_RKH, v_RKH: rows of this rank, with the same dtype.
        cu_seqlens: ``(D + 1,)`` int32 of the complete pack; each length is a multiple of 2c.
        max_seqlen: host integer, at least the longest document of the pack.
        seq_idx_1T: ``(1, T)`` int32 of the complete pack.
        slots_T: ``(T,)`` int64, the slots of rank 0's rows, then those of rank 1's rows, ...
        softmax_scale, window_size, deterministic: as in ``varlen_attention``.
        backend: a name of ``OP.names()``, or ``auto`` (see `resolved_backend`).
    Returns:
        ``(R, N, H)`` in the dtype of q.
    Raises:
        NoBackendError: the requested backend, or with ``auto`` each backend, does not support the
            inputs.
    """
    backend = resolved_backend(backend, q_RNH.device.type)
    window_size = effective_window(window_size, slots_T.shape[0])
    inputs = ContextParallelAttentionInputs(
        num_heads=q_RNH.shape[1],
        num_kv_heads=k_RKH.shape[1],
        head_dim=q_RNH.shape[2],
        dtype=q_RNH.dtype,
        device_type=q_RNH.device.type,
        comm_type=peers.comm_type,
        deterministic=deterministic,
        window_size=window_size,
    )
    out_RNH: Tensor = _chosen(backend, inputs).loaded.run(
        q_RNH,
        k_RKH,
        v_RKH,
        cu_seqlens,
        max_seqlen,
        seq_idx_1T=seq_idx_1T,
        slots_T=slots_T,
        peers=peers,
        softmax_scale=q_RNH.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        window_size=window_size,
        deterministic=deterministic,
    )
    return out_RNH


def _chosen(backend: str, inputs: ContextParallelAttentionInputs) -> Backend:
    """Choose the backend for ``inputs``.

    Raises:
        NoBackendError: no backend supports the inputs; the message names ``a2a`` as the cure.
    """
    try:
        return OP.chosen[backend, inputs]
    except NoBackendError as error:
        raise NoBackendError(
            f"{error}. Use {flags.CP_COMM_TYPE} a2a, which works with every attention backend."
        ) from None


def resolved_backend(backend: str, device_type: str) -> str:
    """Resolve ``auto`` for a device type.

    On a GPU ``auto`` means TransformerEngine. The reference would be slow there, so it must be
    requested by name. On a CPU ``auto`` is the reference.
    """
    return "transformer_engine" if backend == "auto" and device_type == "cuda" else backend
