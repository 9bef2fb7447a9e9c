"""Triton kernels for the step sizes: softplus, and the running sum of dt * A that restarts at every document.

mamba-ssm's own running sum goes through a whole chunk, so that documents sharing a chunk disturb each other's rounding
(1e-7). Here the sum is a scan over pairs (value, whether a document starts here) whose combination *selects* instead of
adding across a start: no bit of another document gets in. The backward kernel is the exact adjoint: a scan from the
right that restarts behind every document's end.

Layout as mamba-ssm's kernels want it: (N, Q, L) fp32 with Q chunks of L tokens. Padding behind the last token has
dt = 0 and belongs to the last document. Sums over tokens are per chunk, then over chunks in order: deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_PER_PROGRAM = 8


class StepGradients(NamedTuple):
    """Gradients of the raw step sizes and their parameters."""

    dt_TN: Tensor
    A_N: Tensor
    dt_bias_N: Tensor


def chunk_sum_forward(
    dt_TN: Tensor, A_N: Tensor, dt_bias_N: Tensor, seq_idx_1T: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Step sizes and restarting sums.

    Args:
        dt_TN: ``(T, N)`` before bias and softplus, any strides.
        A_N: ``(N,)``.
        dt_bias_N: ``(N,)``.
        seq_idx_1T: ``(1, T)`` int32.
        chunk_size: L.
    Returns:
        ``softplus(dt + dt_bias)`` and the sum of ``dt * A`` from the start of the document or of the chunk, whichever
        is later, both ``(N, Q, L)`` fp32.
    """
    tokens, heads = dt_TN.shape
    chunks = triton.cdiv(tokens, chunk_size)
    step_NQL = torch.empty(heads, chunks, chunk_size, dtype=torch.float32, device=dt_TN.device)
    sum_NQL = torch.empty_like(step_NQL)
    _forward_kernel[(chunks, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        dt_TN,
        A_N,
        dt_bias_N,
        seq_idx_1T,
        step_NQL,
        sum_NQL,
        tokens,
        heads,
        chunks,
        dt_TN.stride(0),
        dt_TN.stride(1),
        L=chunk_size,
        BLOCK_L=triton.next_power_of_2(chunk_size),
        BLOCK_N=_HEADS_PER_PROGRAM,
    )
    return step_NQL, sum_NQL


def chunk_sum_backward(
    step_NQL: Tensor,
    dt_TN: Tensor,
    A_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    *,
    d_sum_NQL: Tensor,
    d_last_sum_NQ: Tensor,
    d_log_NQL: Tensor,
    d_log_more_NQL: Tensor,
    d_step_NQL: Tensor,
    out_TN: Tensor,
) -> StepGradients:
    """Back through the sum, the product with A and the softplus, in one kernel.

    Args:
        step_NQL: what ``chunk_sum_forward`` returned first; the others up to ``seq_idx_1T`` are its arguments.
        d_sum_NQL: gradient of the restarting sums.
        d_last_sum_NQ: more gradient of each chunk's last sum.
        d_log_NQL: gradient of the single terms ``dt * A``.
        d_log_more_NQL: more of the same.
        d_step_NQL: gradient of the step sizes by other ways than the sums.
        out_TN: where the gradient of ``dt_TN`` goes, any strides.
    """
    tokens, heads = dt_TN.shape
    chunks, chunk_size = step_NQL.shape[1:]
    parts_2QN = torch.empty(2, chunks, heads, dtype=torch.float32, device=dt_TN.device)
    _backward_kernel[(chunks, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        step_NQL,
        dt_TN,
        A_N,
        dt_bias_N,
        seq_idx_1T,
        d_sum_NQL,
        d_last_sum_NQ,
        d_log_NQL,
        d_log_more_NQL,
        d_step_NQL,
        out_TN,
        parts_2QN,
        tokens,
        heads,
        chunks,
        dt_TN.stride(0),
        dt_TN.stride(1),
        out_TN.stride(0),
        out_TN.stride(1),
        L=chunk_size,
        BLOCK_L=triton.next_power_of_2(chunk_size),
        BLOCK_N=_HEADS_PER_PROGRAM,
    )
    dA_N, ddt_bias_N = parts_2QN.sum(1)
    return StepGradients(out_TN, dA_N, ddt_bias_N)


@triton.jit
def _restarting_add(sum_a, restart_a, sum_b, restart_b):  # type: ignore[no-untyped-def]
    return tl.where(restart_b != 0, sum_b, sum_a + sum_b), restart_a | restart_b


@triton.jit
def _log1p(y):  # type: ignore[no-untyped-def]
    """log(1 + y) to a few units in the last place for y >= 0: dt is small, where log(1 + y) alone loses its digits."""
    u = 1.0 + y
    return tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    dt_ptr,
    A_ptr,
    bias_ptr,
    seq_idx_ptr,
    step_ptr,
    sum_ptr,
    tokens,
    heads,
    chunks,
    stride_token,
    stride_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_L)
    t = chunk * L + i
    is_token = (i < L) & (t < tokens)
    is_real = (n < heads)[:, None] & is_token[None, :]

    raw = tl.load(dt_ptr + n[:, None] * stride_head + t[None, :] * stride_token, mask=is_real, other=0.0).to(tl.float32)
    raw += tl.load(bias_ptr + n, mask=n < heads, other=0.0).to(tl.float32)[:, None]
    step = tl.where(raw <= 20.0, _log1p(tl.exp(tl.minimum(raw, 20.0))), raw)
    step = tl.where(is_real, step, 0.0)
    A = tl.load(A_ptr + n, mask=n < heads, other=0.0).to(tl.float32)

    document = tl.load(seq_idx_ptr + t, mask=is_token, other=0)
    before = tl.load(seq_idx_ptr + t - 1, mask=is_token & (t > 0), other=0)
    starts = ((document != before) & is_token).to(tl.int32)
    starts = tl.broadcast_to(starts[None, :], (BLOCK_N, BLOCK_L))
    total, _ = tl.associative_scan((step * A[:, None], starts), 1, _restarting_add)

    out = (n[:, None] * chunks + chunk) * L + i[None, :]
    is_stored = (n < heads)[:, None] & (i < L)[None, :]
    tl.store(step_ptr + out, step, mask=is_stored)
    tl.store(sum_ptr + out, total, mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    step_ptr,
    dt_ptr,
    A_ptr,
    bias_ptr,
    seq_idx_ptr,
    d_sum_ptr,
    d_last_sum_ptr,
    d_log_ptr,
    d_log_more_ptr,
    d_step_ptr,
    d_dt_ptr,
    parts_ptr,
    tokens,
    heads,
    chunks,
    stride_token,
    stride_head,
    stride_d_token,
    stride_d_head,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_L)
    t = chunk * L + i
    is_token = (i < L) & (t < tokens)
    is_real = (n < heads)[:, None] & is_token[None, :]
    is_stored = (n < heads)[:, None] & (i < L)[None, :]
    at = (n[:, None] * chunks + chunk) * L + i[None, :]

    d_sum = tl.load(d_sum_ptr + at, mask=is_stored, other=0.0)
    d_last = tl.load(d_last_sum_ptr + n * chunks + chunk, mask=n < heads, other=0.0)
    d_sum += tl.where((i == L - 1)[None, :], d_last[:, None], 0.0)
    document = tl.load(seq_idx_ptr + t, mask=is_token, other=0)
    after = tl.load(seq_idx_ptr + t + 1, mask=is_token & (t + 1 < tokens), other=0)
    ends = ((document != after) & is_token & (t + 1 < tokens)).to(tl.int32)
    ends = tl.broadcast_to(ends[None, :], (BLOCK_N, BLOCK_L))
    d_log, _ = tl.associative_scan((d_sum, ends), 1, _restarting_add, reverse=True)
    d_log += tl.load(d_log_ptr + at, mask=is_stored, other=0.0)
    d_log += tl.load(d_log_more_ptr + at, mask=is_stored, other=0.0)

    A = tl.load(A_ptr + n, mask=n < heads, other=0.0).to(tl.float32)
    raw = tl.load(dt_ptr + n[:, None] * stride_head + t[None, :] * stride_token, mask=is_real, other=0.0).to(tl.float32)
    raw += tl.load(bias_ptr + n, mask=n < heads, other=0.0).to(tl.float32)[:, None]
    d_step = d_log * A[:, None] + tl.load(d_step_ptr + at, mask=is_stored, other=0.0)
    d_raw = tl.where(raw <= 20.0, d_step * tl.sigmoid(raw), d_step)
    d_raw = tl.where(is_real, d_raw, 0.0)
    tl.store(d_dt_ptr + n[:, None] * stride_d_head + t[None, :] * stride_d_token, d_raw, mask=is_real)

    step = tl.load(step_ptr + at, mask=is_real, other=0.0)
    part = chunk * heads + n
    tl.store(parts_ptr + part, tl.sum(tl.where(is_real, d_log * step, 0.0), axis=1), mask=n < heads)
    tl.store(parts_ptr + chunks * heads + part, tl.sum(d_raw, axis=1), mask=n < heads)
