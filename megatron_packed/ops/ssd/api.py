"""Mamba-2's state-space scan (SSD) over packed documents.

For every head n, with S the size of its state and P the head dimension::

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T          h is (P, S), zero before the first token of every document
    y_t = h_t C_t + D x_t                               dt_t = softplus(dt_t + dt_bias), A = -exp(A_log)

Letters in tensor names: T tokens, N heads, P head dimension, G groups (heads of one group share B
and C), S state.
Source: Dao and Gu, 'Transformers are SSMs', arXiv:2405.21060. The derivation of the packed form
stands in README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

OP = Op(
    "ssd",
    (
        Backend("mamba_ssm", "megatron_packed.ops.ssd.mamba_ssm"),
        Backend("reference", "megatron_packed.ops.ssd.reference"),
        Backend("recurrence", "megatron_packed.ops.ssd.recurrence", automatic=False),
    ),
)


@dataclass(frozen=True, kw_only=True)
class SSDInputs:
    """Shapes, types and options by which a backend is chosen."""

    tokens: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    chunk_size: int
    row_stride: int
    """The largest step, in elements, from one token to the next in x, B and C (they may be views of
    a wider tensor).
    """
    dtype: torch.dtype
    device_type: str


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
    """Run the scan, with the state set to zero at the first token of every document.

    Args:
        x_TNP: ``(T, N, P)`` inputs; x, B and C may be strided views whose last dimension has step
        1.
        dt_TN: ``(T, N)`` step sizes before bias and softplus.
        A_log_N: ``(N,)`` fp32, the logarithm of -A.
        B_TGS: ``(T, G, S)`` input projections, N divisible by G.
        C_TGS: ``(T, G, S)`` output projections.
        D_N: ``(N,)`` fp32 skip weights.
        dt_bias_N: ``(N,)`` fp32.
        seq_idx_1T: ``(1, T)`` int32 document number of each token, never decreasing.
        cu_seqlens: int32 document offsets (first 0, last T), the same boundaries once more. The
            oracle ('recurrence') goes by these and the others by ``seq_idx_1T``, so a disagreement
            of the two shows.
        chunk_size: tokens handled by one matrix product; changes rounding only.
    Returns:
        ``(T, N, P)`` in x's dtype.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    """
    inputs = _checked(x_TNP, dt_TN, B_TGS, C_TGS, seq_idx_1T, chunk_size)
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N, seq_idx_1T, cu_seqlens)
    y_TNP: Tensor = OP.chosen[backend, inputs].loaded.run(*arguments, chunk_size=chunk_size)
    return y_TNP


def tune(inputs: SSDInputs, device: torch.device, *, backend: str = "auto") -> None:
    """Let the backend choose its kernels' tiles at these sizes; nothing for a backend without a
    choice.

    Triton tunes a kernel for the first call it sees and keeps the result for every number of tokens
    and heads.

    Raises:
        NoBackendError: the backend asked for cannot serve these inputs.
    """
    module = OP.chosen[backend, inputs].loaded
    if hasattr(module, "tune"):
        module.tune(inputs, device)


def _checked(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, seq_idx: Tensor, chunk_size: int
) -> SSDInputs:
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
    """Return the sizes of a call."""
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
