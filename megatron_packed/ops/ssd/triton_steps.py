# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel for the step sizes and for all decay factors of a chunk.

The running sum of dt A restarts at each document, as in `chunk_sum`. The factors of terms of other
documents are exact zeros, so the other kernels need no document numbers, except for the products
between two tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.chunk_sum import _log1p, _restarting_add
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of

STEP, SUM, ENTER, REST = range(4)
"""Planes of the result of `chunk_factors`."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_HEADS_PER_PROGRAM = 8


def chunk_factors(
    dt_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    length: int,
    document_before_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute step sizes, restarting sums, decay factors and starts of documents.

    Args:
        dt_TN: ``(T, N)`` step sizes before bias and softplus, any strides.
        length: L, a power of 2.
        document_before_1: document of the token before the first one; None if there is no such token.
    Returns:
        ``(4, N, Q, L)`` fp32 and ``(Q, L)`` int32. The second is the position in the chunk where the
        document of each token begins. The planes of the first are

        - STEP: ``softplus(dt + dt_bias)``, 0 after the last token.
        - SUM: the restarting sum s, divided by log 2. After the last token it is that of this token.
        - ENTER: ``exp(s_i)`` if the document of token i continues from the previous chunk, else 0.
        - REST: ``exp(s_last - s_i)`` if token i is in the document of the chunk's last token, else 0.
    """
    tokens, heads = dt_TN.shape
    chunks = triton.cdiv(tokens, length)
    factors_4NQL = torch.empty(4, heads, chunks, length, dtype=torch.float32, device=dt_TN.device)
    first_QL = torch.empty(chunks, length, dtype=torch.int32, device=dt_TN.device)
    _factors_kernel[(chunks, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        dt_TN,
        A_log_N,
        dt_bias_N,
        seq_idx_1T,
        document_before_1,
        factors_4NQL,
        first_QL,
        tokens,
        heads,
        chunks,
        dt_TN.stride(0),
        dt_TN.stride(1),
        L=length,
        BLOCK_N=_HEADS_PER_PROGRAM,
    )
    return factors_4NQL, first_QL


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _factors_kernel(
    dt_ptr,
    A_log_ptr,
    bias_ptr,
    seq_idx_ptr,
    before_ptr,
    factors_ptr,
    first_ptr,
    tokens,
    heads,
    chunks,
    stride_token,
    stride_head,
    L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, L)
    t = chunk * L + i
    is_token = t < tokens
    is_head = n < heads
    is_real = mask_of(is_head, is_token)
    raw = load_fp32(dt_ptr + n[:, None] * stride_head + t[None, :] * stride_token, is_real)
    raw += load_fp32(bias_ptr + n, is_head)[:, None]
    step = tl.where(raw <= 20.0, _log1p(tl.exp(tl.minimum(raw, 20.0))), raw)
    step = tl.where(is_real, step, 0.0)
    A = -tl.exp(load_fp32(A_log_ptr + n, is_head))

    # Positions after the last token belong to the last document.
    document = tl.load(seq_idx_ptr + tl.minimum(t, tokens - 1))
    before = load(seq_idx_ptr + t - 1, is_token & (t > 0))
    starts = ((document != before) & is_token).to(tl.int32)
    starts = tl.broadcast_to(starts[None, :], (BLOCK_N, L))
    total, _ = tl.associative_scan((step * (A * _LOG2_E)[:, None], starts), 1, _restarting_add)

    last = tl.sum(tl.where((i == L - 1)[None, :], total, 0.0), axis=1)
    previous_document = tl.load(seq_idx_ptr + chunk * L - 1, mask=chunk > 0, other=-1)
    if before_ptr is not None:
        previous_document = tl.where(chunk > 0, previous_document, tl.load(before_ptr))
    last_document = tl.load(seq_idx_ptr + tl.minimum(chunk * L + L, tokens) - 1)
    nothing = -float("inf")
    enter = tl.exp2(tl.where((document == previous_document)[None, :], total, nothing))
    logs = last[:, None] - total
    rest = tl.exp2(tl.where((document == last_document)[None, :], logs, nothing))

    out = factors_ptr + (n[:, None] * chunks + chunk) * L + i[None, :]
    plane = heads * chunks.to(tl.int64) * L
    mask = mask_of(is_head, i < L)
    tl.store(out, step, mask=mask)
    tl.store(out + plane, total, mask=mask)
    tl.store(out + 2 * plane, enter, mask=mask)
    tl.store(out + 3 * plane, rest, mask=mask)
    if tl.program_id(1) == 0:
        beginning = ((document != before) & is_token).to(tl.int32) * i
        tl.store(first_ptr + chunk * L + i, tl.associative_scan(beginning, 0, _larger))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
