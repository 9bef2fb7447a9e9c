# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Second Triton kernel of the first stage: norms, factors, and the matrices between the tokens of a chunk.

The programs are independent: each computes one chunk of one key head, for its value heads one after
another. The gates come from `triton_decays`. With gates of its own, a program would wait at barriers for
little work: 0.17 ms on an H200 instead of 0.15 ms for both kernels. Sums are fp32. Products of bf16 inputs
are tensor-core products with fp32 sums, and products of fp32 inputs use three TF32 products.

Letters: T tokens, G key heads, N value heads, C columns of a chunk (64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.precision import tile_dtype
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_decays import chunk_decays
from megatron_packed.ops.gated_delta_rule.triton_tiles import (
    chunk_programs,
    key_block,
    tiles_of,
)
from megatron_packed.ops.triton_loads import load, mask_of, rows_at

NORM_EPSILON = 1e-6
"""Constant that is added to the sum of squares of q and of k before the root."""
# Rows of a diagonal block of the triangular inverse; four blocks make a chunk.
_BLOCK = CHUNK // 4


class ChunkScores(NamedTuple):
    """Results of the first stage; the columns of a matrix's row are the tokens of the row's chunk."""

    rstd_2GT: Tensor
    """``(2, G, T)`` fp32, inverse L2 norms of q and of k."""
    gates_6NT: Tensor
    """``(6, N, T)`` fp32, six numbers of each token.

    The sum of g from the first token of the chunk to this token, and the rounding error of this sum,
    which differences of sums need. The factors of q and of k when they read the state at the start of
    the chunk. The factor of k when it writes to the state after the chunk. Beta.
    """
    matrices_2NTC: Tensor
    """``(2, N, T, 64)`` in the dtype of the tiles: scores, and inverse of 1 + A of `_scores_kernel` times beta_j.

    The scores are ``q_i . k_j exp(sum_i - sum_j)`` of the normalised q and k for j <= i, else 0.
    """


def chunk_scores(
    q_TGK: Tensor,
    k_TGK: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    tables: DeltaRuleTables,
    *,
    allow_neg_eigval: bool,
) -> ChunkScores:
    """Run the first stage. q, k, a and b may be strided; all outputs are written completely."""
    (tokens, key_heads, key_dim), heads = q_TGK.shape, a_TN.shape[1]
    device = q_TGK.device
    rstd_2GT = torch.empty(2, key_heads, tokens, dtype=torch.float32, device=device)
    gates_6NT = torch.empty(6, heads, tokens, dtype=torch.float32, device=device)
    dtype = tile_dtype(q_TGK.dtype, allow_neg_eigval)
    tiles = tiles_of("scores", q_TGK.dtype, dtype, key_dim)
    matrices_2NTC = torch.empty(2, heads, tokens, CHUNK, dtype=dtype, device=device)
    gates = (a_TN, b_TN, A_log_N, dt_bias_N)
    chunk_decays(*gates, tables, allow_neg_eigval=allow_neg_eigval, out=gates_6NT)
    _scores_kernel[(key_heads, chunk_programs(tokens, tables))](
        q_TGK,
        k_TGK,
        tables.start_Q,
        tables.end_Q,
        tables.first_chunk_D,
        tables.num_chunks_D,
        rstd_2GT,
        gates_6NT,
        matrices_2NTC,
        tokens,
        tables.num_chunks_D.shape[0],
        q_TGK.stride(0),
        q_TGK.stride(1),
        k_TGK.stride(0),
        k_TGK.stride(1),
        K=key_dim,
        BLOCK_K=key_block(key_dim),
        HEADS=heads,
        HEADS_PER_KEY=heads // key_heads,
        EPSILON=NORM_EPSILON,
        BLOCK=_BLOCK,
        PRECISION=tiles.precision,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return ChunkScores(rstd_2GT, gates_6NT, matrices_2NTC)


@triton.jit(do_not_specialize=["tokens", "documents"])
def _scores_kernel(
    q_ptr,
    k_ptr,
    start_ptr,
    end_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    rstd_ptr,
    gates_ptr,
    matrices_ptr,
    tokens,
    documents,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute chunks i, i + programs, ... of the value heads of key head g in program (g, i).

    For the tokens i, j of a chunk: A_ij = beta_i k_i . k_j exp(sum_i - sum_j) for j < i, else 0.
    """
    dtype = matrices_ptr.dtype.element_ty
    key_head = tl.program_id(0)
    token = tl.arange(0, 4 * BLOCK)
    channel = tl.arange(0, BLOCK_K)
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), num_stages=1):
        start = tl.load(start_ptr + chunk).to(tl.int64)
        length = tl.load(end_ptr + chunk) - start
        real = token < length
        row = start + token
        mask = mask_of(real, channel < K)
        q_tile = row[:, None] * q_stride + key_head * q_head_stride + channel[None, :]
        k_tile = row[:, None] * k_stride + key_head * k_head_stride + channel[None, :]
        q = load(q_ptr + q_tile, mask).to(dtype)
        k = load(k_ptr + k_tile, mask).to(dtype)
        rstd_q = inverse_norm(q, EPSILON)
        rstd_k = inverse_norm(k, EPSILON)
        rstd = rstd_ptr + key_head.to(tl.int64) * tokens + row
        tl.store(rstd, rstd_q, mask=real)
        tl.store(rstd + (HEADS // HEADS_PER_KEY) * tokens.to(tl.int64), rstd_k, mask=real)
        rstd_q *= K**-0.5
        keys = tl.trans(k)
        qk = tl.dot(q, keys, input_precision=PRECISION)
        kk = tl.dot(k, keys, input_precision=PRECISION)
        qk *= rstd_q[:, None] * rstd_k[None, :]
        kk *= rstd_k[:, None] * rstd_k[None, :]

        for of_key in tl.range(HEADS_PER_KEY, num_stages=1):
            head = (key_head * HEADS_PER_KEY + of_key).to(tl.int64)
            gate = gates_ptr + head * tokens + row
            gates = HEADS * tokens.to(tl.int64)
            last = gates_ptr + head * tokens + start + length - 1
            g_sum = load(gate, real)
            g_error = load(gate + gates, real)
            beta = load(gate + 5 * gates, real)
            rest = (tl.load(last) - g_sum) + (tl.load(last + gates) - g_error)
            tl.store(gate + 2 * gates, rstd_q * tl.exp(g_sum), mask=real)
            tl.store(gate + 3 * gates, rstd_k * tl.exp(g_sum), mask=real)
            tl.store(gate + 4 * gates, rstd_k * tl.exp(rest), mask=real)

            matrix = rows_at(matrices_ptr, head * tokens + row, 4 * BLOCK, token)
            decay = pair_decay(g_sum, g_error)
            scores = tl.where(token[:, None] >= token[None, :], qk * decay, 0.0)
            tl.store(matrix, scores.to(dtype), mask=real[:, None])
            lower = tl.where(token[:, None] > token[None, :], kk * decay, 0.0)
            solve = _unit_triangular_inverse(lower * beta[:, None], BLOCK, PRECISION)
            matrix += gates * (4 * BLOCK)
            tl.store(matrix, (solve * beta[None, :]).to(dtype), mask=real[:, None])


@triton.jit
def inverse_norm(x, EPSILON: tl.constexpr):
    """Return the inverse L2 norm of each row."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + EPSILON)


@triton.jit
def pair_decay(g_sum, g_error):
    """Return the decay between each two tokens of a chunk; exponents are not positive."""
    difference = (g_sum[:, None] - g_sum[None, :]) + (g_error[:, None] - g_error[None, :])
    return tl.exp(-tl.abs(difference))


@triton.jit
def _unit_triangular_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + ``lower``, where ``lower`` is strictly lower triangular, 4 SIZE wide.

    The four diagonal blocks are eliminated column by column in fp32, all at once. A warp has the
    rows of one block, so no step waits for another warp. Two products then make each pair of blocks
    to one block of twice the size.
    """
    row = tl.arange(0, SIZE)
    block = tl.arange(0, 4)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.reshape(lower, (4, SIZE, 4, SIZE))
    diagonal = tl.sum(tl.where(same, diagonal, 0.0), axis=2)
    inverse = tl.where(row[None, :, None] == row[None, None, :], 1.0, tl.zeros_like(diagonal))
    for j in range(SIZE - 1):
        column = tl.sum(tl.where(row[None, None, :] == j, diagonal, 0.0), axis=2)
        pivot = tl.sum(tl.where(row[None, :, None] == j, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * pivot[:, None, :]
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (4 * SIZE, 4 * SIZE))
    inverse = _pairs_of_blocks(inverse, lower, SIZE, 4 * SIZE, PRECISION)
    return _pairs_of_blocks(inverse, lower, 2 * SIZE, 4 * SIZE, PRECISION)


@triton.jit
def _pairs_of_blocks(
    inverse, lower, SIZE: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the inverses of the diagonal blocks of twice the size, 0 elsewhere.

    Args:
        inverse: (WHOLE, WHOLE), inverses of the diagonal blocks of SIZE rows, 0 elsewhere.
        lower: (WHOLE, WHOLE), the matrix without its unit diagonal.
    """
    block = tl.arange(0, WHOLE) // SIZE
    corner = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)
    below = tl.dot(inverse, tl.where(corner, lower, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(below, inverse, input_precision=PRECISION)
