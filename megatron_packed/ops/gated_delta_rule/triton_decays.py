# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""First Triton kernel of the first stage: beta, and the sums of the gates in each chunk.

A program computes one chunk of a block of heads, so that it loads whole rows of a and b.

Letters: T tokens, N value heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.gated_delta_rule.triton_tiles import chunk_programs
from megatron_packed.ops.triton_loads import load_fp32, mask_of, rows_at, tile_of

_BLOCK_HEADS = 16


def chunk_decays(
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    tables: DeltaRuleTables,
    *,
    allow_neg_eigval: bool,
    out: Tensor,
) -> None:
    """Write the numbers of ``ChunkScores.gates_6NT`` that do not depend on q and k: the first two, and beta.

    Args:
        a_TN: may have any stride between tokens, as b_TN.
        out: ``(6, N, T)`` fp32.
    """
    tokens, heads = a_TN.shape
    _decays_kernel[(triton.cdiv(heads, _BLOCK_HEADS), chunk_programs(tokens, tables))](
        a_TN,
        b_TN,
        A_log_N,
        dt_bias_N,
        tables.start_Q,
        tables.end_Q,
        tables.first_chunk_D,
        tables.num_chunks_D,
        out,
        tokens,
        tables.num_chunks_D.shape[0],
        a_TN.stride(0),
        b_TN.stride(0),
        HEADS=heads,
        BLOCK_N=_BLOCK_HEADS,
        CHUNK=CHUNK,
        BETA_SCALE=2.0 if allow_neg_eigval else 1.0,
    )


@triton.jit(do_not_specialize=["tokens", "documents"])
def _decays_kernel(
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    start_ptr,
    end_ptr,
    first_chunk_ptr,
    num_chunks_ptr,
    gates_ptr,
    tokens,
    documents,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BETA_SCALE: tl.constexpr,
):
    """Compute chunks i, i + programs, ... of block b of heads in program (b, i).

    The sums are float64, because their differences matter: after a strong decay a sum is large.
    """
    head = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_head = head < HEADS
    token = tl.arange(0, CHUNK)
    rate = tl.exp(load_fp32(A_log_ptr + head, is_head))
    bias = load_fp32(dt_bias_ptr + head, is_head)
    chunks = tl.load(first_chunk_ptr + documents - 1) + tl.load(num_chunks_ptr + documents - 1)
    for chunk in tl.range(tl.program_id(1), chunks, tl.num_programs(1), num_stages=1):
        start = tl.load(start_ptr + chunk).to(tl.int64)
        row = start + token
        mask = mask_of(row < tl.load(end_ptr + chunk), is_head)
        a = load_fp32(rows_at(a_ptr, row, a_stride, head), mask)
        b = load_fp32(rows_at(b_ptr, row, b_stride, head), mask)
        g = tl.where(mask, -rate[None, :] * softplus(a + bias[None, :]), 0.0)
        exact = tl.cumsum(g.to(tl.float64), axis=0)
        g_sum = exact.to(tl.float32)
        gate = gates_ptr + tile_of(row, 1, head.to(tl.int64) * tokens)
        gates = HEADS * tokens.to(tl.int64)
        tl.store(gate, g_sum, mask=mask)
        tl.store(gate + gates, (exact - g_sum.to(tl.float64)).to(tl.float32), mask=mask)
        tl.store(gate + 5 * gates, BETA_SCALE * tl.sigmoid(b), mask=mask)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), with full relative precision for very negative x.

    log(u) e / (u - 1) with u the rounded 1 + e corrects the rounding of u.
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rounded = u - 1.0
    log = tl.where(rounded == 0.0, e, tl.log(u) * (e / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.maximum(x, 0.0) + log
