# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernel that adds low-rank updates to rows sorted by expert, in place.

A grouped product would write the updates as a second tensor of the size of the rows, and another
kernel would add it. The inner width of an update is small, so memory decides about the time. This
kernel reads and writes each row once.

A program owns a tile of the result. It goes through the experts that have rows in the tile, with the
rows of the others masked. So a row's result depends only on the row, and equal inputs give equal bits.
The grid has a static size, and the offsets are read on the device.

Letters: R rows, O columns, E experts, P inner width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, rows_at, tile_of

_ROWS, _COLUMNS = 64, 128
_INNER = (16, 64)
"""Least and largest part of the inner width that one step multiplies."""
_NO_EXPERT = 2**31 - 1


def add_low_rank_(y_RO: Tensor, low_RP: Tensor, factor_EPO: Tensor, offsets_E: Tensor) -> Tensor:
    """Add ``low[r] factor_e`` to each row r of expert e, in place, and return the rows.

    The sum is in fp32 and rounded once. Rows from the last offset on are neither read nor written.

    Args:
        y_RO: ``(R, O)`` sorted by expert, contiguous.
        low_RP: ``(R, P)``, contiguous.
        factor_EPO: ``(E, P, O)`` with any strides.
        offsets_E: ``(E,)`` int32 on the device: row number after the last row of each expert.
    """
    rows, width = y_RO.shape
    experts, inner, _ = factor_EPO.shape
    least, most = _INNER
    if rows:
        _low_rank_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
            y_RO,
            low_RP,
            factor_EPO,
            offsets_E,
            width,
            *factor_EPO.stride(),
            INNER=inner,
            EXPERTS=experts,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_R=_ROWS,
            BLOCK_O=_COLUMNS,
            BLOCK_P=min(max(triton.next_power_of_2(inner), least), most),
            NO_EXPERT=_NO_EXPERT,
        )
    return y_RO


@triton.jit
def _low_rank_kernel(
    y_ptr,
    low_ptr,
    factor_ptr,
    offsets_ptr,
    width,
    expert_stride,
    inner_stride,
    column_stride,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NO_EXPERT: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_R
    last = tl.minimum(first + BLOCK_R, tl.load(offsets_ptr + EXPERTS - 1))
    if first < last:
        number = tl.arange(0, BLOCK_E)
        ends = tl.load(offsets_ptr + number, mask=number < EXPERTS, other=NO_EXPERT)
        lowest = tl.sum((ends <= first).to(tl.int32), 0)
        highest = tl.sum((ends < last).to(tl.int32), 0)
        row = first + tl.arange(0, BLOCK_R)
        column = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        total = tl.zeros((BLOCK_R, BLOCK_O), tl.float32)
        for step in range(highest - lowest + 1):
            expert = lowest + step
            start = load(offsets_ptr + expert - 1, expert > 0)
            mine = (row >= start) & (row < tl.load(offsets_ptr + expert))
            matrix_ptr = factor_ptr + expert.to(tl.int64) * expert_stride
            for begin in range(0, INNER, BLOCK_P):
                inner = begin + tl.arange(0, BLOCK_P)
                low = load(
                    rows_at(low_ptr, row.to(tl.int64), INNER, inner), mask_of(mine, inner < INNER)
                )
                at = inner[:, None] * inner_stride + column[None, :] * column_stride
                factor = load(matrix_ptr + at, mask_of(inner < INNER, column < width))
                total = tl.dot(low, factor, total)
        at = y_ptr + tile_of(row.to(tl.int64), width, column)
        mask = mask_of(row < last, column < width)
        tl.store(at, (load_fp32(at, mask) + total).to(y_ptr.dtype.element_ty), mask=mask)
