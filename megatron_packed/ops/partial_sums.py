# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Sum of the partial weight gradients that the programs of a backward kernel stored.

The partial sums are added in a fixed order, so the result is deterministic. If the weight has a
float32 ``main_grad``, the kernel adds the unrounded sum to that buffer, and autograd gets None. So
no gradient in the weight's dtype is allocated, and no second pass accumulates it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import load, mask_of, rows_at

_MANY_FEATURES = 1024


def add_partial_sums(parts: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """Return the weight's gradient in its dtype; with ``main_grad``, add it there and return None.

    Args:
        parts: ``(X, *weight.shape)`` fp32, contiguous; one part per program of the backward kernel.
        weight: of any shape.
        main_grad: fp32 of the same shape, contiguous; or None.
    """
    programs, features = parts.shape[0], weight.numel()
    out = weight.new_empty(weight.shape) if main_grad is None else main_grad.view(-1)
    # Few features make few programs, so each program has more parts at a time.
    block_p, block_d, warps = (64, 16, 4) if features >= _MANY_FEATURES else (256, 8, 8)
    _sum_kernel[(triton.cdiv(features, block_d),)](
        parts,
        out,
        programs,
        FEATURES=features,
        ADD=main_grad is not None,
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        num_warps=warps,
    )
    return out if main_grad is None else None


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    parts_ptr,
    out_ptr,
    programs,
    FEATURES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum all parts of one block of columns, in the order of programs.

    Program i handles the columns from i * BLOCK_D.
    """
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = column < FEATURES
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        mask = mask_of(program < programs, real)
        total += load(rows_at(parts_ptr, program, FEATURES, column), mask)
    result = tl.sum(total, axis=0)
    if ADD:
        result += load(out_ptr + column, real)
    tl.store(out_ptr + column, result, mask=real)
