"""Triton kernels for the step sizes: softplus, and the running sum of dt * A.

The running sum restarts at each document. mamba-ssm's own kernel sums over a complete chunk, so
documents in one chunk change each other's rounding (by about 1e-7). Here the sum is a scan over pairs
(value, flag for a document start). The combination of two pairs *selects* the second value at a
start instead of adding, so no bit of another document enters the sum.

The backward kernel is the exact adjoint: a scan from the right that restarts after each document's
end. It reads the partial sums of the previous kernels directly, without a reduction before it.

Tensors have the layout of mamba-ssm's kernels: (N, Q, L) fp32 with Q chunks of L tokens. A leading X
counts partial sums. Padding after the last token has dt = 0 and belongs to the last document. Sums
over tokens are computed per chunk, then over chunks in order, so they are deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.parameter_gradients import parameter_gradients
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of

_HEADS_PER_PROGRAM = 8


class StepGradients(NamedTuple):
    """Gradients of the raw step sizes and of the parameters.

    The gradient of a parameter is None if it was added to the parameter's ``main_grad``.
    """

    dt_TN: Tensor
    A_log_N: Tensor | None
    D_N: Tensor | None
    dt_bias_N: Tensor | None


class PartialSums(NamedTuple):
    """Gradients that are given as X partial sums; tensors with X first are contiguous."""

    d_sum_XNQL: Tensor
    """Gradient of the restarting sums."""
    d_last_sum_NQX: Tensor
    """Additional gradient of the last sum of each chunk, with any stride between chunks."""
    d_log_XNQL: Tensor
    """Gradient of the single terms ``dt * A``; X may be 0."""
    d_reach_XNQL: Tensor
    """Gradient of the sums of all terms after a token of the chunk, stored at the next position.

    Position i + 1 has the gradient of the sum of all terms after token i. A term is a part of several
    such sums, so the running sum over positions is additional gradient of the terms. Position 0 is
    not read.
    """
    d_step_XNQL: Tensor
    """Gradient of the step sizes that does not come from the sums."""
    d_D_XXQN: Tensor
    """Gradient of D; stride 1 for N, any other strides."""


def chunk_sum_forward(
    dt_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor, seq_idx_1T: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Compute step sizes and restarting sums.

    Args:
        dt_TN: ``(T, N)`` step sizes before bias and softplus, any strides.
        A_log_N: ``(N,)``, ``A = -exp(A_log)``.
        dt_bias_N: ``(N,)``.
        seq_idx_1T: ``(1, T)`` int32.
        chunk_size: L.
    Returns:
        ``softplus(dt + dt_bias)``, and the sum of ``dt * A`` from the start of the document or of
        the chunk, whichever is later. Both are ``(N, Q, L)`` fp32.
    """
    tokens, heads = dt_TN.shape
    chunks = triton.cdiv(tokens, chunk_size)
    step_NQL = torch.empty(heads, chunks, chunk_size, dtype=torch.float32, device=dt_TN.device)
    sum_NQL = torch.empty_like(step_NQL)
    _forward_kernel[(chunks, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        dt_TN,
        A_log_N,
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
    A_log_N: Tensor,
    D_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    sums: PartialSums,
    *,
    out_TN: Tensor,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> StepGradients:
    """Compute the gradients of the step sizes and of the parameters.

    One kernel computes the adjoint of the sum, of the product with A and of the softplus. A second
    kernel sums the gradients of the parameters over chunks.

    Args:
        step_NQL: step sizes that ``chunk_sum_forward`` returned.
        dt_TN, A_log_N, dt_bias_N, seq_idx_1T: arguments of ``chunk_sum_forward``.
        D_N: skip weights of the scan; only their shape and dtype are used.
        sums: gradients of the results of ``chunk_sum_forward``, and of D.
        out_TN: tensor for the gradient of ``dt_TN``, any strides.
        main_grads: fp32 buffers of A_log, D and dt_bias to which gradients are added. If a buffer
            is None, the gradient is returned.
    """
    tokens, heads = dt_TN.shape
    chunks, chunk_size = step_NQL.shape[1:]
    parts_3QN = torch.empty(3, chunks, heads, dtype=torch.float32, device=dt_TN.device)
    _backward_kernel[(chunks, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        step_NQL,
        dt_TN,
        A_log_N,
        dt_bias_N,
        seq_idx_1T,
        *sums,
        out_TN,
        parts_3QN,
        tokens,
        heads,
        chunks,
        step_NQL.numel(),
        *dt_TN.stride(),
        *out_TN.stride(),
        sums.d_last_sum_NQX.stride(1),
        *sums.d_D_XXQN.stride()[:2],
        SUMS=sums.d_sum_XNQL.shape[0],
        LAST_SUMS=sums.d_last_sum_NQX.shape[2],
        LOGS=sums.d_log_XNQL.shape[0],
        REACHES=sums.d_reach_XNQL.shape[0],
        STEPS=sums.d_step_XNQL.shape[0],
        DS_M=sums.d_D_XXQN.shape[0],
        DS_N=sums.d_D_XXQN.shape[1],
        L=chunk_size,
        BLOCK_L=triton.next_power_of_2(chunk_size),
        BLOCK_N=_HEADS_PER_PROGRAM,
        BLOCK_X=triton.next_power_of_2(sums.d_last_sum_NQX.shape[2]),
    )
    parameters = (A_log_N, D_N, dt_bias_N)
    return StepGradients(out_TN, *parameter_gradients(parts_3QN, parameters, main_grads))


@triton.jit
def _restarting_add(sum_a, restart_a, sum_b, restart_b):  # type: ignore[no-untyped-def]
    return tl.where(restart_b != 0, sum_b, sum_a + sum_b), restart_a | restart_b


@triton.jit
def _log1p(y):  # type: ignore[no-untyped-def]
    """Compute log(1 + y) for y >= 0 with an error of a few units in the last place.

    For a small y, which is usual for dt, tl.log(1 + y) would lose digits.
    """
    u = 1.0 + y
    return tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    dt_ptr,
    A_log_ptr,
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
    is_real = mask_of(n < heads, is_token)

    raw = load_fp32(dt_ptr + n[:, None] * stride_head + t[None, :] * stride_token, is_real)
    raw += load_fp32(bias_ptr + n, n < heads)[:, None]
    step = tl.where(raw <= 20.0, _log1p(tl.exp(tl.minimum(raw, 20.0))), raw)
    step = tl.where(is_real, step, 0.0)
    A = -tl.exp(load_fp32(A_log_ptr + n, n < heads))

    document = load(seq_idx_ptr + t, is_token)
    before = load(seq_idx_ptr + t - 1, is_token & (t > 0))
    starts = ((document != before) & is_token).to(tl.int32)
    starts = tl.broadcast_to(starts[None, :], (BLOCK_N, BLOCK_L))
    total, _ = tl.associative_scan((step * A[:, None], starts), 1, _restarting_add)

    out = (n[:, None] * chunks + chunk) * L + i[None, :]
    is_stored = mask_of(n < heads, i < L)
    tl.store(step_ptr + out, step, mask=is_stored)
    tl.store(sum_ptr + out, total, mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    step_ptr,
    dt_ptr,
    A_log_ptr,
    bias_ptr,
    seq_idx_ptr,
    d_sum_ptr,
    d_last_sum_ptr,
    d_log_ptr,
    d_reach_ptr,
    d_step_ptr,
    d_D_ptr,
    d_dt_ptr,
    parts_ptr,
    tokens,
    heads,
    chunks,
    size,
    stride_token,
    stride_head,
    stride_d_token,
    stride_d_head,
    stride_last_chunk,
    stride_D_m,
    stride_D_n,
    SUMS: tl.constexpr,
    LAST_SUMS: tl.constexpr,
    LOGS: tl.constexpr,
    REACHES: tl.constexpr,
    STEPS: tl.constexpr,
    DS_M: tl.constexpr,
    DS_N: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_L)
    t = chunk * L + i
    is_head = n < heads
    is_token = (i < L) & (t < tokens)
    is_real = mask_of(is_head, is_token)
    is_stored = mask_of(is_head, i < L)
    at = (n[:, None] * chunks + chunk) * L + i[None, :]

    x = tl.arange(0, BLOCK_X)
    last_at = (n[:, None] * chunks + chunk) * stride_last_chunk + x[None, :]
    d_last = load(d_last_sum_ptr + last_at, mask_of(is_head, x < LAST_SUMS))
    d_sum = _partial_sums(d_sum_ptr, at, size, is_stored, SUMS)
    d_sum += tl.where((i == L - 1)[None, :], tl.sum(d_last, axis=1)[:, None], 0.0)
    document = load(seq_idx_ptr + t, is_token)
    after = load(seq_idx_ptr + t + 1, is_token & (t + 1 < tokens))
    ends = ((document != after) & is_token & (t + 1 < tokens)).to(tl.int32)
    ends = tl.broadcast_to(ends[None, :], (BLOCK_N, BLOCK_L))
    d_log, _ = tl.associative_scan((d_sum, ends), 1, _restarting_add, reverse=True)
    # Only tokens of the chunk's last document have a nonzero d_reach. The values before this
    # document are exact zeros, so the running sum needs no restart.
    d_log += tl.cumsum(
        _partial_sums(d_reach_ptr, at, size, is_stored & (i > 0)[None, :], REACHES), axis=1
    )
    if LOGS > 0:
        d_log += _partial_sums(d_log_ptr, at, size, is_stored, LOGS)

    A = -tl.exp(load_fp32(A_log_ptr + n, is_head))
    raw = load_fp32(dt_ptr + n[:, None] * stride_head + t[None, :] * stride_token, is_real)
    raw += load_fp32(bias_ptr + n, is_head)[:, None]
    d_step = d_log * A[:, None] + _partial_sums(d_step_ptr, at, size, is_stored, STEPS)
    d_raw = tl.where(raw <= 20.0, d_step * tl.sigmoid(raw), d_step)
    d_raw = tl.where(is_real, d_raw, 0.0)
    tl.store(
        d_dt_ptr + n[:, None] * stride_d_head + t[None, :] * stride_d_token, d_raw, mask=is_real
    )

    step = load(step_ptr + at, is_real)
    d_D = tl.zeros((BLOCK_N,), tl.float32)
    for m in tl.static_range(DS_M):
        d_D += _partial_sums(d_D_ptr + m * stride_D_m, chunk * heads + n, stride_D_n, is_head, DS_N)
    part = chunk * heads + n
    tl.store(parts_ptr + part, tl.sum(tl.where(is_real, d_log * step, 0.0), axis=1), mask=is_head)
    tl.store(parts_ptr + chunks * heads + part, d_D, mask=is_head)
    tl.store(parts_ptr + 2 * chunks * heads + part, tl.sum(d_raw, axis=1), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _partial_sums(pointer, at, stride, mask, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the values at ``at`` of COUNT tensors that are ``stride`` elements apart, in order."""
    total = load(pointer + at, mask)
    for x in tl.static_range(1, COUNT):
        total += load(pointer + x * stride + at, mask)
    return total
