"""Causal attention inside each document of a pack whose rows are spread over ranks in a zigzag.

Shapes: T token slots of the pack, c ranks, R = T / c rows of this rank, N query heads, K key/value
heads, H head dimension, D documents. The zigzag is that of ``packed/cp_partition.py``: every
document in 2c chunks, rank r has chunks r and 2c - 1 - r of each, document by document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.ops.backend_dispatch import Backend, NoBackendError, Op

_HERE = "megatron_packed.ops.context_parallel_attention"

OP = Op(
    "context_parallel_attention",
    (
        Backend("transformer_engine", f"{_HERE}.transformer_engine"),
        Backend("reference", f"{_HERE}.reference"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Ranks that share the pack, and two differentiable functions that pass tensors around."""

    rank: int
    size: int
    comm_type: str
    """``all_gather``: keys and values of all ranks at once; ``p2p``: those of one rank after the
    other, in a ring.
    """
    gather_rows: Callable[[Tensor], Tensor]
    """``(R, ...)`` of every rank as ``(T, ...)``, in the order of ranks."""
    pass_on: Callable[[Tensor], Tensor]
    """Send a tensor to the next rank and return the one of the previous rank."""
    group: Any = None
    """Their process group, for libraries that communicate themselves."""
    global_ranks: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class ContextParallelAttentionInputs:
    """Shapes, types and options by which a backend is chosen."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    comm_type: str
    deterministic: bool


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
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax attention of this rank's rows; a token sees the earlier tokens of its own
    document, and itself.

    All ranks of ``peers`` call it together.

    Args:
        q_RNH, k_RKH, v_RKH: this rank's rows of one dtype.
        cu_seqlens: ``(D + 1,)`` int32 of the whole pack; every length a multiple of 2c.
        max_seqlen: host integer, at least the longest document of the pack.
        seq_idx_1T: ``(1, T)`` int32 of the whole pack.
        slots_T: ``(T,)`` int64, the slots of the pack in the order of the ranks that hold them.
        deterministic: equal inputs give equal bits, run to run.
        backend: a name of ``OP.names()``, or ``auto``: the reference on a CPU, TransformerEngine on
        a GPU.
    Returns:
        ``(R, N, H)`` in the dtype of q.
    Raises:
        NoBackendError: no backend, or not the one that was asked for, can serve.
    """
    backend = resolved_backend(backend, q_RNH.device.type)
    inputs = ContextParallelAttentionInputs(
        num_heads=q_RNH.shape[1],
        num_kv_heads=k_RKH.shape[1],
        head_dim=q_RNH.shape[2],
        dtype=q_RNH.dtype,
        device_type=q_RNH.device.type,
        comm_type=peers.comm_type,
        deterministic=deterministic,
    )
    try:
        run = OP.chosen[backend, inputs].loaded.run
    except NoBackendError as error:
        raise NoBackendError(
            f"{error}. {flags.CP_COMM_TYPE} a2a serves every attention backend."
        ) from None
    out_RNH: Tensor = run(
        q_RNH,
        k_RKH,
        v_RKH,
        cu_seqlens,
        max_seqlen,
        seq_idx_1T=seq_idx_1T,
        slots_T=slots_T,
        peers=peers,
        deterministic=deterministic,
    )
    return out_RNH


def resolved_backend(backend: str, device_type: str) -> str:
    """Return what ``auto`` means on a device: on a GPU the reference, which would be slow there,
    must be named.
    """
    return "transformer_engine" if backend == "auto" and device_type == "cuda" else backend
