# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for a part of a pack: the messages that its states and their gradients become.

The kernels walk through one document as those of `triton_states` do, and store only the last result.
Forward walks through the last document of the part: rows of values start from zeros, and rows of the
matrix from ones on the diagonal, with values of zero. Backward walks through the first document, from a
gradient of zeros after it.

Letters: T tokens, N value heads, K key head dimension, V value head dimension, X numbers of a message.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.passed_states import StateSizes
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_scores import ChunkScores
from megatron_packed.ops.gated_delta_rule.triton_tiles import key_block, tiles_of
from megatron_packed.ops.triton_loads import load, mask_of, tile_of


def message_of_part(
    k_TGK: Tensor,
    v_TNV: Tensor,
    scores: ChunkScores,
    cu_seqlens: Tensor,
    tables: DeltaRuleTables,
    inside_1: Tensor,
) -> Tensor:
    """Return the forward message of a part, ``(1, N (V + K) K)`` fp32; see `passed_states`.

    Args:
        inside_1: result of `passed_states.begins_inside`.
    """
    sizes = sizes_of(k_TGK, v_TNV)
    tiles = tiles_of("states", k_TGK.dtype, scores.matrices_2NTC.dtype, sizes.value_dim)
    blocks = sum(triton.cdiv(rows, tiles.values) for rows in (sizes.value_dim, sizes.key_dim))
    message_1X = new_message(sizes, v_TNV.device)
    _leaving_kernel[(sizes.heads * blocks,)](
        k_TGK,
        v_TNV,
        scores.gates_5NT,
        scores.matrices_2NTC,
        cu_seqlens,
        tables.document_Q,
        tables.first_chunk_D,
        tables.num_chunks_D,
        inside_1,
        message_1X,
        v_TNV.shape[0],
        tables.num_chunks_D.shape[0],
        *(stride for x in (k_TGK, v_TNV) for stride in x.stride()[:2]),
        K=sizes.key_dim,
        V=sizes.value_dim,
        BLOCK_K=key_block(sizes.key_dim),
        BLOCK_V=tiles.values,
        HEADS=sizes.heads,
        HEADS_PER_KEY=sizes.heads // k_TGK.shape[1],
        CHUNK=CHUNK,
        STAGES=tiles.stages,
        PRECISION=tiles.precision,
        num_warps=tiles.warps,
    )
    return message_1X


def message_back(
    q_TGK: Tensor,
    k_TGK: Tensor,
    do_TNV: Tensor,
    scores: ChunkScores,
    cu_seqlens: Tensor,
    tables: DeltaRuleTables,
    inside_1: Tensor,
    map_NKK: Tensor,
) -> Tensor:
    """Return the backward message of a part: the gradient of the state that enters it, and its matrix.

    Args:
        inside_1: result of `passed_states.begins_inside`.
        map_NKK: transposed matrices of the forward message.
    """
    sizes = sizes_of(k_TGK, do_TNV)
    tiles = tiles_of("back", k_TGK.dtype, scores.matrices_2NTC.dtype, sizes.value_dim)
    message_1X = new_message(sizes, do_TNV.device)
    message_1X.view(sizes.heads, sizes.rows, -1)[:, sizes.value_dim :] = map_NKK
    _entering_kernel[(sizes.heads * triton.cdiv(sizes.value_dim, tiles.values),)](
        q_TGK,
        k_TGK,
        do_TNV,
        scores.gates_5NT,
        scores.matrices_2NTC,
        cu_seqlens,
        tables.document_Q,
        inside_1,
        message_1X,
        do_TNV.shape[0],
        *(stride for x in (q_TGK, k_TGK, do_TNV) for stride in x.stride()[:2]),
        K=sizes.key_dim,
        V=sizes.value_dim,
        BLOCK_K=key_block(sizes.key_dim),
        BLOCK_V=tiles.values,
        HEADS=sizes.heads,
        HEADS_PER_KEY=sizes.heads // k_TGK.shape[1],
        CHUNK=CHUNK,
        STAGES=tiles.stages,
        PRECISION=tiles.precision,
        num_warps=tiles.warps,
    )
    return message_1X


def sizes_of(k_TGK: Tensor, v_TNV: Tensor) -> StateSizes:
    """Return the sizes of the states of a part."""
    return StateSizes(v_TNV.shape[1], k_TGK.shape[2], v_TNV.shape[2])


def new_message(sizes: StateSizes, device: torch.device) -> Tensor:
    """Return uninitialised memory for a message."""
    numbers = sizes.heads * sizes.rows * sizes.key_dim
    return torch.empty(1, numbers, dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["tokens", "documents"])
def _leaving_kernel(
    k_ptr,
    v_ptr,
    gates_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    document_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    inside_ptr,
    message_ptr,
    tokens,
    documents,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk through the last document with a block of rows of values, or of the matrix."""
    VALUE_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = VALUE_BLOCKS + (K + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    of_values = block < VALUE_BLOCKS
    value = tl.where(of_values, block, block - VALUE_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    v_tile = token[None, :] * v_stride + value[:, None]
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    document = tl.load(document_ptr + chunks - 1)
    first = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + document + 1) - first).to(tl.int32)
    # Without a state that enters this document the matrix stays zero, and no chunk is computed.
    entered = (first == 0) & (tl.load(inside_ptr) != 0)
    ones = tl.where(entered & (block >= VALUE_BLOCKS), K, 0)
    length = tl.where(of_values | entered, length, 0)
    values = tl.where(of_values, V, 0)
    state = tl.where((value[:, None] == channel[None, :]) & (value < ones)[:, None], 1.0, 0.0)
    for chunk in tl.range((length + CHUNK - 1) // CHUNK, num_stages=STAGES):
        start = first + chunk * CHUNK
        row = head.to(tl.int64) * tokens + start
        real = token < length - chunk * CHUNK
        key_mask = mask_of(real, channel < K)
        k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
        v_base = v_ptr + (start * v_stride + head * v_head_stride)
        k = load(k_base + k_tile, key_mask).to(dtype)
        v = load(v_base + v_tile, mask_of(value < values, real)).to(dtype)
        solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
        whole = tl.minimum(length - chunk * CHUNK, CHUNK)
        total = tl.load(gates_ptr + row + whole - 1)
        read = tl.dot(state.to(dtype), tl.trans(k), input_precision=PRECISION)
        factor = load(gates_ptr + 3 * gates + row + token, real)
        read = v.to(tl.float32) - read * factor[None, :]
        u = tl.dot(read.to(dtype), tl.trans(solve), input_precision=PRECISION)
        u *= load(gates_ptr + 4 * gates + row + token, real)[None, :]
        state *= tl.exp(total)
        state = tl.dot(u.to(dtype), k, state, input_precision=PRECISION)
    out = message_ptr + head * ((V + K) * K) + tl.where(of_values, 0, V * K)
    stored = tl.where(of_values, V, K)
    tl.store(out + tile_of(value, K, channel), state, mask=mask_of(value < stored, channel < K))


@triton.jit(do_not_specialize=["tokens"])
def _entering_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    gates_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    document_ptr,
    inside_ptr,
    message_ptr,
    tokens,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    do_stride,
    do_head_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk backward through the first document if a state enters it; else store zeros."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    key_head = head // HEADS_PER_KEY
    dtype = scores_ptr.dtype.element_ty
    gates = HEADS * tokens.to(tl.int64)
    value = (tl.program_id(0) % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    square = tile_of(token, CHUNK, token)
    k_tile = tile_of(token, k_stride, channel)
    q_tile = tile_of(token, q_stride, channel)
    do_tile = token[None, :] * do_stride + value[:, None]
    length = tl.load(cu_seqlens_ptr + tl.load(document_ptr) + 1)
    length = tl.where(tl.load(inside_ptr) != 0, length, 0)
    d_state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    chunks = (length + CHUNK - 1) // CHUNK
    for done in tl.range(chunks, num_stages=STAGES):
        start = (chunks - 1 - done).to(tl.int64) * CHUNK
        row = head.to(tl.int64) * tokens + start
        real = token < length - start
        key_mask = mask_of(real, channel < K)
        q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
        k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
        do_base = do_ptr + (start * do_stride + head * do_head_stride)
        q = load(q_base + q_tile, key_mask).to(dtype)
        k = load(k_base + k_tile, key_mask).to(dtype)
        do = load(do_base + do_tile, mask_of(value < V, real)).to(dtype)
        scores = load(scores_ptr + row * CHUNK + square, real[:, None])
        solve = load(scores_ptr + (gates + row) * CHUNK + square, real[:, None])
        # Before the last chunk the gradient is zero, so only whole chunks need their sum.
        total = load(gates_ptr + row + CHUNK - 1, start + CHUNK <= length)
        du = tl.dot(d_state.to(dtype), tl.trans(k), input_precision=PRECISION)
        du *= load(gates_ptr + 4 * gates + row + token, real)[None, :]
        du = tl.dot(do, scores, du, input_precision=PRECISION)
        dv = tl.dot(du.to(dtype), solve, input_precision=PRECISION)
        dv *= -load(gates_ptr + 3 * gates + row + token, real)[None, :]
        d_state *= tl.exp(total)
        d_state = tl.dot(dv.to(dtype), k, d_state, input_precision=PRECISION)
        factor = load(gates_ptr + 2 * gates + row + token, real)
        do = do.to(tl.float32) * factor[None, :]
        d_state = tl.dot(do.to(dtype), q, d_state, input_precision=PRECISION)
    out = message_ptr + head * ((V + K) * K)
    mask = mask_of(value < V, channel < K)
    tl.store(out + tile_of(value, K, channel), d_state, mask=mask)
