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
from megatron_packed.ops.ssd.triton_loads import load_rows, load_tile, store_rows
from megatron_packed.ops.ssd.triton_tiles import Plan
from megatron_packed.ops.ssd.triton_token_gradients import token_gradients
from megatron_packed.ops.triton_loads import load, mask_of, tile_of

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
    state_blocks = blocks * plan.tiles["gradients"].parts
    sums_NQL = (heads, plan.chunks, plan.length)
    # First those of the products between tokens, then those of the products with states.
    d_sum_XNQL = torch.empty(blocks + state_blocks, *sums_NQL, **options)
    d_step_XNQL = torch.empty(blocks + state_blocks, *sums_NQL, **options)
    d_reach_XNQL = torch.empty(state_blocks, *sums_NQL, **options)
    d_last_NQX = torch.empty(heads, plan.chunks, state_blocks * plan.block_p, **options)
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
    """Launch one program for each chunk, part of the heads of a group, part of the state, and C or B."""
    tokens, groups = len(scan.x_TNP), scan.B_TGS.shape[1]
    tiles = plan.tiles["gradients"]
    _state_gradients_kernel[(2 * tiles.parts * groups * plan.splits, plan.chunks)](
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
        BLOCK_S=plan.block_s // tiles.parts,
        PARTS=tiles.parts,
        SPLITS=plan.splits,
        FULL=plan.full,
        **plan.constants("gradients", scan.x_TNP, scan.B_TGS),
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
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    L: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute chunk c in programs (2 * ((g * SPLITS + k) * PARTS + part) + side, c).

    They take part k of the heads of group g and one part of the state. Side 0 computes B5 and the gradient
    of C, side 1 B4 and the gradient of B.
    """
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    place = tl.program_id(0) // 2
    part = place % PARTS
    split = place // PARTS % SPLITS
    group = (place // (PARTS * SPLITS)).to(tl.int64)
    chunk = tl.program_id(1)
    plane = HEADS * chunks.to(tl.int64) * L
    b_ptr += group * b_group_stride
    c_ptr += group * c_group_stride
    programs = tl.num_programs(0) // (2 * PARTS)
    d_scores_ptr += (chunk.to(tl.int64) * programs + place // PARTS) * (L * L)
    skip = split * tokens.to(tl.int64) * (HEADS // HEADS_PER_GROUP) * S
    d_sums_ptr += part * BLOCKS * plane
    d_reach_ptr += part * BLOCKS * plane
    d_steps_ptr += part * BLOCKS * plane
    if tl.program_id(0) % 2 == 0:
        _gradient(
            *(c_ptr, c_stride, b_ptr, b_stride, dy_ptr, dy_stride, dy_head_stride),
            *(factors_ptr, states_ptr, states_ptr, d_scores_ptr),
            *(dc_ptr + skip + group * dc_group_stride, dc_stride),
            *(d_sums_ptr, d_steps_ptr, d_last_ptr, tokens, chunks, group, split, chunk, part),
            *(P, S, BLOCK_P, BLOCK_S, PARTS, HEADS, HEADS_PER_GROUP, SPLITS, L, FULL, STAGES, 0),
        )
    else:
        _gradient(
            *(b_ptr, b_stride, c_ptr, c_stride, x_ptr, x_stride, x_head_stride),
            *(factors_ptr, d_states_ptr, states_ptr, d_scores_ptr),
            *(db_ptr + skip + group * db_group_stride, db_stride),
            *(d_reach_ptr + 1, d_steps_ptr, d_last_ptr, tokens, chunks, group, split, chunk, part),
            *(P, S, BLOCK_P, BLOCK_S, PARTS, HEADS, HEADS_PER_GROUP, SPLITS, L, FULL, STAGES, 1),
        )


@triton.jit
def _gradient(
    a_ptr,
    a_stride,
    other_ptr,
    other_stride,
    v_ptr,
    v_stride,
    v_head_stride,
    factors_ptr,
    with_ptr,
    states_ptr,
    d_scores_ptr,
    out_ptr,
    out_stride,
    d_log_ptr,
    d_steps_ptr,
    d_last_ptr,
    tokens,
    chunks,
    group,
    split,
    chunk,
    part,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    L: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Compute one side: a, with, v are C, states, dy for side 0, and B, their gradients, x for side 1."""
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    COUNT: tl.constexpr = HEADS_PER_GROUP // SPLITS
    start = chunk.to(tl.int64) * L
    p = tl.arange(0, BLOCK_P)
    s = part * BLOCK_S + tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    real = token < tokens - chunk * L
    s_mask = mask_of(real, s < S)
    plane = HEADS * chunks.to(tl.int64) * L
    a = load_rows(a_ptr, start, a_stride, token, s, s_mask, FULL)
    gradient = tl.zeros((L, BLOCK_S), dtype=tl.float32)
    v_ptr += start * v_stride
    v_tile = tile_of(token, v_stride, p)
    state_tile = tile_of(p, S, s)
    for number in tl.range(COUNT * BLOCKS, num_stages=STAGES):
        head = group * HEADS_PER_GROUP + split * COUNT + number // BLOCKS
        block = number % BLOCKS
        channel = block * BLOCK_P + p
        p_mask = mask_of(real, channel < P)
        row = head * chunks * L + start
        factor = tl.load(factors_ptr + (2 + SIDE) * plane + row + token)
        if SIDE == 1:
            step = tl.load(factors_ptr + row + token)
            factor *= step
        at = (chunk * HEADS + head) * (P * S) + block * (BLOCK_P * S)
        state_mask = mask_of(channel < P, s < S)
        state = load_tile(with_ptr + at, state_tile, state_mask, FULL)
        values = load_tile(v_ptr + head * v_head_stride + block * BLOCK_P, v_tile, p_mask, FULL)
        scaled = (values.to(tl.float32) * factor[:, None]).to(values.dtype)
        # The last product of a turn is one whose result it uses; README.md has the reason.
        gradient = tl.dot(scaled, state, gradient)
        if SIDE == 1:
            entering = load_tile(states_ptr + at, state_tile, state_mask, FULL)
            squares = tl.dot(entering, tl.trans(state))
        product = tl.dot(a, tl.trans(state))
        d_log = factor * tl.sum(product * values.to(tl.float32), axis=1)
        out = block * plane + row + token
        tl.store(d_log_ptr + out, d_log, mask=token + SIDE < L)
        if SIDE == 1:
            # All terms are zeros for a step of zero. The bound prevents 0 / 0.
            tl.store(d_steps_ptr + out, d_log / tl.maximum(step, 1e-30))
            keep = tl.load(factors_ptr + 2 * plane + row + (L - 1))
            last_at = (((head * chunks + chunk) * PARTS + part) * BLOCKS + block) * BLOCK_P + p
            diagonal = tl.where(p[:, None] == p[None, :], squares, 0.0)
            tl.store(d_last_ptr + last_at, keep * tl.sum(diagonal, axis=1))
    other = load_rows(other_ptr, start, other_stride, token, s, s_mask, FULL)
    d_scores = tl.load(d_scores_ptr + (tile_of(token, L, token)))
    if SIDE == 0:
        d_scores = tl.trans(d_scores)
    gradient = tl.dot(d_scores, other, gradient)
    store_rows(out_ptr, start, out_stride, token, s, s_mask, gradient)


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
    mask = mask_of(t < tokens, column < COLUMNS)
    at = tile_of(t, COLUMNS, column)
    plane = tokens.to(tl.int64) * COLUMNS
    total = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    if tl.program_id(2) == 0:
        for split in tl.static_range(SPLITS):
            total += load(db_parts_ptr + split * plane + at, mask)
        to = tile_of(t, db_stride, column // S * db_group_stride + column % S)
        tl.store(db_ptr + to, total, mask=mask)
    else:
        for split in tl.static_range(SPLITS):
            total += load(dc_parts_ptr + split * plane + at, mask)
        to = tile_of(t, dc_stride, column // S * dc_group_stride + column % S)
        tl.store(dc_ptr + to, total, mask=mask)
