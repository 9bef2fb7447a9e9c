# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that write zeros where grouped matrix products write nothing.

These places are the rows after the last expert, and the gradients of unused experts. The grids have
a static size. Each program reads one or two offsets and returns at once if it has nothing to clear.
So a call costs one launch and the bytes that it clears. There is no host sync.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import mask_of, tile_of

_ROWS = 16
_COLUMNS = 1024


def zero_rows_after_(rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
    """Set the rows from ``offsets_E[-1]`` on to zero, in place; ``rows_RD`` must be contiguous."""
    rows, channels = rows_RD.shape
    _zero_rows_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(channels, _COLUMNS))](
        rows_RD,
        offsets_E,
        rows,
        channels,
        LAST=offsets_E.shape[0] - 1,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return rows_RD


def zero_unused_experts_(weights_EXY: Tensor, offsets_E: Tensor) -> Tensor:
    """Set the matrices of experts without rows to zero, in place.

    ``weights_EXY`` must be contiguous.
    """
    experts, size = weights_EXY.shape[0], weights_EXY[0].numel()
    per_program = _ROWS * _COLUMNS
    _zero_experts_kernel[(experts, triton.cdiv(size, per_program))](
        weights_EXY, offsets_E, size, PER_PROGRAM=per_program, STEP=_COLUMNS
    )
    return weights_EXY


@triton.jit
def _zero_rows_kernel(
    rows_ptr,
    offsets_ptr,
    rows,
    channels,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    end = tl.load(offsets_ptr + LAST)
    first = tl.program_id(0) * ROWS
    if first + ROWS > end:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = mask_of((row >= end) & (row < rows), column < channels)
        at = tile_of(row.to(tl.int64), channels, column)
        tl.store(
            rows_ptr + at, tl.zeros((ROWS, COLUMNS), dtype=rows_ptr.dtype.element_ty), mask=mask
        )


@triton.jit
def _zero_experts_kernel(
    weights_ptr, offsets_ptr, size, PER_PROGRAM: tl.constexpr, STEP: tl.constexpr
):
    expert = tl.program_id(0)
    end = tl.load(offsets_ptr + expert)
    start = tl.load(offsets_ptr + tl.maximum(expert - 1, 0))
    start = tl.where(expert == 0, 0, start)
    if start == end:
        first = tl.program_id(1) * PER_PROGRAM
        for i in range(0, PER_PROGRAM, STEP):
            at = first + i + tl.arange(0, STEP)
            zeros = tl.zeros((STEP,), dtype=weights_ptr.dtype.element_ty)
            tl.store(weights_ptr + expert.to(tl.int64) * size + at, zeros, mask=at < size)
