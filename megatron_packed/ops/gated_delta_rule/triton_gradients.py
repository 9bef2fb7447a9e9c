# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the last stage of backward: gradients of q, k, v, a, b, A_log and dt_bias.

The programs of the first kernel are independent: each computes one chunk of one key head, and adds
the gradients of q and k over the value heads of the key head in order. The second kernel passes the
gates' gradients through softplus and sigmoid and sums those of the parameters over fixed blocks of
tokens. So equal inputs give equal bits in each run.

No product has a computed tile that is transposed, see `triton_states`. Where a product needs the
transpose of a product, the kernel computes the transposed product from the loaded tiles.

Letters: T tokens, G key heads, N value heads, K key head dimension, V value head dimension, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_scores import (
    ChunkScores,
    chunk_programs,
    dot_precision,
    key_block,
    pair_decay,
    softplus,
)
from megatron_packed.ops.gated_delta_rule.triton_states import tiles_of
from megatron_packed.ops.partial_sums import add_partial_sums

_BLOCK_TOKENS = 64
_BLOCK_HEADS = 32


class BackwardTensors(NamedTuple):
    """Intermediate tensors of backward that the chunks' gradients depend on."""

    states_SNVK: Tensor
    """Transposed state at the start of the chunk of each slot."""
    d_states_SNVK: Tensor
    """Gradient of ``states_SNVK``."""
    u_TNV: Tensor
    """Vector that each token adds to the state along its key."""
    x_TNV: Tensor
    """Gradient of ``beta (v - S^T k)``."""


class GateGradients(NamedTuple):
    """Gradients of the gates."""

    g_NT: Tensor
    """``(N, T)`` fp32, gradient of g, the logarithm of the decay."""
    beta_NT: Tensor
    """``(N, T)`` fp32."""


def chunk_gradients(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    do_TNV: Tensor,
    scores: ChunkScores,
    backward: BackwardTensors,
    tables: DeltaRuleTables,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> GateGradients:
    """Write the gradients of q, k and v to ``out``, and return those of the gates.

    Args:
        out: memory for the gradients of q, k and v, with stride 1 in the last dimension.
    """
    (tokens, heads, value_dim), (_, key_heads, key_dim) = v_TNV.shape, k_TGK.shape
    gates_2NT = torch.empty(2, heads, tokens, dtype=torch.float32, device=v_TNV.device)
    tiles = tiles_of("chunks", v_TNV.dtype, value_dim)
    _chunk_kernel[(key_heads, chunk_programs(tokens, tables))](
        q_TGK,
        k_TGK,
        v_TNV,
        do_TNV,
        *scores[:6],
        *backward,
        *out,
        gates_2NT,
        *tables,
        tokens,
        tables.num_chunks_D.shape[0],
        *(s for x in (q_TGK, k_TGK, v_TNV, do_TNV, *out) for s in x.stride()[:2]),
        key_dim**-0.5,
        K=key_dim,
        V=value_dim,
        BLOCK_K=key_block(key_dim),
        BLOCK_V=tiles.values,
        HEADS=heads,
        HEADS_PER_KEY=heads // key_heads,
        CHUNK=CHUNK,
        STAGES=tiles.stages,
        PRECISION=dot_precision(v_TNV.dtype),
        num_warps=tiles.warps,
    )
    return GateGradients(*gates_2NT)


def gate_gradients(
    gradients: GateGradients,
    beta_NT: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    *,
    out: tuple[Tensor, Tensor],
    main_grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of a and b to ``out``, and return those of A_log and dt_bias.

    Args:
        out: memory for the gradients of a and b, with stride 1 in the last dimension.
        main_grads: fp32 buffers of the parameters, or None. With a buffer the gradient is added
            there, and None is returned.
    """
    tokens, heads = a_TN.shape
    blocks = triton.cdiv(tokens, _BLOCK_TOKENS)
    parts_2XN = torch.empty(2, blocks, heads, dtype=torch.float32, device=a_TN.device)
    _gates_kernel[(blocks, triton.cdiv(heads, _BLOCK_HEADS))](
        a_TN,
        b_TN,
        A_log_N,
        dt_bias_N,
        beta_NT,
        *gradients,
        *out,
        parts_2XN,
        tokens,
        *(x.stride(0) for x in (a_TN, b_TN, *out)),
        HEADS=heads,
        BLOCK_T=_BLOCK_TOKENS,
        BLOCK_N=_BLOCK_HEADS,
    )
    return (
        add_partial_sums(parts_2XN[0], A_log_N, main_grads[0]),
        add_partial_sums(parts_2XN[1], dt_bias_N, main_grads[1]),
    )


@triton.jit(do_not_specialize=["tokens", "documents"])
def _chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    rstd_q_ptr,
    rstd_k_ptr,
    sum_ptr,
    error_ptr,
    rest_ptr,
    beta_ptr,
    states_ptr,
    d_states_ptr,
    u_ptr,
    x_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
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
    dq_stride,
    dq_head_stride,
    dk_stride,
    dk_head_stride,
    dv_stride,
    dv_head_stride,
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
):
    """Compute chunks i, i + programs, ... of key head g in program (g, i); README.md has the formulas."""
    key_head = tl.program_id(0)
    token = tl.arange(0, CHUNK)
    channel = tl.arange(0, BLOCK_K)
    own_value = tl.arange(0, BLOCK_V)
    q_tile = token[:, None] * q_stride + channel[None, :]
    k_tile = token[:, None] * k_stride + channel[None, :]
    tile = token[:, None] * (HEADS * V) + own_value[None, :]
    do_tile = token[:, None] * do_stride + own_value[None, :]
    v_tile = token[:, None] * v_stride + own_value[None, :]
    dv_tile = token[:, None] * dv_stride + own_value[None, :]
    state_tile = own_value[:, None] * K + channel[None, :]
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), num_stages=1):
        document = tl.load(document_ptr + chunk)
        position = chunk - tl.load(first_chunk_ptr + document)
        # The first chunk of a document starts from a state of zeros, and the last has no next one.
        state_values = tl.where(position > 0, V, 0)
        next_values = tl.where(position + 1 < tl.load(num_chunks_ptr + document), V, 0)
        start = tl.load(start_ptr + chunk).to(tl.int64)
        real = token < (tl.load(end_ptr + chunk) - start).to(tl.int32)
        key_mask = real[:, None] & (channel < K)[None, :]
        q_base = q_ptr + (start * q_stride + key_head * q_head_stride)
        k_base = k_ptr + (start * k_stride + key_head * k_head_stride)
        key_row = key_head.to(tl.int64) * tokens + start
        rstd_q = tl.load(rstd_q_ptr + key_row + token, mask=real, other=0.0)
        rstd_k = tl.load(rstd_k_ptr + key_row + token, mask=real, other=0.0)
        scaled_q = rstd_q * scale
        dq = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
        dk = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
        for i in tl.range(HEADS_PER_KEY, num_stages=1):
            head = key_head * HEADS_PER_KEY + i
            gate = head.to(tl.int64) * tokens + start
            g_sum = tl.load(sum_ptr + gate + token, mask=real, other=0.0)
            g_error = tl.load(error_ptr + gate + token, mask=real, other=0.0)
            beta = tl.load(beta_ptr + gate + token, mask=real, other=0.0)
            out_base = (start * HEADS + head) * V
            do_base = do_ptr + (start * do_stride + head * do_head_stride)
            v_base = v_ptr + (start * v_stride + head * v_head_stride)
            dv_base = dv_ptr + (start * dv_stride + head * dv_head_stride)

            # First the terms between two tokens of the chunk: gradients of the products q_i . k_j and
            # k_i . k_j, each also transposed.
            d_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_scores_T = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_lower = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_lower_T = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
            d_beta = tl.zeros((CHUNK,), dtype=tl.float32)
            for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                mask = real[:, None] & (block + own_value < V)[None, :]
                do = tl.load(do_base + block + do_tile, mask=mask, other=0.0)
                u = tl.load(u_ptr + out_base + block + tile, mask=mask, other=0.0)
                x = tl.load(x_ptr + out_base + block + tile, mask=mask, other=0.0)
                v = tl.load(v_base + block + v_tile, mask=mask, other=0.0)
                d_scores = tl.dot(do, tl.trans(u), d_scores, input_precision=PRECISION)
                d_scores_T = tl.dot(u, tl.trans(do), d_scores_T, input_precision=PRECISION)
                d_lower = tl.dot(x, tl.trans(u), d_lower, input_precision=PRECISION)
                d_lower_T = tl.dot(u, tl.trans(x), d_lower_T, input_precision=PRECISION)
                wide_x = x.to(tl.float32)
                d_beta += tl.sum(wide_x * v.to(tl.float32), axis=1)
                dv = (wide_x * beta[:, None]).to(dv_ptr.dtype.element_ty)
                tl.store(dv_base + block + dv_tile, dv, mask=mask)

            # q and k are loaded again for each head and each use, because their tiles would take the
            # registers of the sums.
            q = tl.load(q_base + q_tile, mask=key_mask, other=0.0)
            k = tl.load(k_base + k_tile, mask=key_mask, other=0.0)
            keys = tl.trans(k)
            below = token[:, None] > token[None, :]
            above = token[:, None] < token[None, :]
            decay = pair_decay(g_sum, g_error)
            d_scores = tl.where(above, 0.0, d_scores * decay) * rstd_k[None, :]
            d_scores_T = tl.where(below, 0.0, d_scores_T * decay) * scaled_q[None, :]
            pairs = d_scores * tl.dot(q, keys, input_precision=PRECISION) * scaled_q[:, None]
            dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)
            dk = tl.dot(d_scores_T.to(k.dtype), q, dk, input_precision=PRECISION)
            d_lower = tl.where(below, -d_lower * decay, 0.0) * rstd_k[None, :]
            d_lower_T = tl.where(above, -d_lower_T * decay, 0.0) * rstd_k[None, :]
            products = tl.dot(k, keys, input_precision=PRECISION) * rstd_k[:, None] * d_lower
            d_beta += tl.sum(products, axis=1)
            pairs = tl.where(below, pairs + products * beta[:, None], 0.0)
            d_lower = d_lower * beta[:, None] + d_lower_T * beta[None, :]
            dk = tl.dot(d_lower.to(k.dtype), k, dk, input_precision=PRECISION)

            # The decay of token t is a factor of the pairs (i, j) with j < t <= i. A sum of these pairs
            # alone is exact where a difference of row and column sums would cancel.
            ones = tl.where(above, 1.0, 0.0) + tl.where(token[:, None] == token[None, :], 1.0, 0.0)
            later = tl.dot(ones.to(k.dtype), pairs.to(k.dtype), input_precision=PRECISION)
            dg = tl.sum(tl.where(below, later, 0.0), axis=1)

            # Then the terms with the state at the start of the chunk.
            do_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            x_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            state_base = states_ptr + ((start // CHUNK) * HEADS + head) * (V * K)
            for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                mask = real[:, None] & (block + own_value < V)[None, :]
                do = tl.load(do_base + block + do_tile, mask=mask, other=0.0)
                x = tl.load(x_ptr + out_base + block + tile, mask=mask, other=0.0)
                mask = (block + own_value < state_values)[:, None] & (channel < K)[None, :]
                state = tl.load(state_base + block * K + state_tile, mask=mask, other=0.0)
                do_state = tl.dot(do, state, do_state, input_precision=PRECISION)
                x_state = tl.dot(x, state, x_state, input_precision=PRECISION)
            reach = tl.exp(g_sum)
            q = tl.load(q_base + q_tile, mask=key_mask, other=0.0).to(tl.float32)
            k = tl.load(k_base + k_tile, mask=key_mask, other=0.0).to(tl.float32)
            d_read = tl.sum(k * x_state, axis=1) * rstd_k * reach
            d_reach = tl.sum(q * do_state, axis=1) * scaled_q * reach - d_read * beta
            d_beta -= d_read
            dq += do_state * reach[:, None]
            dk -= x_state * (beta * reach)[:, None]

            # Last the terms with the state after the chunk.
            u_state = tl.zeros((CHUNK, BLOCK_K), dtype=tl.float32)
            passed = tl.zeros((BLOCK_K,), dtype=tl.float32)
            next_base = d_states_ptr + ((start // CHUNK + 1) * HEADS + head) * (V * K)
            for block in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                mask = real[:, None] & (block + own_value < V)[None, :]
                u = tl.load(u_ptr + out_base + block + tile, mask=mask, other=0.0)
                mask = (block + own_value < state_values)[:, None] & (channel < K)[None, :]
                state = tl.load(state_base + block * K + state_tile, mask=mask, other=0.0)
                mask = (block + own_value < next_values)[:, None] & (channel < K)[None, :]
                d_next = tl.load(next_base + block * K + state_tile, mask=mask, other=0.0)
                u_state = tl.dot(u, d_next, u_state, input_precision=PRECISION)
                passed += tl.sum(state.to(tl.float32) * d_next.to(tl.float32), axis=0)
            rest = tl.load(rest_ptr + gate + token, mask=real, other=0.0)
            total = tl.sum(tl.where(token == CHUNK - 1, g_sum, 0.0), axis=0)
            k = tl.load(k_base + k_tile, mask=key_mask, other=0.0).to(tl.float32)
            d_rest = tl.sum(k * u_state, axis=1) * rstd_k * rest
            dk += u_state * rest[:, None]
            terms = tl.where(below, d_rest[None, :], d_reach[None, :])
            dg += tl.sum(terms, axis=1) + tl.sum(passed, axis=0) * tl.exp(total)
            tl.store(d_gates_ptr + gate + token, dg, mask=real)
            tl.store(d_gates_ptr + HEADS * tokens.to(tl.int64) + gate + token, d_beta, mask=real)

        q = tl.load(q_base + q_tile, mask=key_mask, other=0.0).to(tl.float32) * rstd_q[:, None]
        k = tl.load(k_base + k_tile, mask=key_mask, other=0.0).to(tl.float32) * rstd_k[:, None]
        dq = (dq - q * tl.sum(q * dq, axis=1)[:, None]) * scaled_q[:, None]
        dk = (dk - k * tl.sum(k * dk, axis=1)[:, None]) * rstd_k[:, None]
        dq_tile = token[:, None] * dq_stride + channel[None, :]
        dk_tile = token[:, None] * dk_stride + channel[None, :]
        dq_base = dq_ptr + (start * dq_stride + key_head * dq_head_stride)
        dk_base = dk_ptr + (start * dk_stride + key_head * dk_head_stride)
        tl.store(dq_base + dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=key_mask)
        tl.store(dk_base + dk_tile, dk.to(dk_ptr.dtype.element_ty), mask=key_mask)


@triton.jit(do_not_specialize=["tokens"])
def _gates_kernel(
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    beta_ptr,
    d_g_ptr,
    d_beta_ptr,
    da_ptr,
    db_ptr,
    parts_ptr,
    tokens,
    a_stride,
    b_stride,
    da_stride,
    db_stride,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradients of a and b of a block of tokens and heads, and two partial sums."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = head < HEADS
    mask = (row < tokens)[:, None] & real[None, :]
    gate = head[None, :] * tokens.to(tl.int64) + row[:, None]
    a = tl.load(a_ptr + row[:, None] * a_stride + head[None, :], mask=mask, other=0.0)
    d_g = tl.load(d_g_ptr + gate, mask=mask, other=0.0)
    d_beta = tl.load(d_beta_ptr + gate, mask=mask, other=0.0)
    beta = tl.load(beta_ptr + gate, mask=mask, other=0.0)
    rate = tl.exp(tl.load(A_log_ptr + head, mask=real, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head, mask=real, other=0.0).to(tl.float32)
    raw = a.to(tl.float32) + bias[None, :]
    d_step = -rate[None, :] * d_g
    da = d_step * tl.sigmoid(raw)
    b = tl.load(b_ptr + row[:, None] * b_stride + head[None, :], mask=mask, other=0.0)
    db = d_beta * beta * tl.sigmoid(-b.to(tl.float32))
    da_tile = row[:, None] * da_stride + head[None, :]
    db_tile = row[:, None] * db_stride + head[None, :]
    tl.store(da_ptr + da_tile, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + db_tile, db.to(db_ptr.dtype.element_ty), mask=mask)
    part = tl.program_id(0) * HEADS + head
    tl.store(parts_ptr + part, tl.sum(d_step * softplus(raw), axis=0), mask=real)
    parts_ptr += tl.num_programs(0) * HEADS
    tl.store(parts_ptr + part, tl.sum(da, axis=0), mask=real)
