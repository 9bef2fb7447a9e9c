# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The last step of a weight's gradient: the shares of a backward kernel's programs, added up in one
fixed order.

Where the weight lives in flat buffers the sum is added, unrounded, to its float32 ``main_grad`` by
the same kernel, and autograd gets None: no gradient in the weight's dtype, no second pass to
accumulate it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty_like


def sum_shares(shares_XD: Tensor, weight_D: Tensor, main_grad_D: Tensor | None) -> Tensor | None:
    """The weight's gradient in its dtype; or None, when it was added to ``main_grad_D`` instead.

    Args:
        shares_XD: ``(X, D)`` fp32, contiguous; one row for each program.
        weight_D: ``(D,)``.
        main_grad_D: ``(D,)`` fp32 or None.
    """
    programs, features = shares_XD.shape
    out_D = empty_like(weight_D) if main_grad_D is None else main_grad_D
    _sum_kernel[(triton.cdiv(features, 32),)](
        shares_XD,
        out_D,
        programs,
        FEATURES=features,
        ADD=main_grad_D is not None,
        BLOCK_P=128,
        BLOCK_D=32,
        num_warps=8,
    )
    return out_D if main_grad_D is None else None


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    shares_ptr,
    out_ptr,
    programs,
    FEATURES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Columns i*BLOCK_D..: the sum of all shares, in the order of programs."""
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = column < FEATURES
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        mask = (program < programs)[:, None] & real[None, :]
        total += tl.load(
            shares_ptr + program[:, None] * FEATURES + column[None, :], mask=mask, other=0.0
        )
    result = tl.sum(total, axis=0)
    if ADD:
        result += tl.load(out_ptr + column, mask=real, other=0.0)
    tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty), mask=real)
