"""Mamba-2's state-space scan (SSD) over packed documents.

For each head n, with S the size of its state and P the head dimension::

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T          h is (P, S), zero before the first token of each document
    y_t = h_t C_t + D x_t                               dt_t = softplus(dt_t + dt_bias), A = -exp(A_log)

Letters in tensor names: T tokens, N heads, P head dimension, G groups (heads of one group share B
and C), S state.

Source: Dao and Gu, 'Transformers are SSMs', arXiv:2405.21060. README.md derives the packed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import CHUNKS_TO_TUNE, Backend, GPUBackend, Op, OpWork

LARGEST_STATE = 256
"""Largest size of a state that fits in the registers of this package's kernels."""


@dataclass(frozen=True, kw_only=True)
class SSDInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    tokens: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    chunk_size: int
    row_stride: int
    """Largest token stride of x, B and C, in elements; these may be views of a wider tensor."""
    dtype: torch.dtype
    device_type: str


def _work(inputs: SSDInputs) -> OpWork:
    """Return the work of pairs in a chunk, and into, between and out of the states of chunks."""
    inner = inputs.heads * inputs.head_dim
    return OpWork(
        per_token=4 * inner * inputs.state_dim + 2 * inner,
        chunk=inputs.chunk_size,
        per_pair_in_chunk=2 * inputs.groups * inputs.state_dim + 2 * inner,
        per_chunk=2 * inner * inputs.state_dim,
    )


def _to_tune(inputs: SSDInputs) -> SSDInputs:
    stride = max(inputs.heads * inputs.head_dim, inputs.groups * inputs.state_dim)
    return replace(inputs, tokens=CHUNKS_TO_TUNE * inputs.chunk_size, row_stride=stride)


OP = Op(
    "ssd",
    (
        GPUBackend("triton", "megatron_packed.ops.ssd.triton_kernels"),
        GPUBackend(
            "mamba_ssm",
            "megatron_packed.ops.ssd.mamba_ssm",
            on_meta=Backend("mamba_ssm", "megatron_packed.ops.ssd.on_meta:MambaSSM"),
        ),
        Backend("reference", "megatron_packed.ops.ssd.reference"),
        Backend("recurrence", "megatron_packed.ops.ssd.recurrence", automatic=False),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.ssd.on_meta"),
    work=_work,
    to_tune=_to_tune,
)


def ssd(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    D_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    cu_seqlens: Tensor,
    *,
    chunk_size: int,
    backend: str = "auto",
) -> Tensor:
    """Run the scan, with the state set to zero before the first token of each document.

    Args:
        x_TNP: ``(T, N, P)`` inputs. x, B and C may be strided views with stride 1 in the last
            dimension.
        dt_TN: ``(T, N)`` step sizes before bias and softplus.
        A_log_N: ``(N,)`` fp32, the logarithm of -A.
        B_TGS: ``(T, G, S)`` input projections, N divisible by G.
        C_TGS: ``(T, G, S)`` output projections.
        D_N: ``(N,)`` fp32 skip weights.
        dt_bias_N: ``(N,)`` fp32.
        seq_idx_1T: ``(1, T)`` int32 document number of each token, never decreasing.
        cu_seqlens: int32 document offsets (first 0, last T), the same boundaries as ``seq_idx_1T``.
            Only the backend ``recurrence`` reads the offsets, and the others read ``seq_idx_1T``.
            So comparing the backends detects a mismatch of the two.
        chunk_size: number of tokens in one matrix product; changes only rounding.
    Returns:
        ``(T, N, P)`` in x's dtype.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    inputs = checked_inputs(x_TNP, dt_TN, B_TGS, C_TGS, seq_idx_1T, chunk_size)
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T, cu_seqlens)
    y_TNP: Tensor = OP.chosen[backend, inputs].loaded.run(*arguments, chunk_size=chunk_size)
    return y_TNP


def checked_inputs(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, seq_idx: Tensor, chunk_size: int
) -> SSDInputs:
    """Return the inputs that determine the backend; ValueError if the shapes do not fit together."""
    if x.dim() != 3 or dt.shape != x.shape[:2]:
        raise ValueError(
            f"ssd: x has shape {list(x.shape)} and dt {list(dt.shape)}; they must be (T, N, P) and (T, N)."
        )
    if b.dim() != 3 or b.shape != c.shape or b.shape[0] != x.shape[0]:
        raise ValueError(
            f"ssd: B has shape {list(b.shape)} and C {list(c.shape)}; both must be (T, G, S) with T = {x.shape[0]}."
        )
    if x.shape[1] % b.shape[1]:
        raise ValueError(f"ssd: {x.shape[1]} heads are not divisible by {b.shape[1]} groups.")
    if seq_idx.shape != (1, x.shape[0]):
        raise ValueError(
            f"ssd: seq_idx has shape {list(seq_idx.shape)}; it must be (1, T) with T = {x.shape[0]}."
        )
    if chunk_size < 1:
        raise ValueError(f"ssd: chunk_size is {chunk_size}; choose a positive number, e.g. 128.")
    return inputs_of(x, b, c, chunk_size)


def inputs_of(x_TNP: Tensor, B_TGS: Tensor, C_TGS: Tensor, chunk_size: int) -> SSDInputs:
    """Return the shapes, dtype and options of a call, which determine its backend."""
    return SSDInputs(
        tokens=x_TNP.shape[0],
        heads=x_TNP.shape[1],
        head_dim=x_TNP.shape[2],
        groups=B_TGS.shape[1],
        state_dim=B_TGS.shape[2],
        chunk_size=chunk_size,
        row_stride=max(x_TNP.stride(0), B_TGS.stride(0), C_TGS.stride(0)),
        dtype=x_TNP.dtype,
        device_type=x_TNP.device.type,
    )
