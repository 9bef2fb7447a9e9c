# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel of the scan: a program carries the state through a segment and writes the outputs.

Forward computes y. Backward computes the gradient of x by the same kernel from the last chunk to the
first, because the adjoint of the scan is a scan. There dy, C and B take the places of x, B and C. It also
stores the gradient of the state at the end of each chunk, for the gradients of B and the decays.

The state is transposed, (P, S), and so are the tiles of x and y. In this orientation each product's left
operand is a value in registers or a loaded tile. No computed tile is transposed: Triton 3.4 to 3.7.0
miscompile products with such a left operand on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_packed.ops.ssd.triton_loads import (
    add_products,
    load_factors,
    load_rows,
    load_tile,
    store_tile,
)
from megatron_packed.ops.ssd.triton_tiles import Plan
from megatron_packed.ops.triton_loads import mask_of, tile_of


def outputs(
    x_TNP: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    D_N: Tensor,
    first_QL: Tensor,
    factors_4NQL: Tensor,
    states_ZNPS: Tensor,
    plan: Plan,
) -> Tensor:
    """Return y, ``(T, N, P)`` contiguous.

    Args:
        states_ZNPS: the state at the start of each segment.
    """
    y_TNP = torch.empty(x_TNP.shape, dtype=x_TNP.dtype, device=x_TNP.device)
    tensors = (x_TNP, B_TGS, C_TGS, D_N, first_QL, factors_4NQL, states_ZNPS)
    _scan(tensors, y_TNP, None, plan, reverse=False)
    return y_TNP


def input_gradients(
    dy_TNP: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    D_N: Tensor,
    first_QL: Tensor,
    factors_4NQL: Tensor,
    d_states_ZNPS: Tensor,
    plan: Plan,
    *,
    out: Tensor,
) -> Tensor:
    """Write the gradient of x to ``out``, and return the gradients of the states.

    Args:
        d_states_ZNPS: the gradient of the state at the end of each segment.
        out: ``(T, N, P)`` with stride 1 in the last dimension.
    Returns:
        ``(Q, N, P, S)`` in the dtype of dy: the gradient of the state at the end of each chunk.
    """
    shape = (plan.chunks, *d_states_ZNPS.shape[1:])
    d_states_QNPS = torch.empty(shape, dtype=dy_TNP.dtype, device=dy_TNP.device)
    tensors = (dy_TNP, C_TGS, B_TGS, D_N, first_QL, factors_4NQL, d_states_ZNPS)
    _scan(tensors, out, d_states_QNPS, plan, reverse=True)
    return d_states_QNPS


def _scan(
    tensors: tuple[Tensor | TensorDescriptor, ...],
    out_TNP: Tensor,
    states_QNPS: Tensor | None,
    plan: Plan,
    *,
    reverse: bool,
) -> None:
    """Launch one program for each segment, head and block of channels."""
    x_TNP, B_TGS, C_TGS = tensors[:3]
    tokens, heads, _ = x_TNP.shape
    kernel = "inputs" if reverse else "outputs"
    described = plan.tiles[kernel].descriptors
    uses_descriptors = described and plan.full and all(map(_copied_by_engine, tensors[:3]))
    if uses_descriptors:
        columns = (plan.block_p, plan.block_s, plan.block_s)
        descriptors = [_descriptor(x, plan.length, n) for x, n in zip(tensors[:3], columns)]
        tensors = (*descriptors, *tensors[3:])
    _scan_kernel[(heads * plan.blocks, plan.segments)](
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
        BLOCK_S=plan.block_s,
        DESCRIBED=uses_descriptors,
        REVERSE=reverse,
        **plan.constants(kernel, x_TNP, B_TGS),
    )


def _copied_by_engine(x: Tensor) -> bool:
    """Return whether the addresses of all rows are multiples of 16 bytes."""
    row = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and row % 16 == 0 and row > 0


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe the rows of ``x``, one for each token, and its tiles."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], [rows, columns])


@triton.jit(do_not_specialize=["tokens", "chunks", "chunks_per_segment"])
def _scan_kernel(
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
    DESCRIBED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    L: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute y of segment z in program (n * blocks + block, z); see README.md, F1 to F4.

    With REVERSE, x, B, C and y are dy, C, B and dx, and the state is its gradient (B1 to B3).
    """
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    group = head // HEADS_PER_GROUP
    segment = tl.program_id(1)
    first = segment * chunks_per_segment
    count = tl.minimum(chunks_per_segment, chunks - first)
    p_first = (tl.program_id(0) % BLOCKS) * BLOCK_P
    p = p_first + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    token = tl.arange(0, L)
    plane = HEADS * chunks.to(tl.int64) * L
    factor_base = factors_ptr + head * chunks * L
    skip = tl.load(d_ptr + head).to(tl.float32)
    at = (segment * HEADS + head) * (P * S)
    state_tile = tile_of(p, S, s)
    state_mask = mask_of(p < P, s < S)
    state = load_tile(entering_ptr + at, state_tile, state_mask, DESCRIBED)
    b_first = group * b_group_stride
    c_first = group * c_group_stride
    x_first = head * x_head_stride + p_first
    y_base = y_ptr + head * y_head_stride
    for done in tl.range(count, num_stages=STAGES):
        chunk = first + done
        if REVERSE:
            chunk = first + count - 1 - done
        start = chunk.to(tl.int64) * L
        real = token < tokens - chunk * L
        step, total, enter, leave, keep = _factors(factor_base + start, plane, token, L, REVERSE)
        if REVERSE:
            out = states_ptr + (chunk * HEADS + head) * (P * S)
            store_tile(out, state_tile, state, state_mask, DESCRIBED)
        # A tile is read from shared memory where it is loaded here, so late loads save registers.
        tile_mask = mask_of(real, s < S)
        c = _rows(c_ptr, c_first, start, c_stride, token, s, tile_mask, DESCRIBED)
        y = tl.dot(state.to(c.dtype), tl.trans(c))
        b = _rows(b_ptr, b_first, start, b_stride, token, s, tile_mask, DESCRIBED)
        scores = tl.dot(b, tl.trans(c))
        beginning = tl.load(first_ptr + start + token)
        scores = _decayed(scores, total, step, token, beginning, REVERSE)
        y *= enter[None, :]
        mask = mask_of(real, p < P)
        x = _rows(x_ptr, x_first, start, x_stride, token, p - p_first, mask, DESCRIBED)
        y = tl.dot(tl.trans(x), scores.to(x.dtype), y)
        wide = tl.trans(x).to(tl.float32)
        y += skip * wide
        y_tile = token[None, :] * y_stride + p[:, None]
        store_tile(y_base + start * y_stride, y_tile, y, tl.trans(mask), DESCRIBED)
        # Only backward needs precise states; see `states_of_segments`.
        scaled = wide * leave[None, :]
        state = add_products(state * keep, scaled, b, REVERSE)


@triton.jit
def _factors(ptr, plane, token, L: tl.constexpr, REVERSE: tl.constexpr):
    """Load steps, sums and the factors of y, of x, and of the state, which is that of the last token."""
    step, total, enter, rest = load_factors(ptr, plane, token)
    keep = tl.load(ptr + 2 * plane + (L - 1))
    leave = rest * step
    if REVERSE:
        enter, leave = leave, enter
    return step, total, enter, leave, keep


@triton.jit
def _rows(ptr, first, start, stride, token, column, mask, DESCRIBED: tl.constexpr):
    """Load columns of a chunk's rows from column ``first``, by a descriptor or as `load_rows`."""
    if DESCRIBED:
        value = ptr.load([start.to(tl.int32), first.to(tl.int32)])
    else:
        value = load_rows(ptr + first, start, stride, token, column, mask)
    return value


@triton.jit
def _decayed(scores, total, step, token, beginning, REVERSE: tl.constexpr):
    """Return scores times decay and step, and zeros between documents and for later tokens.

    Rows are the tokens of x and B, columns those of y and C; with REVERSE rows are the later ones.
    """
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
    return scores * tl.exp2(tl.where(pairs, logs, -float("inf")))
