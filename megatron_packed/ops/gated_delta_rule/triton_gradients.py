# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the third stage of backward: gradients of q, k and the gates.

The programs are independent. Each computes one chunk of one value head, without a loop over chunks or
heads. A compiler would move all addresses out of such a loop, and they do not fit in the registers
beside the sums. So each value head writes its own part of the gradients, and a last kernel adds the
parts of a key head in the order of the heads. Equal inputs give equal bits in each run. One kernel for q
and k would need more registers than there are. So the kernel of q computes all terms between two tokens,
and stores those that the kernel of k needs as matrices.

No product has a computed tile that is transposed, see `triton_states`. The kernel of q stores the
transposed tile, and the kernel of k loads it.

Letters: T tokens, G key heads, N value heads, K key head dimension, V value head dimension, S slots,
C columns of a chunk (64).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_gates import GateGradients
from megatron_packed.ops.gated_delta_rule.triton_scores import ChunkScores, pair_decay
from megatron_packed.ops.gated_delta_rule.triton_tiles import key_block, tiles_of
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, tile_of

_SUM_TOKENS = 16
"""Tokens of a program that adds the parts of heads."""


class BackwardTensors(NamedTuple):
    """Intermediate tensors of backward that the chunks' gradients depend on."""

    states_SNVK: Tensor
    """Transposed state at the start of the chunk of each slot."""
    d_states_SNVK: Tensor
    """Gradient of ``states_SNVK``."""
    u_TNV: Tensor
    """Vector that each token adds to the state along its key."""
    dv_TNV: Tensor
    """Gradient of v, in the dtype of the tiles."""


def chunk_gradients(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    do_TNV: Tensor,
    scores: ChunkScores,
    backward: BackwardTensors,
    tables: DeltaRuleTables,
    *,
    out: tuple[Tensor, Tensor],
    in_parts: bool = False,
) -> GateGradients:
    """Write the gradients of q and k to ``out``, and return those of the gates.

    Args:
        out: memory for the gradients of q and k, with stride 1 in the last dimension.
        in_parts: a state enters the first chunk, and one leaves the last chunk.
    """
    (tokens, heads, _), key_dim = v_TNV.shape, k_TGK.shape[2]
    states_SNVK, d_states_SNVK, u_TNV, dv_TNV = backward
    dtype, device = u_TNV.dtype, v_TNV.device
    gates_4NT = torch.empty(4, heads, tokens, dtype=torch.float32, device=device)
    part_TNK = torch.empty(tokens, heads, key_dim, dtype=dtype, device=device)
    pairs_2NTC = torch.empty(2, heads, tokens, CHUNK, dtype=dtype, device=device)
    factors = (scores.rstd_2GT, scores.gates_6NT)
    _launch(
        _query_kernel,
        "queries",
        (q_TGK, k_TGK, do_TNV, dv_TNV),
        (part_TNK, *factors, states_SNVK, u_TNV, gates_4NT, pairs_2NTC),
        tables,
        in_parts,
    )
    _add_heads(part_TNK, out=out[0])
    _launch(
        _key_kernel,
        "keys",
        (q_TGK, k_TGK, v_TNV, dv_TNV),
        (part_TNK, *factors, states_SNVK, d_states_SNVK, u_TNV, gates_4NT, pairs_2NTC),
        tables,
        in_parts,
    )
    _add_heads(part_TNK, out=out[1])
    return GateGradients(*gates_4NT)


def _launch(
    kernel: Any,
    name: str,
    strided: tuple[Tensor, ...],
    contiguous: tuple[Tensor, ...],
    tables: DeltaRuleTables,
    in_parts: bool,
) -> None:
    """Launch a kernel over all chunks and value heads; the programs of spare chunks end at once.

    Args:
        strided: (T, heads, channels) of q, k, a tensor of the value heads, and others; the kernel
            gets their strides, too.
        contiguous: first a tensor in the dtype of the tiles.
    """
    (tokens, key_heads, key_dim), (_, heads, value_dim) = strided[0].shape, strided[2].shape
    tiles = tiles_of(name, strided[0].dtype, contiguous[0].dtype, value_dim)
    kernel[(heads * tables.start_Q.shape[0],)](
        *strided,
        *contiguous,
        tables.document_Q,
        tables.start_Q,
        tables.end_Q,
        tokens,
        *(stride for x in strided for stride in x.stride()[:2]),
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        IN_PARTS=in_parts,
        **tiles.constants(heads, key_dim, value_dim),
    )


def _add_heads(part_TNK: Tensor, *, out: Tensor) -> None:
    """Write the gradient of q or k to ``out``: the sum of the parts of its value heads."""
    tokens, key_heads, key_dim = out.shape
    _add_heads_kernel[(triton.cdiv(tokens, _SUM_TOKENS), key_heads)](
        part_TNK,
        out,
        tokens,
        *out.stride()[:2],
        K=key_dim,
        BLOCK_K=key_block(key_dim),
        HEADS_PER_KEY=part_TNK.shape[1] // key_heads,
        BLOCK_T=_SUM_TOKENS,
    )


@triton.jit
def _chunk_of(
    chunk,
    rows,
    tokens,
    document_ptr,
    start_ptr,
    end_ptr,
    V: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Return a chunk's first token and length, and the value channels of the states before and after it.

    The first chunk of a document starts from a state of zeros, and the last has no next one. They have 0
    channels, unless the document is cut there. The last document ends at the last token, so a spare chunk
    starts after all tokens. No load depends on another: a program waits for its first loads.
    """
    start = tl.load(start_ptr + chunk).to(tl.int64)
    end = tl.load(end_ptr + chunk)
    document = tl.load(document_ptr + chunk)
    document_before = tl.load(document_ptr + chunk - 1, mask=chunk > 0, other=-1)
    document_after = tl.load(document_ptr + chunk + 1, mask=chunk + 1 < rows, other=-1)
    values = tl.where(document_before == document, V, 0)
    # Spare chunks follow the last token, and have the number of the last document.
    next_values = tl.where((document_after == document) & (end < tokens), V, 0)
    if IN_PARTS:
        values = tl.where(start == 0, V, values)
        next_values = tl.where(end == tokens, V, next_values)
    return start, (end - start).to(tl.int32), values, next_values


@triton.jit
def _tile_at(ptr, start, stride, head, head_stride, token, channel):
    """Return the addresses of the channels of a head, for the tokens from ``start`` on."""
    return ptr + (start * stride + head * head_stride) + tile_of(token, stride, channel)


# Strides are constants, so that the rows of a tile differ by constants and share one address.
@triton.jit(do_not_specialize=["tokens"])
def _query_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    dv_ptr,
    part_ptr,
    rstd_ptr,
    gates_ptr,
    states_ptr,
    u_ptr,
    d_gates_ptr,
    pairs_ptr,
    document_ptr,
    start_ptr,
    end_ptr,
    tokens,
    q_stride: tl.constexpr,
    q_head_stride: tl.constexpr,
    k_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    do_stride: tl.constexpr,
    do_head_stride: tl.constexpr,
    dv_stride: tl.constexpr,
    dv_head_stride: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Compute the part of dq of chunk i that value head n adds in program i * HEADS + n; see README.md.

    The program stores the terms between tokens for `_key_kernel`: (dO U^T * decay)^T and -(B + B^T), with
    the factors of the norms. It also stores the gradients of the gates that come from these terms.
    """
    head = tl.program_id(0) % HEADS
    chunk = tl.program_id(0) // HEADS
    rows = tl.num_programs(0) // HEADS
    start, length, values, _ = _chunk_of(
        chunk, rows, tokens, document_ptr, start_ptr, end_ptr, V, IN_PARTS
    )
    if start >= tokens:
        return
    dtype = u_ptr.dtype.element_ty
    key_head = head // HEADS_PER_KEY
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    own_value = tl.arange(0, BLOCK_V)
    real = token < length
    key_mask = mask_of(real, channel < K)
    below = token[:, None] > token[None, :]
    above = token[:, None] < token[None, :]
    q_tile = _tile_at(q_ptr, start, q_stride, key_head, q_head_stride, token, channel)
    k_tile = _tile_at(k_ptr, start, k_stride, key_head, k_head_stride, token, channel)
    do_tile = _tile_at(do_ptr, start, do_stride, head, do_head_stride, token, own_value)
    dv_tile = _tile_at(dv_ptr, start, dv_stride, head, dv_head_stride, token, own_value)
    u_tile = _tile_at(u_ptr, start, HEADS * V, head, V, token, own_value)
    state_tile = states_ptr + ((start // CHUNK) * HEADS + head) * (V * K)
    state_tile += tile_of(own_value, K, channel)
    gates = HEADS * tokens.to(tl.int64)
    row = head.to(tl.int64) * tokens + start
    gate = gates_ptr + row + token
    square = pairs_ptr + row * CHUNK + tile_of(token, CHUNK, token)
    rstd = rstd_ptr + key_head.to(tl.int64) * tokens + start + token

    # If q were loaded after the products, Triton would move the products to the layout of that load, for
    # the sums along their rows. So the kernel of k also loads k first. With the kernel of 30 November 2026 the
    # other order took 14 % longer on an H200.
    q = load(q_tile, key_mask).to(dtype)
    dq = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
    d_qk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    d_kk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        mask = mask_of(real, block + own_value < V)
        do = load(do_tile + block, mask).to(dtype)
        dv = load(dv_tile + block, mask).to(dtype)
        u = load(u_tile + block, mask)
        mask = mask_of(block + own_value < values, channel < K)
        state = load(state_tile + block * K, mask)
        dq = tl.dot(do, state, dq, input_precision=PRECISION)
        d_qk = tl.dot(do, tl.trans(u), d_qk, input_precision=PRECISION)
        d_kk = tl.dot(dv, tl.trans(u), d_kk, input_precision=PRECISION)
    # The state before the chunk.
    dq *= load(gate + 2 * gates, real)[:, None]
    d_reach = tl.sum(q.to(tl.float32) * dq, axis=1)

    # Terms between two tokens of the chunk, in the scores and in the triangular system.
    k = load(k_tile, key_mask).to(dtype)
    scaled_q = load(rstd, real) * K**-0.5
    rstd_k = load(rstd + (HEADS // HEADS_PER_KEY) * tokens.to(tl.int64), real)
    decay = pair_decay(load(gate, real), load(gate + gates, real))
    d_kk = tl.where(below, d_kk * decay * (-rstd_k[:, None] * rstd_k[None, :]), 0.0)
    low = d_kk.to(dtype)
    tl.store(square + gates * CHUNK, low + tl.trans(low), mask=real[:, None])
    d_qk = tl.where(above, 0.0, d_qk * decay * (scaled_q[:, None] * rstd_k[None, :]))
    low = d_qk.to(dtype)
    tl.store(square, tl.trans(low), mask=real[:, None])
    dq = tl.dot(low, k, dq, input_precision=PRECISION)
    part_tile = _tile_at(part_ptr, start, HEADS * K, head, K, token, channel)
    tl.store(part_tile, _across(dq, q, load(rstd, real)), mask=key_mask)

    pairs = d_kk * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    d_gate = d_gates_ptr + row + token
    tl.store(d_gate + 2 * gates, tl.sum(pairs, axis=1), mask=real)
    pairs += tl.where(below, d_qk * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
    dg = _sums_over_later_and_earlier(pairs, below, k, PRECISION)
    dg += tl.sum(tl.where(below, 0.0, d_reach[None, :]), axis=1)
    tl.store(d_gate, dg, mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dv_ptr,
    part_ptr,
    rstd_ptr,
    gates_ptr,
    states_ptr,
    d_states_ptr,
    u_ptr,
    d_gates_ptr,
    pairs_ptr,
    document_ptr,
    start_ptr,
    end_ptr,
    tokens,
    q_stride: tl.constexpr,
    q_head_stride: tl.constexpr,
    k_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    v_stride: tl.constexpr,
    v_head_stride: tl.constexpr,
    dv_stride: tl.constexpr,
    dv_head_stride: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Compute the part of dk of chunk i that value head n adds in program i * HEADS + n; see README.md."""
    head = tl.program_id(0) % HEADS
    chunk = tl.program_id(0) // HEADS
    rows = tl.num_programs(0) // HEADS
    start, length, values, next_values = _chunk_of(
        chunk, rows, tokens, document_ptr, start_ptr, end_ptr, V, IN_PARTS
    )
    if start >= tokens:
        return
    dtype = u_ptr.dtype.element_ty
    key_head = head // HEADS_PER_KEY
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    own_value = tl.arange(0, BLOCK_V)
    real = token < length
    key_mask = mask_of(real, channel < K)
    below = token[:, None] > token[None, :]
    q_tile = _tile_at(q_ptr, start, q_stride, key_head, q_head_stride, token, channel)
    k_tile = _tile_at(k_ptr, start, k_stride, key_head, k_head_stride, token, channel)
    v_tile = _tile_at(v_ptr, start, v_stride, head, v_head_stride, token, own_value)
    dv_tile = _tile_at(dv_ptr, start, dv_stride, head, dv_head_stride, token, own_value)
    u_tile = _tile_at(u_ptr, start, HEADS * V, head, V, token, own_value)
    slot = ((start // CHUNK) * HEADS + head) * (V * K)
    state_tile = states_ptr + slot + tile_of(own_value, K, channel)
    next_tile = d_states_ptr + slot + HEADS * V * K + tile_of(own_value, K, channel)
    gates = HEADS * tokens.to(tl.int64)
    row = head.to(tl.int64) * tokens + start
    gate = gates_ptr + row + token
    rstd = rstd_ptr + key_head.to(tl.int64) * tokens + start + token

    # The states before and after the chunk, and how one decays to the other.
    k = load(k_tile, key_mask).to(dtype)
    passed = tl.zeros((BLOCK_K,), dtype=tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
    d_write = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
    d_log_beta = tl.zeros((CHUNK,), dtype=tl.float32)
    for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        mask = mask_of(block + own_value < values, channel < K)
        state = load(state_tile + block * K, mask)
        mask = mask_of(block + own_value < next_values, channel < K)
        d_next = load(next_tile + block * K, mask)
        passed += tl.sum(state.to(tl.float32) * d_next.to(tl.float32), axis=0)
        mask = mask_of(real, block + own_value < V)
        dv = load(dv_tile + block, mask).to(dtype)
        v = load(v_tile + block, mask).to(dtype)
        u = load(u_tile + block, mask)
        d_log_beta += tl.sum(dv.to(tl.float32) * v.to(tl.float32), axis=1)
        dk = tl.dot(dv, state, dk, input_precision=PRECISION)
        d_write = tl.dot(u, d_next, d_write, input_precision=PRECISION)
    dk *= -load(gate + 3 * gates, real)[:, None]
    d_write *= load(gate + 4 * gates, real)[:, None]
    d_read = tl.sum(k.to(tl.float32) * dk, axis=1)
    d_rest = tl.sum(k.to(tl.float32) * d_write, axis=1)
    dk += d_write

    d_gate = d_gates_ptr + row + token
    tl.store(d_gate + 3 * gates, d_log_beta + d_read, mask=real)
    dg = tl.sum(tl.where(below, d_rest[None, :], d_read[None, :]), axis=1)
    # A chunk at the end of a part passes its state on, also if it is not whole.
    total = load(gates_ptr + row + (length - 1), next_values > 0)
    dg += tl.sum(passed, axis=0) * tl.exp(total)
    tl.store(d_gate + gates, dg, mask=real)

    # Terms between two tokens of the chunk.
    rstd_k = load(rstd + (HEADS // HEADS_PER_KEY) * tokens.to(tl.int64), real)
    square = pairs_ptr + row * CHUNK + tile_of(token, CHUNK, token)
    k = load(k_tile, key_mask).to(dtype)  # again, so that it needs no registers until here
    q = load(q_tile, key_mask).to(dtype)
    dk = tl.dot(load(square, real[:, None]), q, dk, input_precision=PRECISION)
    dk = tl.dot(load(square + gates * CHUNK, real[:, None]), k, dk, input_precision=PRECISION)
    part_tile = _tile_at(part_ptr, start, HEADS * K, head, K, token, channel)
    tl.store(part_tile, _across(dk, k, rstd_k), mask=key_mask)


@triton.jit(do_not_specialize=["tokens"])
def _add_heads_kernel(
    part_ptr,
    dx_ptr,
    tokens,
    dx_stride,
    dx_head_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Add the parts of the value heads of key head g for block b of tokens in program (b, g)."""
    key_head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_K)
    mask = mask_of(row < tokens, channel < K)
    part_row = row * tl.num_programs(1) + key_head
    part_tile = part_ptr + tile_of(part_row, HEADS_PER_KEY * K, channel)
    dx = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    for i in tl.static_range(HEADS_PER_KEY):
        dx += load_fp32(part_tile + i * K, mask)
    tl.store(dx_ptr + key_head * dx_head_stride + tile_of(row, dx_stride, channel), dx, mask=mask)


@triton.jit
def _across(gradient, vector, rstd):
    """Return a gradient without its component along the vector, which is lost in the norm.

    Each part loses its own before it is rounded. The rounding error of a large component would stay.
    """
    vector = vector.to(tl.float32)
    return gradient - vector * (rstd * rstd * tl.sum(vector * gradient, axis=1))[:, None]


@triton.jit
def _sums_over_later_and_earlier(pairs, below, like, PRECISION: tl.constexpr):
    """Return for each token t the sum of ``pairs`` (i, j) with j < t <= i.

    The decay of t is a factor of these pairs. The difference of the row and column sums of all pairs
    would be the same number, but it cancels.
    """
    ones = tl.where(below, 0.0, 1.0).to(like.dtype)
    later = tl.dot(ones, pairs.to(like.dtype), input_precision=PRECISION)
    return tl.sum(tl.where(below, later, 0.0), axis=1)
