# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the third stage of backward: gradients of q, k and the gates.

The programs are independent. Each computes one chunk of one key head, and adds the gradients of q, or
of k, over the value heads of the key head in order. So equal inputs give equal bits in each run. One
kernel for both would need more registers than there are, so the products q_i . k_j and dO U^T are
computed twice.

No product has a computed tile that is transposed, see `triton_states`. Instead the kernels compute the
transposed product from the loaded tiles.

Letters: T tokens, G key heads, N value heads, K key head dimension, V value head dimension, S slots.
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
from megatron_packed.ops.gated_delta_rule.triton_tiles import (
    chunk_programs,
    key_block,
    tiles_of,
)
from megatron_packed.ops.triton_loads import load, mask_of, tile_of


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
    tokens, heads, _ = v_TNV.shape
    gates_3NT = torch.empty(3, heads, tokens, dtype=torch.float32, device=v_TNV.device)
    states_SNVK, d_states_SNVK, u_TNV, dv_TNV = backward
    factors = (scores.rstd_2GT, scores.gates_5NT)
    _launch(
        _query_kernel,
        "queries",
        (q_TGK, k_TGK, do_TNV, out[0]),
        (*factors, states_SNVK, u_TNV, gates_3NT),
        tables,
        u_TNV.dtype,
        in_parts,
    )
    _launch(
        _key_kernel,
        "keys",
        (q_TGK, k_TGK, v_TNV, do_TNV, dv_TNV, out[1]),
        (*factors, states_SNVK, d_states_SNVK, u_TNV, gates_3NT),
        tables,
        u_TNV.dtype,
        in_parts,
    )
    return GateGradients(*gates_3NT)


def _launch(
    kernel: Any,
    name: str,
    strided: tuple[Tensor, ...],
    contiguous: tuple[Tensor, ...],
    tables: DeltaRuleTables,
    dtype: torch.dtype,
    in_parts: bool,
) -> None:
    """Launch a kernel over all chunks and key heads.

    Args:
        strided: (T, heads, channels) of q, k, a tensor of the value heads, and others; the kernel
            gets their strides, too.
        dtype: dtype of the tiles.
    """
    (tokens, key_heads, key_dim), (_, heads, value_dim) = strided[0].shape, strided[2].shape
    tiles = tiles_of(name, strided[0].dtype, dtype, value_dim)
    kernel[(key_heads, chunk_programs(tokens, tables))](
        *strided,
        *contiguous,
        *tables[:5],
        tokens,
        tables.num_chunks_D.shape[0],
        *(stride for x in strided for stride in x.stride()[:2]),
        key_dim**-0.5,
        K=key_dim,
        V=value_dim,
        BLOCK_K=key_block(key_dim),
        BLOCK_V=tiles.values,
        HEADS=heads,
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        STAGES=tiles.stages,
        PRECISION=tiles.precision,
        IN_PARTS=in_parts,
        num_warps=tiles.warps,
    )


@triton.jit(do_not_specialize=["tokens", "documents"])
def _query_kernel(
    q_ptr,
    k_ptr,
    do_ptr,
    dq_ptr,
    rstd_ptr,
    gates_ptr,
    states_ptr,
    u_ptr,
    d_gates_ptr,
    document_ptr,
    start_ptr,
    end_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    tokens,
    documents,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    do_stride,
    do_head_stride,
    dq_stride,
    dq_head_stride,
    scale,
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
    """Compute dq of chunks i, i + programs, ... of key head g in program (g, i); see README.md."""
    dtype = u_ptr.dtype.element_ty
    key_head = tl.program_id(0)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    own_value = tl.arange(0, BLOCK_V)
    q_tile = tile_of(token, q_stride, channel)
    k_tile = tile_of(token, k_stride, channel)
    u_tile = tile_of(token, HEADS * V, own_value)
    do_tile = tile_of(token, do_stride, own_value)
    state_tile = tile_of(own_value, K, channel)
    gates = HEADS * tokens.to(tl.int64)
    below = token[:, None] > token[None, :]
    above = token[:, None] < token[None, :]
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), num_stages=1):
        # The first chunk of a document starts from a state of zeros.
        first_chunk = tl.load(first_chunk_ptr + tl.load(document_ptr + chunk))
        state_values = tl.where(chunk > first_chunk, V, 0)
        if IN_PARTS:
            state_values = tl.where(chunk == 0, V, state_values)
        start = tl.load(start_ptr + chunk).to(tl.int64)
        real = token < (tl.load(end_ptr + chunk) - start).to(tl.int32)
        key_mask = mask_of(real, channel < K)
        q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
        k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
        key_row = key_head.to(tl.int64) * tokens + start
        rstds = (HEADS // HEADS_PER_KEY) * tokens.to(tl.int64)
        rstd_q = load(rstd_ptr + key_row + token, real)
        rstd_k = load(rstd_ptr + rstds + key_row + token, real)
        dq = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
        for i in tl.range(HEADS_PER_KEY, num_stages=1):
            head = key_head * HEADS_PER_KEY + i
            gate = head.to(tl.int64) * tokens + start
            u_base = u_ptr + (start * HEADS + head) * V
            do_base = do_ptr + (start * do_stride + head * do_head_stride)
            state_base = states_ptr + ((start // CHUNK) * HEADS + head) * (V * K)
            d_qk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            do_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                mask = mask_of(real, block + own_value < V)
                do = load(do_base + block + do_tile, mask).to(dtype)
                u = load(u_base + block + u_tile, mask)
                mask = mask_of(block + own_value < state_values, channel < K)
                state = load(state_base + block * K + state_tile, mask)
                d_qk = tl.dot(do, tl.trans(u), d_qk, input_precision=PRECISION)
                do_state = tl.dot(do, state, do_state, input_precision=PRECISION)
            q = load(q_base + q_tile, key_mask).to(dtype)
            do_state *= load(gates_ptr + 2 * gates + gate + token, real)[:, None]
            dq += do_state
            d_reach = tl.sum(q.to(tl.float32) * do_state, axis=1)
            k = load(k_base + k_tile, key_mask).to(dtype)
            g_sum = load(gates_ptr + gate + token, real)
            g_error = load(gates_ptr + gates + gate + token, real)
            d_qk *= pair_decay(g_sum, g_error) * ((rstd_q * scale)[:, None] * rstd_k[None, :])
            d_qk = tl.where(above, 0.0, d_qk)
            dq = tl.dot(d_qk.to(dtype), k, dq, input_precision=PRECISION)
            pairs = tl.where(below, d_qk * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
            dg = _sums_over_later_and_earlier(pairs, below, k, PRECISION)
            dg += tl.sum(tl.where(below, 0.0, d_reach[None, :]), axis=1)
            tl.store(d_gates_ptr + gate + token, dg, mask=real)
        q = load(q_base + q_tile, key_mask).to(dtype)
        dq = _across(dq, q, rstd_q)
        dq_base = dq_ptr + (start * dq_stride + key_head * dq_head_stride)
        dq_tile = tile_of(token, dq_stride, channel)
        tl.store(dq_base + dq_tile, dq, mask=key_mask)


@triton.jit(do_not_specialize=["tokens", "documents"])
def _key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dv_ptr,
    dk_ptr,
    rstd_ptr,
    gates_ptr,
    states_ptr,
    d_states_ptr,
    u_ptr,
    d_gates_ptr,
    document_ptr,
    start_ptr,
    end_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    tokens,
    documents,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    do_stride,
    do_head_stride,
    dv_stride,
    dv_head_stride,
    dk_stride,
    dk_head_stride,
    scale,
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
    """Compute dk of chunks i, i + programs, ... of key head g in program (g, i); see README.md."""
    dtype = u_ptr.dtype.element_ty
    key_head = tl.program_id(0)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    own_value = tl.arange(0, BLOCK_V)
    q_tile = tile_of(token, q_stride, channel)
    k_tile = tile_of(token, k_stride, channel)
    u_tile = tile_of(token, HEADS * V, own_value)
    do_tile = tile_of(token, do_stride, own_value)
    v_tile = tile_of(token, v_stride, own_value)
    dv_tile = tile_of(token, dv_stride, own_value)
    state_tile = tile_of(own_value, K, channel)
    gates = HEADS * tokens.to(tl.int64)
    below = token[:, None] > token[None, :]
    above = token[:, None] < token[None, :]
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), num_stages=1):
        document = tl.load(document_ptr + chunk)
        position = chunk - tl.load(first_chunk_ptr + document)
        # The first chunk of a document starts from a state of zeros, and the last has no next one.
        state_values = tl.where(position > 0, V, 0)
        next_values = tl.where(position + 1 < tl.load(num_chunks_ptr + document), V, 0)
        start = tl.load(start_ptr + chunk).to(tl.int64)
        real = token < (tl.load(end_ptr + chunk) - start).to(tl.int32)
        last_token = CHUNK - 1
        if IN_PARTS:
            state_values = tl.where(chunk == 0, V, state_values)
            next_values = tl.where(chunk + 1 == chunks, V, next_values)
            # The last chunk passes its state on, also if it is not whole.
            last_token = (tl.load(end_ptr + chunk) - start).to(tl.int32) - 1
        key_mask = mask_of(real, channel < K)
        q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
        k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
        key_row = key_head.to(tl.int64) * tokens + start
        rstds = (HEADS // HEADS_PER_KEY) * tokens.to(tl.int64)
        scaled_q = load(rstd_ptr + key_row + token, real) * scale
        rstd_k = load(rstd_ptr + rstds + key_row + token, real)
        state_row = (start // CHUNK) * HEADS
        dk = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
        for i in tl.range(HEADS_PER_KEY, num_stages=1):
            head = key_head * HEADS_PER_KEY + i
            gate = head.to(tl.int64) * tokens + start
            u_base = u_ptr + (start * HEADS + head) * V
            do_base = do_ptr + (start * do_stride + head * do_head_stride)
            v_base = v_ptr + (start * v_stride + head * v_head_stride)
            dv_base = dv_ptr + (start * dv_stride + head * dv_head_stride)
            state_base = states_ptr + (state_row + head) * (V * K)
            next_base = d_states_ptr + (state_row + HEADS + head) * (V * K)

            # Terms between two tokens of the chunk, from both sides of the products k_i . k_j, and terms
            # with the states before and after the chunk.
            d_qk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_kk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_kk_T = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            dv_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            u_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            d_log_beta = tl.zeros((CHUNK,), dtype=tl.float32)
            passed = tl.zeros((BLOCK_K,), dtype=tl.float32)
            for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                mask = mask_of(real, block + own_value < V)
                do = load(do_base + block + do_tile, mask).to(dtype)
                u = load(u_base + block + u_tile, mask)
                dv = load(dv_base + block + dv_tile, mask).to(dtype)
                v = load(v_base + block + v_tile, mask).to(dtype)
                mask = mask_of(block + own_value < state_values, channel < K)
                state = load(state_base + block * K + state_tile, mask)
                mask = mask_of(block + own_value < next_values, channel < K)
                d_next = load(next_base + block * K + state_tile, mask)
                d_qk = tl.dot(u, tl.trans(do), d_qk, input_precision=PRECISION)
                d_kk = tl.dot(dv, tl.trans(u), d_kk, input_precision=PRECISION)
                dv_state = tl.dot(dv, state, dv_state, input_precision=PRECISION)
                u_state = tl.dot(u, d_next, u_state, input_precision=PRECISION)
                d_log_beta += tl.sum(dv.to(tl.float32) * v.to(tl.float32), axis=1)
                passed += tl.sum(state.to(tl.float32) * d_next.to(tl.float32), axis=0)
                # Triton 3.6 and 3.9 wait for a product only if this turn uses its result, and they make
                # a sum a part of the product. This difference is last, so its wait covers all products.
                # Without it the next copies overwrite dv, state and d_next while products read them.
                d_kk_T -= tl.dot(u, tl.trans(dv), input_precision=PRECISION)
            dv_state *= load(gates_ptr + 3 * gates + gate + token, real)[:, None]
            u_state *= load(gates_ptr + 4 * gates + gate + token, real)[:, None]
            k = load(k_base + k_tile, key_mask).to(dtype)
            d_read = tl.sum(k.to(tl.float32) * dv_state, axis=1)
            d_rest = tl.sum(k.to(tl.float32) * u_state, axis=1)
            dk += u_state - dv_state
            g_sum = load(gates_ptr + gate + token, real)
            g_error = load(gates_ptr + gates + gate + token, real)
            decay = pair_decay(g_sum, g_error) * rstd_k[:, None]
            d_qk = tl.where(below, 0.0, d_qk * decay * scaled_q[None, :])
            q = load(q_base + q_tile, key_mask).to(dtype)
            dk = tl.dot(d_qk.to(dtype), q, dk, input_precision=PRECISION)
            decay *= rstd_k[None, :]
            d_kk = tl.where(below, -d_kk * decay, 0.0)
            d_kk_T = tl.where(above, d_kk_T * decay, 0.0)
            dk = tl.dot((d_kk + d_kk_T).to(dtype), k, dk, input_precision=PRECISION)
            pairs = d_kk * tl.dot(k, tl.trans(k), input_precision=PRECISION)
            d_log_beta += tl.sum(pairs, axis=1) - d_read
            dg = _sums_over_later_and_earlier(pairs, below, k, PRECISION)
            total = load(gates_ptr + gate + last_token, next_values > 0)
            dg += tl.sum(tl.where(below, d_rest[None, :], -d_read[None, :]), axis=1)
            dg += tl.sum(passed, axis=0) * tl.exp(total)
            tl.store(d_gates_ptr + gates + gate + token, dg, mask=real)
            tl.store(d_gates_ptr + 2 * gates + gate + token, d_log_beta, mask=real)
        k = load(k_base + k_tile, key_mask).to(dtype)
        dk = _across(dk, k, rstd_k)
        dk_tile = tile_of(token, dk_stride, channel)
        dk_base = dk_ptr + (start * dk_stride + key_head * dk_head_stride)
        tl.store(dk_base + dk_tile, dk, mask=key_mask)


@triton.jit
def _across(gradient, vector, rstd):
    """Return the part of the gradient across the vector: that along it is lost in the norm."""
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
