# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the gradients inside a chunk, given the states around it and their gradients.

A program computes one chunk of one group of heads. It takes the heads in order and sums the gradients
of B, C and C B^T in registers. If there are few chunks, several programs share the heads of a group,
and a second kernel adds their sums in a fixed order.

Letters: T tokens, N heads, P head dimension, G groups, S state, Q chunks, L tokens of a chunk. There
are X blocks of channels in a head, and K programs for a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.chunk_sum import PartialSums
from megatron_packed.ops.ssd.triton_loads import load_factors, load_rows, store_rows
from megatron_packed.ops.ssd.triton_tiles import Plan

_ROWS_PER_PROGRAM = 16


class ScanTensors(NamedTuple):
    """Tensors that the gradients are computed from."""

    x_TNP: Tensor
    B_TGS: Tensor
    C_TGS: Tensor
    dy_TNP: Tensor
    seq_idx_1T: Tensor
    factors_4NQL: Tensor
    states_QNPS: Tensor
    """State at the start of each chunk, in x's dtype."""
    d_states_QNPS: Tensor
    """Gradient of the state at the end of each chunk, in x's dtype."""


def chunk_gradients(scan: ScanTensors, plan: Plan, *, out: tuple[Tensor, Tensor]) -> PartialSums:
    """Write the gradients of B and C to ``out``, and return those of steps, decays and D.

    Args:
        out: tensors of the shapes of B and C with stride 1 in the last dimension.
    """
    (tokens, heads, _), (groups, state_dim) = scan.x_TNP.shape, scan.B_TGS.shape[1:]
    dB_TGS, dC_TGS = out
    options: dict[str, Any] = {"dtype": torch.float32, "device": scan.x_TNP.device}
    if plan.splits == 1:
        parts = (dB_TGS, dC_TGS)
    else:
        shape_KTGS = (plan.splits, tokens, groups, state_dim)
        parts = (torch.empty(shape_KTGS, **options), torch.empty(shape_KTGS, **options))
    d_sums_3XNQL = torch.empty(3, plan.blocks, heads, plan.chunks, plan.length, **options)
    channels = plan.blocks * plan.block_p
    d_last_NQX = torch.empty(heads, plan.chunks, channels, **options)
    d_D_XQN = torch.empty(plan.blocks, plan.chunks, heads, **options)
    _launch(scan, plan, parts, (d_sums_3XNQL, d_last_NQX, d_D_XQN))
    if plan.splits > 1:
        _add(parts, (dB_TGS, dC_TGS), plan.splits)
    return PartialSums(
        d_sum_XNQL=d_sums_3XNQL[0],
        d_last_sum_NQX=d_last_NQX,
        d_log_XNQL=d_sums_3XNQL[0, :0],
        d_reach_XNQL=d_sums_3XNQL[1],
        d_step_XNQL=d_sums_3XNQL[2],
        d_D_XXQN=d_D_XQN[None],
    )


def _launch(
    scan: ScanTensors, plan: Plan, out: tuple[Tensor, Tensor], sums: tuple[Tensor, ...]
) -> None:
    (tokens, heads, head_dim), (groups, state_dim) = scan.x_TNP.shape, scan.B_TGS.shape[1:]
    tiles = plan.tiles["gradients"]
    _gradients_kernel[(groups * plan.splits, plan.chunks)](
        *scan,
        *out,
        *sums,
        tokens,
        plan.chunks,
        *scan.x_TNP.stride()[:2],
        *scan.B_TGS.stride()[:2],
        *scan.C_TGS.stride()[:2],
        *scan.dy_TNP.stride()[:2],
        *out[0].stride()[-3:-1],
        *out[1].stride()[-3:-1],
        P=head_dim,
        S=state_dim,
        BLOCK_P=plan.block_p,
        BLOCK_S=plan.block_s,
        HEADS=heads,
        HEADS_PER_GROUP=heads // groups,
        SPLITS=plan.splits,
        L=plan.length,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
    )


def _add(parts: tuple[Tensor, Tensor], outs: tuple[Tensor, Tensor], splits: int) -> None:
    tokens, groups, state_dim = outs[0].shape
    columns = groups * state_dim
    block = min(triton.next_power_of_2(columns), 256)
    _add_kernel[(triton.cdiv(tokens, _ROWS_PER_PROGRAM), triton.cdiv(columns, block), 2)](
        *parts,
        *outs,
        tokens,
        outs[0].stride(0),
        outs[0].stride(1),
        outs[1].stride(0),
        outs[1].stride(1),
        S=state_dim,
        COLUMNS=columns,
        SPLITS=splits,
        BLOCK_T=_ROWS_PER_PROGRAM,
        BLOCK=block,
    )


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _gradients_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    dy_ptr,
    seq_idx_ptr,
    factors_ptr,
    states_ptr,
    d_states_ptr,
    db_ptr,
    dc_ptr,
    d_sums_ptr,
    d_last_ptr,
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
    db_stride,
    db_group_stride,
    dc_stride,
    dc_group_stride,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    L: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute B3 to B7 in chunk c for part k of the heads of group g in program (g * SPLITS + k, c)."""
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
    s_mask = real[:, None] & (s < S)[None, :]
    plane = HEADS * chunks.to(tl.int64) * L
    b = load_rows(b_ptr + group * b_group_stride, start, b_stride, token, s, s_mask)
    c = load_rows(c_ptr + group * c_group_stride, start, c_stride, token, s, s_mask)
    document = tl.load(seq_idx_ptr + start + token, mask=real, other=-1)
    # Rows are the earlier tokens j, columns the later tokens i.
    pairs = (token[:, None] <= token[None, :]) & (document[:, None] == document[None, :])
    scores = tl.where(pairs, tl.dot(b, tl.trans(c)), 0.0)
    db = tl.zeros((L, BLOCK_S), dtype=tl.float32)
    dc = tl.zeros((L, BLOCK_S), dtype=tl.float32)
    d_scores = tl.zeros((L, L), dtype=tl.float32)
    for number in tl.range(COUNT * BLOCKS, num_stages=STAGES):
        head = group * HEADS_PER_GROUP + split * COUNT + number // BLOCKS
        block = number % BLOCKS
        channel = block * BLOCK_P + p
        p_mask = real[:, None] & (channel < P)[None, :]
        row = head * chunks * L + start
        step, total, enter, rest = load_factors(factors_ptr + row, plane, token)
        keep = tl.load(factors_ptr + 2 * plane + row + (L - 1))
        # A tile is read from shared memory where it is loaded here, so late loads save registers.
        tile = (chunk * HEADS + head) * (P * S) + channel[:, None] * S + s[None, :]
        state_mask = (channel < P)[:, None] & (s < S)[None, :]
        state = tl.load(states_ptr + tile, mask=state_mask, other=0.0)
        d_state = tl.load(d_states_ptr + tile, mask=state_mask, other=0.0)
        d_last = tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
        last_at = ((head * chunks + chunk) * BLOCKS + block) * BLOCK_P + p
        tl.store(d_last_ptr + last_at, d_last * keep)

        dy = load_rows(dy_ptr + head * dy_head_stride, start, dy_stride, token, channel, p_mask)
        d_enter, dc = _with_state(c, state, dy, enter, dc)
        x = load_rows(x_ptr + head * x_head_stride, start, x_stride, token, channel, p_mask)
        d_skip = tl.sum(tl.sum(x.to(tl.float32) * dy.to(tl.float32), axis=1), axis=0)
        tl.store(d_skip_ptr + (block * chunks + chunk) * HEADS + head, d_skip)
        d_rest, db = _with_state(b, d_state, x, rest * step, db)
        d_step, d_sum, d_scores = _between_tokens(x, dy, scores, total, step, token, d_scores)
        out = d_sums_ptr + block * plane + row + token
        tl.store(out, d_sum + d_enter)
        tl.store(out + BLOCKS * plane + 1, d_rest, mask=token + 1 < L)
        # All terms are zeros for a step of zero. The bound prevents 0 / 0.
        tl.store(out + 2 * BLOCKS * plane, (d_step + d_rest) / tl.maximum(step, 1e-30))
    low = tl.where(pairs, d_scores, 0.0).to(b.dtype)
    db = tl.dot(low, c, db)
    dc += _transposed_product(b, low)
    part = split * tokens.to(tl.int64) * (HEADS // HEADS_PER_GROUP) * S
    if SPLITS == 1:
        part = 0
    store_rows(db_ptr + (part + group * db_group_stride), start, db_stride, token, s, s_mask, db)
    store_rows(dc_ptr + (part + group * dc_group_stride), start, dc_stride, token, s, s_mask, dc)


@triton.jit
def _with_state(a, state, values, factor, total):
    """Compute the terms of a chunk with a state: of C with the first one, or of B with the last one.

    Returns:
        the gradient of the logarithm of ``factor``, and ``total`` plus the gradient of ``a``.
    """
    scaled = values.to(tl.float32) * factor[:, None]
    product = tl.dot(a, tl.trans(state))
    return tl.sum(product * scaled, axis=1), tl.dot(scaled.to(values.dtype), state, total)


@triton.jit
def _between_tokens(x, dy, scores, total, step, token, d_scores):
    """Compute the terms between two tokens of a chunk.

    Inside a document the exponent is at most 0. Elsewhere the scores are zeros, and the caller masks
    the gradient of the scores.

    Returns:
        the gradient of steps times the steps, that of sums, and ``d_scores`` plus that of scores.
    """
    decay = tl.exp2(tl.minimum(total[None, :] - total[:, None], 0.0))
    products = tl.dot(x, tl.trans(dy)) * (decay * step[:, None])
    d_scores += products
    products *= scores
    # The diagonal has no decay.
    decayed = tl.where(token[:, None] < token[None, :], products, 0.0)
    d_step, d_earlier = tl.reduce((products, decayed), 1, _add_pairs)
    return d_step, tl.sum(decayed, axis=0) - d_earlier, d_scores


@triton.jit
def _transposed_product(b, low):
    """Return the transpose of ``low`` times ``b``, without a computed tile as a transposed left operand."""
    return tl.trans(tl.dot(tl.trans(b), low))


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["tokens"])
def _add_kernel(
    db_parts_ptr,
    dc_parts_ptr,
    db_ptr,
    dc_ptr,
    tokens,
    db_stride,
    db_group_stride,
    dc_stride,
    dc_group_stride,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all programs of a group, in order: those of B if the third index is 0, else of C."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (t < tokens)[:, None] & (column < COLUMNS)[None, :]
    at = t[:, None] * COLUMNS + column[None, :]
    plane = tokens.to(tl.int64) * COLUMNS
    total = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    if tl.program_id(2) == 0:
        for split in tl.static_range(SPLITS):
            total += tl.load(db_parts_ptr + split * plane + at, mask=mask, other=0.0)
        to = t[:, None] * db_stride + (column // S * db_group_stride + column % S)[None, :]
        tl.store(db_ptr + to, total.to(db_ptr.dtype.element_ty), mask=mask)
    else:
        for split in tl.static_range(SPLITS):
            total += tl.load(dc_parts_ptr + split * plane + at, mask=mask, other=0.0)
        to = t[:, None] * dc_stride + (column // S * dc_group_stride + column % S)[None, :]
        tl.store(dc_ptr + to, total.to(dc_ptr.dtype.element_ty), mask=mask)
