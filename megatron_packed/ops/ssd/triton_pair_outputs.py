# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel of the scan for two heads of a group in one program; see `triton_outputs`.

The heads share the loads of B and C and the products between them. The rows of a tile are the channels of
both heads, so that each of two warp groups multiplies the 64 rows of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.triton_loads import add_products, load_rows
from megatron_packed.ops.ssd.triton_tiles import Plan


def in_pairs(heads: int, groups: int, plan: Plan) -> bool:
    """Return True if the heads of a group form pairs, and a head has one block of channels."""
    return heads // groups % 2 == 0 and plan.blocks == 1 and plan.block_s <= 128


def scan_pairs(
    tensors: tuple[Tensor, ...],
    out_TNP: Tensor,
    states_QNPS: Tensor | None,
    plan: Plan,
    *,
    reverse: bool,
) -> None:
    """Launch one program for each segment and pair of heads; see `triton_outputs`."""
    x_TNP, B_TGS, C_TGS = tensors[:3]
    (tokens, heads, head_dim), (groups, state_dim) = x_TNP.shape, B_TGS.shape[1:]
    tiles = plan.tiles["pair inputs" if reverse else "pair outputs"]
    _pair_kernel[(heads // 2, plan.segments)](
        *tensors,
        out_TNP,
        states_QNPS,
        tokens,
        plan.chunks,
        plan.chunks_per_segment,
        *x_TNP.stride()[:2],
        *B_TGS.stride()[:2],
        *C_TGS.stride()[:2],
        *out_TNP.stride()[:2],
        P=head_dim,
        S=state_dim,
        BLOCK_P=plan.block_p,
        BLOCK_S=plan.block_s,
        HEADS=heads,
        HEADS_PER_GROUP=heads // groups,
        L=plan.length,
        REVERSE=reverse,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
    )


@triton.jit(do_not_specialize=["tokens", "chunks", "chunks_per_segment"])
def _pair_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    first_ptr,
    factors_ptr,
    entering_ptr,
    y_ptr,
    states_ptr,
    tokens,
    chunks,
    chunks_per_segment,
    x_stride,
    x_head_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    y_stride,
    y_head_stride,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    L: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute y of segment z for heads 2 k and 2 k + 1 in program (k, z)."""
    head = tl.program_id(0).to(tl.int64) * 2
    group = head // HEADS_PER_GROUP
    segment = tl.program_id(1)
    first = segment * chunks_per_segment
    count = tl.minimum(chunks_per_segment, chunks - first)
    row = tl.arange(0, 2 * BLOCK_P)
    p = row % BLOCK_P
    number = row // BLOCK_P
    upper = number[:, None] == 1
    s = tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    plane = HEADS * chunks.to(tl.int64) * L
    per_head = chunks.to(tl.int64) * L
    factor_base = factors_ptr + head * per_head
    skip = tl.load(d_ptr + head + number).to(tl.float32)[:, None]
    state_mask = (p < P)[:, None] & (s < S)[None, :]
    state_tile = (number * (P * S) + p * S)[:, None] + s[None, :]
    at = (segment * HEADS + head) * (P * S)
    state = tl.load(entering_ptr + at + state_tile, mask=state_mask, other=0.0)
    x_column = number * x_head_stride + p
    y_tile = token[None, :] * y_stride + (number * y_head_stride + p)[:, None]
    for done in tl.range(count, num_stages=STAGES):
        chunk = first + done
        if REVERSE:
            chunk = first + count - 1 - done
        start = chunk.to(tl.int64) * L
        real = token < tokens - chunk * L
        x_mask = real[:, None] & (p < P)[None, :]
        s_mask = real[:, None] & (s < S)[None, :]
        factors = factor_base + start
        beginning = tl.load(first_ptr + start + token)
        # The factor of the state is that of the last token.
        keep = tl.load(factors + 2 * plane + (L - 1) + number * per_head)
        c = load_rows(c_ptr + group * c_group_stride, start, c_stride, token, s, s_mask)
        low = state.to(c.dtype)
        if REVERSE:
            out = states_ptr + (chunk * HEADS + head) * (P * S) + state_tile
            tl.store(out, low, mask=state_mask)
        y = tl.dot(low, tl.trans(c))
        b = load_rows(b_ptr + group * b_group_stride, start, b_stride, token, s, s_mask)
        scores = tl.dot(b, tl.trans(c))
        x = load_rows(x_ptr + head * x_head_stride, start, x_stride, token, x_column, x_mask)
        # One head after the other, so that the tiles of one head are in registers at a time.
        y_0 = tl.dot(tl.trans(x), _decayed(factors, plane, scores, token, beginning, REVERSE, x))
        enter = _entering(factors, plane, token, REVERSE)
        y = tl.where(upper, y, y * enter[None, :] + y_0)
        factors_1 = factors + per_head
        y_1 = tl.dot(tl.trans(x), _decayed(factors_1, plane, scores, token, beginning, REVERSE, x))
        enter = _entering(factors_1, plane, token, REVERSE)
        y = tl.where(upper, y * enter[None, :] + y_1, y)
        wide = tl.trans(x).to(tl.float32)
        y += skip * wide
        y_base = y_ptr + (start * y_stride + head * y_head_stride)
        tl.store(y_base + y_tile, y.to(y_ptr.dtype.element_ty), mask=tl.trans(x_mask))
        leave_0 = _entering(factors, plane, token, not REVERSE)
        leave_1 = _entering(factors_1, plane, token, not REVERSE)
        scaled = wide * tl.where(upper, leave_1[None, :], leave_0[None, :])
        # Only backward needs precise states; see `states_of_segments`.
        state = add_products(state * keep[:, None], scaled, b, REVERSE)


@triton.jit
def _entering(factors, plane, token, REVERSE: tl.constexpr):
    """Load the factors of the entering state in y; with REVERSE those of the tokens in the leaving state."""
    if REVERSE:
        return tl.load(factors + 3 * plane + token) * tl.load(factors + token)
    else:
        return tl.load(factors + 2 * plane + token)


@triton.jit
def _decayed(factors, plane, scores, token, beginning, REVERSE: tl.constexpr, x):
    """Return scores times decay and step of one head in the dtype of x.

    There are zeros between documents and for later tokens.
    """
    step = tl.load(factors + token)
    total = tl.load(factors + plane + token)
    # Token i has a pair with token j if beginning_i <= j <= i. An unsigned comparison tests both.
    age = (token - beginning).to(tl.uint32)
    if REVERSE:
        pairs = (token[None, :] - beginning[:, None]).to(tl.uint32) <= age[:, None]
        logs = total[:, None] - total[None, :]
        scores *= step[None, :]
    else:
        pairs = (token[:, None] - beginning[None, :]).to(tl.uint32) <= age[None, :]
        logs = total[None, :] - total[:, None]
        scores *= step[:, None]
    return (scores * tl.exp2(tl.where(pairs, logs, -float("inf")))).to(x.dtype)
