# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels that carry the state along the pack, forward and backward.

The pack is divided into segments of several chunks. One program carries the state of one head, or of
a block of its channels, through one segment in fp32 registers. Segments run at the same time, so the
state that enters each segment comes first. One launch computes what each segment adds to a state of
zeros, and a second one passes these states from segment to segment.

Backward carries the gradient of the state from the last chunk to the first. This is the same
computation with dy and C in place of x and B, and with the factors of the outputs.

A pack in parts (`passed_states`) has one more level. The message of a part is the state that it reaches
from zeros. The messages of the other parts give the state that enters this one.

Letters: T tokens, N heads, P head dimension, G groups, S state, Q chunks, L tokens of a chunk, Z
segments, c parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.ssd.triton_loads import add_products, load_rows, load_tile, store_tile
from megatron_packed.ops.ssd.triton_tiles import Plan
from megatron_packed.ops.triton_loads import load, mask_of, tile_of

_PASSED_PER_PROGRAM = 256


class Added(NamedTuple):
    """State that each segment reaches from zeros, and factor on the state that enters it."""

    states_ZNPS: Tensor
    decays_ZN: Tensor
    reverse: bool


def added_by_segments(
    x_TNP: Tensor,
    B_TGS: Tensor,
    factors_4NQL: Tensor,
    plan: Plan,
    *,
    reverse: bool = False,
    precise: bool = False,
    last: bool = False,
) -> Added:
    """Compute what each segment adds to the state, in fp32.

    Args:
        x_TNP: x, or with ``reverse`` the gradient of y.
        B_TGS: B, or with ``reverse`` C.
        reverse: go from the last chunk to the first, and add to the gradient of the state.
        precise: also multiply what the rounding of x times its factor leaves. Gradients of decays are
            small differences of products with states, so they need it.
        last: the caller needs what the last segment adds, which no other segment needs.
    """
    _, heads, head_dim = x_TNP.shape
    shape = (plan.segments, heads, head_dim, B_TGS.shape[2])
    states_ZNPS = torch.empty(shape, dtype=torch.float32, device=x_TNP.device)
    decays_ZN = torch.empty(shape[:2], dtype=torch.float32, device=x_TNP.device)
    if last or plan.segments > 1:
        _walk(x_TNP, B_TGS, factors_4NQL, states_ZNPS, decays_ZN, None, plan, reverse, precise)
    return Added(states_ZNPS, decays_ZN, reverse)


def states_of_segments(added: Added, first_NPS: Tensor | None = None) -> Tensor:
    """Replace what each segment adds by the state that enters it, and return these states.

    Args:
        first_NPS: state that enters the first segment; None for zeros.
    Returns:
        ``(Z, N, P, S)`` fp32: the state at the start of each segment. With ``added.reverse`` the gradient
        of the state at its end.
    """
    states_ZNPS = added.states_ZNPS
    segments, heads, head_dim, state_dim = states_ZNPS.shape
    size = head_dim * state_dim
    _pass_kernel[(triton.cdiv(size, _PASSED_PER_PROGRAM), heads)](
        states_ZNPS,
        added.decays_ZN,
        first_NPS,
        segments,
        size,
        HEADS=heads,
        BLOCK=_PASSED_PER_PROGRAM,
        REVERSE=added.reverse,
        num_warps=2,
    )
    return states_ZNPS


def message_of_part(added: Added) -> Tensor:
    """Return ``(1, N P S + N)`` fp32: what all segments add to a state, and their factors on it."""
    states_ZNPS, decays_ZN, reverse = added
    size = states_ZNPS[0].numel()
    message_1X = states_ZNPS.new_empty(1, size + decays_ZN.shape[1])
    outs = message_1X[:, :size], message_1X[:, size:]
    _sum_up(states_ZNPS.flatten(1), decays_ZN, *outs, reverse)
    return message_1X


def state_from_parts(messages_kX: Tensor, shape: torch.Size, *, reverse: bool = False) -> Tensor:
    """Return the state ``(N, P, S)`` that enters a part, or with ``reverse`` the gradient at its end.

    Args:
        messages_kX: `message_of_part` of the k earlier parts, or with ``reverse`` of the later ones.
        shape: N, P and S.
    """
    state_NPS = messages_kX.new_empty(shape)
    states_kX, decays_kN = messages_kX.split([shape.numel(), shape[0]], dim=1)
    _sum_up(states_kX, decays_kN, state_NPS.view(1, -1), None, reverse)
    return state_NPS


def _sum_up(
    states_ZX: Tensor, decays_ZN: Tensor, state_1X: Tensor, decay_1N: Tensor | None, reverse: bool
) -> None:
    """Start from zeros; for each row in turn, multiply by its factors and add its state."""
    rows, heads = decays_ZN.shape
    first, direction = (-1, -1) if reverse else (0, 1)
    size = state_1X.shape[1] // heads
    _sum_up_kernel[(triton.cdiv(size, _PASSED_PER_PROGRAM), heads)](
        states_ZX[first],
        decays_ZN[first],
        state_1X,
        decay_1N,
        rows,
        size,
        direction * states_ZX.stride(0),
        direction * decays_ZN.stride(0),
        BLOCK=_PASSED_PER_PROGRAM,
        num_warps=2,
    )


def states_of_chunks(
    x_TNP: Tensor,
    B_TGS: Tensor,
    factors_4NQL: Tensor,
    states_ZNPS: Tensor,
    plan: Plan,
    *,
    reverse: bool = False,
) -> Tensor:
    """Return the state at the start of each chunk, or with ``reverse`` its gradient at the chunk's end.

    As `states_of_segments` with ``precise``.

    Args:
        states_ZNPS: result of `states_of_segments` for the other arguments.
    Returns:
        ``(Q, N, P, S)`` in the dtype of x.
    """
    shape = (plan.chunks, *states_ZNPS.shape[1:])
    states_QNPS = torch.empty(shape, dtype=x_TNP.dtype, device=x_TNP.device)
    _walk(x_TNP, B_TGS, factors_4NQL, states_ZNPS, None, states_QNPS, plan, reverse, True)
    return states_QNPS


def _walk(
    x_TNP: Tensor,
    B_TGS: Tensor,
    factors_4NQL: Tensor,
    states_ZNPS: Tensor,
    decays_ZN: Tensor | None,
    states_QNPS: Tensor | None,
    plan: Plan,
    reverse: bool,
    precise: bool,
) -> None:
    """Launch one program for each segment, head, block of channels and part of the state."""
    tokens, heads, _ = x_TNP.shape
    kernel = "sums" if states_QNPS is None else "states"
    tiles = plan.tiles[kernel]
    _walk_kernel[(heads * plan.blocks * tiles.parts, plan.segments)](
        x_TNP,
        B_TGS,
        factors_4NQL,
        states_ZNPS,
        decays_ZN,
        states_QNPS,
        tokens,
        plan.chunks,
        plan.chunks_per_segment,
        *x_TNP.stride()[:2],
        *B_TGS.stride()[:2],
        BLOCK_S=plan.block_s // tiles.parts,
        PARTS=tiles.parts,
        FULL=plan.full,
        REVERSE=reverse,
        CHUNKS=states_QNPS is not None,
        PRECISE=precise,
        **plan.constants(kernel, x_TNP, B_TGS),
    )


@triton.jit(do_not_specialize=["tokens", "chunks", "chunks_per_segment"])
def _walk_kernel(
    x_ptr,
    b_ptr,
    factors_ptr,
    states_ptr,
    decays_ptr,
    out_ptr,
    tokens,
    chunks,
    chunks_per_segment,
    x_stride,
    x_head_stride,
    b_stride,
    b_group_stride,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PARTS: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    L: tl.constexpr,
    REVERSE: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry a part of a state through segment z in program ((n * blocks + block) * PARTS + part, z).

    With CHUNKS the kernel reads the state that enters the segment and stores that of each chunk. Else it
    starts from zeros and stores the last state, and the decay of the segment.
    """
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    part = tl.program_id(0) % PARTS
    place = tl.program_id(0) // PARTS
    head = (place // BLOCKS).to(tl.int64)
    segment = tl.program_id(1)
    first = segment * chunks_per_segment
    count = tl.minimum(chunks_per_segment, chunks - first)
    p = (place % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    s = part * BLOCK_S + tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    state_tile = tile_of(p, S, s)
    state_mask = mask_of(p < P, s < S)
    x_tile = token[None, :] * x_stride + p[:, None]
    x_base = x_ptr + head * x_head_stride
    b_base = b_ptr + (head // HEADS_PER_GROUP) * b_group_stride
    plane = HEADS * chunks.to(tl.int64) * L
    factor_base = factors_ptr + head * chunks * L
    at = (segment * HEADS + head) * (P * S)
    decay = 1.0
    if CHUNKS:
        state = load(states_ptr + at + state_tile, state_mask)
    else:
        state = tl.zeros((BLOCK_P, BLOCK_S), dtype=tl.float32)
    chunk = first
    if REVERSE:
        chunk = first + count - 1
    # The factor of a chunk is that of its last token. It is read one step early.
    keep = tl.load(factor_base + 2 * plane + chunk * L + (L - 1))
    for done in tl.range(count, num_stages=STAGES):
        chunk = first + done
        following = tl.minimum(chunk + 1, chunks - 1)
        if REVERSE:
            chunk = first + count - 1 - done
            following = tl.maximum(chunk - 1, 0)
        start = chunk.to(tl.int64) * L
        real = token < tokens - chunk * L
        x_mask = mask_of(p < P, real)
        x = load_tile(x_base + start * x_stride, x_tile, x_mask, FULL)
        b = load_rows(b_base, start, b_stride, token, s, mask_of(real, s < S), FULL)
        if REVERSE:
            factor = tl.load(factor_base + 2 * plane + start + token)
        else:
            factor = tl.load(factor_base + 3 * plane + start + token)
            factor *= tl.load(factor_base + start + token)
        next_keep = tl.load(factor_base + 2 * plane + following * L + (L - 1))
        if CHUNKS:
            out = out_ptr + (chunk * HEADS + head) * (P * S)
            store_tile(out, state_tile, state, state_mask, FULL)
        decay *= keep
        state = add_products(state * keep, x.to(tl.float32) * factor[None, :], b, PRECISE)
        keep = next_keep
    if not CHUNKS:
        tl.store(states_ptr + at + state_tile, state, mask=state_mask)
        if tl.program_id(0) % (BLOCKS * PARTS) == 0:
            tl.store(decays_ptr + segment * HEADS + head, decay)


@triton.jit(do_not_specialize=["segments"])
def _pass_kernel(
    states_ptr,
    decays_ptr,
    first_ptr,
    segments,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replace the state that each segment adds by the state that enters it, for a block of one head."""
    head = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if first_ptr is not None:
        state = load(first_ptr + head * size + channel, channel < size)
    for done in tl.range(segments, num_stages=3):
        segment = done
        if REVERSE:
            segment = segments - 1 - done
        # No segment follows the last one, so its own state is not needed.
        row = segment.to(tl.int64) * HEADS + head
        needed = tl.where(done + 1 < segments, size, 0)
        added = load(states_ptr + row * size + channel, channel < needed)
        decay = load(decays_ptr + row, needed > 0)
        tl.store(states_ptr + row * size + channel, state, mask=channel < size)
        state = state * decay + added


@triton.jit(do_not_specialize=["rows", "state_step", "decay_step"])
def _sum_up_kernel(
    states_ptr,
    decays_ptr,
    state_ptr,
    decay_ptr,
    rows,
    size,
    state_step,
    decay_step,
    BLOCK: tl.constexpr,
):
    """Compute a block of one head in program (block, n). The steps lead from row to row."""
    head = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = head * size + channel
    states_ptr += at
    decays_ptr += head
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    product = 1.0
    for _ in tl.range(rows, num_stages=1):
        decay = tl.load(decays_ptr)
        state = state * decay + load(states_ptr, channel < size)
        product *= decay
        states_ptr += state_step
        decays_ptr += decay_step
    tl.store(state_ptr + at, state, mask=channel < size)
    if decay_ptr is not None:
        tl.store(decay_ptr + head, product, mask=tl.program_id(0) == 0)
