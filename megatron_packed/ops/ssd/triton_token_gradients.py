# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel of the gradients of the products between two tokens of a chunk; see README.md, B6 and B7.

A program computes one chunk of one group of heads. It takes the heads in order and sums the gradients
of C B^T in registers. `triton_gradients` multiplies them by B and C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.triton_loads import load_rows
from megatron_packed.ops.ssd.triton_tiles import Plan
from megatron_packed.ops.triton_loads import mask_of, rows_at


def token_gradients(
    x_TNP: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    dy_TNP: Tensor,
    seq_idx_1T: Tensor,
    factors_4NQL: Tensor,
    plan: Plan,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Return the gradients of C B^T, and write those of sums, steps and D.

    Args:
        out: ``(X, N, Q, L)`` of sums and of step sizes, and ``(X, Q, N)`` of D.
    Returns:
        ``(Q, G * K, L, L)`` in the dtype of x. The rows are the earlier tokens, those of B.
    """
    tokens, programs = len(x_TNP), B_TGS.shape[1] * plan.splits
    shape = (plan.chunks, programs, plan.length, plan.length)
    d_scores_QKLL = torch.empty(shape, dtype=x_TNP.dtype, device=x_TNP.device)
    _token_gradients_kernel[(programs, plan.chunks)](
        x_TNP,
        B_TGS,
        C_TGS,
        dy_TNP,
        seq_idx_1T,
        factors_4NQL,
        d_scores_QKLL,
        *out,
        tokens,
        plan.chunks,
        *x_TNP.stride()[:2],
        *B_TGS.stride()[:2],
        *C_TGS.stride()[:2],
        *dy_TNP.stride()[:2],
        BLOCK_S=plan.block_s,
        SPLITS=plan.splits,
        FULL=plan.full,
        **plan.constants("tokens", x_TNP, B_TGS),
    )
    return d_scores_QKLL


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _token_gradients_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    dy_ptr,
    seq_idx_ptr,
    factors_ptr,
    d_scores_ptr,
    d_sums_ptr,
    d_steps_ptr,
    d_skip_ptr,
    tokens,
    chunks,
    x_stride,
    x_head_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    dy_stride,
    dy_head_stride,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    L: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute chunk c for part k of the heads of group g in program (g * SPLITS + k, c)."""
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    COUNT: tl.constexpr = HEADS_PER_GROUP // SPLITS
    group = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    chunk = tl.program_id(1)
    start = chunk.to(tl.int64) * L
    p = tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    real = token < tokens - chunk * L
    s_mask = mask_of(real, s < S)
    plane = HEADS * chunks.to(tl.int64) * L
    b = load_rows(b_ptr + group * b_group_stride, start, b_stride, token, s, s_mask)
    c = load_rows(c_ptr + group * c_group_stride, start, c_stride, token, s, s_mask)
    document = tl.load(seq_idx_ptr + start + token, mask=real, other=-1)
    # Rows are the earlier tokens j, columns the later tokens i.
    pairs = (token[:, None] <= token[None, :]) & (document[:, None] == document[None, :])
    scores = tl.where(pairs, tl.dot(b, tl.trans(c)), 0.0)
    d_scores = tl.zeros((L, L), dtype=tl.float32)
    for number in tl.range(COUNT * BLOCKS, num_stages=STAGES):
        head = group * HEADS_PER_GROUP + split * COUNT + number // BLOCKS
        block = number % BLOCKS
        channel = block * BLOCK_P + p
        p_mask = mask_of(real, channel < P)
        row = head * chunks * L + start
        step = tl.load(factors_ptr + row + token)
        total = tl.load(factors_ptr + plane + row + token)
        x = load_rows(x_ptr + head * x_head_stride, start, x_stride, token, channel, p_mask, FULL)
        dy_base = dy_ptr + head * dy_head_stride
        dy = load_rows(dy_base, start, dy_stride, token, channel, p_mask, FULL)
        products = tl.dot(x, tl.trans(dy))
        d_skip = tl.where(token[:, None] == token[None, :], products, 0.0)
        # Inside a document the exponent is at most 0. Elsewhere the scores are zeros.
        decay = tl.exp2(tl.minimum(total[None, :] - total[:, None], 0.0))
        products *= decay * step[:, None]
        d_scores += products
        products *= scores
        d_step, d_skip = tl.reduce((products, d_skip), 1, _add_two)
        out = block * plane + row + token
        # The diagonal has no decay, and cancels.
        tl.store(d_sums_ptr + out, tl.sum(products, axis=0) - d_step)
        # All terms are zeros for a step of zero. The bound prevents 0 / 0.
        tl.store(d_steps_ptr + out, d_step / tl.maximum(step, 1e-30))
        tl.store(d_skip_ptr + (block * chunks + chunk) * HEADS + head, tl.sum(d_skip, axis=0))
    low = tl.where(pairs, d_scores, 0.0).to(d_scores_ptr.dtype.element_ty)
    at = d_scores_ptr + (chunk.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (L * L)
    tl.store(rows_at(at, token, L, token), low)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d
