# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel of the last stage of backward: gradients of a, b, A_log and dt_bias.

The kernel passes the gradients of the gates through softplus and sigmoid. The gradients of the parameters
are sums over fixed blocks of tokens, then over the blocks in order. So equal inputs give equal bits in
each run, and the number of documents does not matter.

Letters: T tokens, N value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.gated_delta_rule.triton_decays import softplus
from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, rows_at, tile_of

_BLOCK_TOKENS = 64
_BLOCK_HEADS = 32


class GateGradients(NamedTuple):
    """Gradients of the gates."""

    g_of_pairs_NT: Tensor
    """``(N, T)`` fp32, gradient of g, the logarithm of the decay, through q and the pairs of tokens."""
    g_of_states_NT: Tensor
    """``(N, T)`` fp32, gradient of g through the state before the chunk without q, and through that after it."""
    log_beta_of_pairs_NT: Tensor
    """``(N, T)`` fp32, gradient of the logarithm of beta through the pairs of keys."""
    log_beta_of_states_NT: Tensor
    """``(N, T)`` fp32, gradient of the logarithm of beta through v and the state before the chunk."""


def gate_gradients(
    gradients: GateGradients,
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


@triton.jit(do_not_specialize=["tokens"])
def _gates_kernel(
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    d_g_of_pairs_ptr,
    d_g_of_states_ptr,
    d_log_beta_of_pairs_ptr,
    d_log_beta_of_states_ptr,
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
    mask = mask_of(row < tokens, real)
    gate = head[None, :] * tokens.to(tl.int64) + row[:, None]
    a = load(rows_at(a_ptr, row, a_stride, head), mask)
    d_g = load(d_g_of_pairs_ptr + gate, mask) + load(d_g_of_states_ptr + gate, mask)
    d_log_beta = load(d_log_beta_of_pairs_ptr + gate, mask)
    d_log_beta += load(d_log_beta_of_states_ptr + gate, mask)
    rate = tl.exp(load_fp32(A_log_ptr + head, real))
    bias = load_fp32(dt_bias_ptr + head, real)
    raw = a.to(tl.float32) + bias[None, :]
    d_step = -rate[None, :] * d_g
    da = d_step * tl.sigmoid(raw)
    b = load(rows_at(b_ptr, row, b_stride, head), mask)
    db = d_log_beta * tl.sigmoid(-b.to(tl.float32))
    da_tile = tile_of(row, da_stride, head)
    db_tile = tile_of(row, db_stride, head)
    tl.store(da_ptr + da_tile, da, mask=mask)
    tl.store(db_ptr + db_tile, db, mask=mask)
    part = tl.program_id(0) * HEADS + head
    tl.store(parts_ptr + part, tl.sum(d_step * softplus(raw), axis=0), mask=real)
    parts_ptr += tl.num_programs(0) * HEADS
    tl.store(parts_ptr + part, tl.sum(da, axis=0), mask=real)
