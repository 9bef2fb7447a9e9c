"""Triton kernel that sums the gradients of A_log, D and dt_bias over the chunks of a pack.

``chunk_sum`` computes the gradients of each chunk. Chunks are summed in order, so the sums are
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, rows_at

_HEADS_PER_PROGRAM = 8
_CHUNKS_PER_STEP = 128


def parameter_gradients(
    parts_3QN: Tensor, parameters: tuple[Tensor, ...], main_grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Sum the gradients of A_log, D and dt_bias over chunks.

    Returns:
        the gradient of each parameter, or None if it was added to the parameter's ``main_grad``.
    """
    chunks, heads = parts_3QN.shape[1:]
    outs = [
        torch.empty_like(p) if main is None else main for p, main in zip(parameters, main_grads)
    ]
    _parameters_kernel[(triton.cdiv(heads, _HEADS_PER_PROGRAM),)](
        parts_3QN,
        parameters[0],
        *outs,
        heads,
        chunks,
        ADD_A=main_grads[0] is not None,
        ADD_D=main_grads[1] is not None,
        ADD_BIAS=main_grads[2] is not None,
        BLOCK_Q=_CHUNKS_PER_STEP,
        BLOCK_N=_HEADS_PER_PROGRAM,
    )
    return [out if main is None else None for out, main in zip(outs, main_grads)]


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def _parameters_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    A_log_ptr,
    d_A_log_ptr,
    d_D_ptr,
    d_bias_ptr,
    heads,
    chunks,
    ADD_A: tl.constexpr,
    ADD_D: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the gradients of A_log, D and dt_bias over chunks, for a block of heads.

    The gradient of A is multiplied by dA / dA_log = A.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_head = n < heads
    A = -tl.exp(load_fp32(A_log_ptr + n, is_head))
    _store_or_add(
        d_A_log_ptr + n,
        is_head,
        A * _chunk_total(parts_ptr, n, heads, chunks, BLOCK_Q, BLOCK_N),
        ADD_A,
    )
    parts_ptr += chunks * heads
    _store_or_add(
        d_D_ptr + n, is_head, _chunk_total(parts_ptr, n, heads, chunks, BLOCK_Q, BLOCK_N), ADD_D
    )
    parts_ptr += chunks * heads
    _store_or_add(
        d_bias_ptr + n,
        is_head,
        _chunk_total(parts_ptr, n, heads, chunks, BLOCK_Q, BLOCK_N),
        ADD_BIAS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_total(  # type: ignore[no-untyped-def]
    parts_ptr, n, heads, chunks, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr
):
    total = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
    for start in range(0, chunks, BLOCK_Q):
        chunk = start + tl.arange(0, BLOCK_Q)
        mask = mask_of(chunk < chunks, n < heads)
        total += load(rows_at(parts_ptr, chunk, heads, n), mask)
    return tl.sum(total, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_or_add(pointer, mask, value, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    if ADD:
        value += load(pointer, mask)
    tl.store(pointer, value, mask=mask)
