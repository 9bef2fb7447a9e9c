# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the gradients inside a chunk, given the states around it and their gradients.

The first kernel computes the products between two tokens (`triton_token_gradients`), the second one the
products with states. A program of the second kernel computes one chunk of one group of heads. Half of
the programs compute C with the states at the start, and the others B with the gradients of the states at
the end. A program takes the heads in order and sums the gradient of C or B in registers. If there are
few chunks, several programs share the heads of a group, and a third kernel adds their sums in order.

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
from megatron_packed.ops.ssd.triton_loads import load_rows, store_rows
from megatron_packed.ops.ssd.triton_tiles import Plan
from megatron_packed.ops.ssd.triton_token_gradients import token_gradients

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
    blocks = plan.blocks
    sums_NQL = (heads, plan.chunks, plan.length)
    # First those of the products between tokens, then those of the products with states.
    d_sum_XNQL = torch.empty(2 * blocks, *sums_NQL, **options)
    d_step_XNQL = torch.empty(2 * blocks, *sums_NQL, **options)
    d_reach_XNQL = torch.empty(blocks, *sums_NQL, **options)
    d_last_NQX = torch.empty(heads, plan.chunks, blocks * plan.block_p, **options)
    d_D_XQN = torch.empty(blocks, plan.chunks, heads, **options)
    d_scores_QKLL = token_gradients(
        *scan[:6], plan, out=(d_sum_XNQL[:blocks], d_step_XNQL[:blocks], d_D_XQN)
    )
    d_sums = (d_sum_XNQL[blocks:], d_reach_XNQL, d_step_XNQL[blocks:], d_last_NQX)
    _launch(scan, d_scores_QKLL, plan, parts, d_sums)
    if plan.splits > 1:
        _add(parts, (dB_TGS, dC_TGS), plan.splits)
    return PartialSums(
        d_sum_XNQL=d_sum_XNQL,
        d_last_sum_NQX=d_last_NQX,
        d_log_XNQL=d_sum_XNQL[:0],
        d_reach_XNQL=d_reach_XNQL,
        d_step_XNQL=d_step_XNQL,
        d_D_XXQN=d_D_XQN[None],
    )


def _launch(
    scan: ScanTensors,
    d_scores_QKLL: Tensor,
    plan: Plan,
    out: tuple[Tensor, Tensor],
    sums: tuple[Tensor, ...],
) -> None:
    """Launch one program for each chunk, part of the heads of a group, and C or B."""
    (tokens, heads, head_dim), (groups, state_dim) = scan.x_TNP.shape, scan.B_TGS.shape[1:]
    tiles = plan.tiles["gradients"]
    _state_gradients_kernel[(2 * groups * plan.splits, plan.chunks)](
        *scan[:4],
        *scan[5:],
        d_scores_QKLL,
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
def _state_gradients_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    dy_ptr,
    factors_ptr,
    states_ptr,
    d_states_ptr,
    d_scores_ptr,
    db_ptr,
    dc_ptr,
    d_sums_ptr,
    d_reach_ptr,
    d_steps_ptr,
    d_last_ptr,
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
    """Compute chunk c for part k of the heads of group g in programs (2 * (g * SPLITS + k) + side, c).

    Side 0 computes B5 and the gradient of C. Side 1 computes B4 and the gradient of B.
    """
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    COUNT: tl.constexpr = HEADS_PER_GROUP // SPLITS
    side = tl.program_id(0) % 2
    part = tl.program_id(0) // 2
    group = (part // SPLITS).to(tl.int64)
    split = part % SPLITS
    chunk = tl.program_id(1)
    start = chunk.to(tl.int64) * L
    p = tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    real = token < tokens - chunk * L
    s_mask = real[:, None] & (s < S)[None, :]
    plane = HEADS * chunks.to(tl.int64) * L
    b_ptr += group * b_group_stride
    c_ptr += group * c_group_stride
    if side == 0:
        a_ptr, other_ptr, a_stride, other_stride = c_ptr, b_ptr, c_stride, b_stride
        v_ptr, v_stride, v_head_stride = dy_ptr, dy_stride, dy_head_stride
        with_ptr, d_log_ptr = states_ptr, d_sums_ptr
        out_ptr, out_stride = dc_ptr + group * dc_group_stride, dc_stride
    else:
        a_ptr, other_ptr, a_stride, other_stride = b_ptr, c_ptr, b_stride, c_stride
        v_ptr, v_stride, v_head_stride = x_ptr, x_stride, x_head_stride
        with_ptr, d_log_ptr = d_states_ptr, d_reach_ptr + 1
        out_ptr, out_stride = db_ptr + group * db_group_stride, db_stride
    a = load_rows(a_ptr, start, a_stride, token, s, s_mask)
    gradient = tl.zeros((L, BLOCK_S), dtype=tl.float32)
    for number in tl.range(COUNT * BLOCKS, num_stages=STAGES):
        head = group * HEADS_PER_GROUP + split * COUNT + number // BLOCKS
        block = number % BLOCKS
        channel = block * BLOCK_P + p
        p_mask = real[:, None] & (channel < P)[None, :]
        row = head * chunks * L + start
        step = tl.load(factors_ptr + row + token)
        factor = tl.load(factors_ptr + (2 + side) * plane + row + token)
        factor *= tl.where(side == 0, 1.0, step)
        tile = (chunk * HEADS + head) * (P * S) + channel[:, None] * S + s[None, :]
        state_mask = (channel < P)[:, None] & (s < S)[None, :]
        state = tl.load(with_ptr + tile, mask=state_mask, other=0.0)
        values = load_rows(v_ptr + head * v_head_stride, start, v_stride, token, channel, p_mask)
        d_log, gradient = _with_state(a, state, values, factor, gradient)
        out = block * plane + row + token
        tl.store(d_log_ptr + out, d_log, mask=token + side < L)
        if side == 1:
            # All terms are zeros for a step of zero. The bound prevents 0 / 0.
            tl.store(d_steps_ptr + out, d_log / tl.maximum(step, 1e-30))
            last_at = ((head * chunks + chunk) * BLOCKS + block) * BLOCK_P + p
            keep = tl.load(factors_ptr + 2 * plane + row + (L - 1))
            _store_last(d_last_ptr + last_at, states_ptr + tile, state_mask, state, keep)
    other = load_rows(other_ptr, start, other_stride, token, s, s_mask)
    at = chunk.to(tl.int64) * (tl.num_programs(0) // 2) + part
    d_scores = tl.load(d_scores_ptr + (at * L + token[:, None]) * L + token[None, :])
    gradient = _with_tokens(d_scores, other, side, gradient)
    out_ptr += split * tokens.to(tl.int64) * (HEADS // HEADS_PER_GROUP) * S
    store_rows(out_ptr, start, out_stride, token, s, s_mask, gradient)


@triton.jit
def _store_last(d_last_ptr, states_ptr, mask, d_state, keep):
    """Store the gradient of the last sum of the chunk for each channel.

    The program of side 0 for the same heads reads these states at about the same time.
    """
    state = tl.load(states_ptr, mask=mask, other=0.0)
    tl.store(d_last_ptr, keep * tl.sum(d_state.to(tl.float32) * state.to(tl.float32), axis=1))


@triton.jit
def _with_tokens(d_scores, other, side, total):
    """Return ``total`` plus the gradient of C or B through the scores of a chunk."""
    if side == 0:
        total = tl.dot(tl.trans(d_scores), other, total)
    else:
        total = tl.dot(d_scores, other, total)
    return total


@triton.jit
def _with_state(a, state, values, factor, total):
    """Compute the terms of a chunk with a state: of C with the first one, or of B with the last one.

    Returns:
        the gradient of the logarithm of ``factor``, and ``total`` plus the gradient of ``a``.
    """
    scaled = values.to(tl.float32) * factor[:, None]
    # The product whose result is used here comes last: then both are done before the next copy of a
    # state begins. README.md has the reason.
    total = tl.dot(scaled.to(values.dtype), state, total)
    product = tl.dot(a, tl.trans(state))
    return tl.sum(product * scaled, axis=1), total


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
