# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Addresses, offsets and masks of tiles in Triton kernels, and masked loads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointers, mask):
    """Load elements, with zeros where the mask is False."""
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_fp32(pointers, mask):
    """Load elements as fp32, with zeros where the mask is False."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tile_of(rows, stride, columns):
    """Return the offsets of the elements ``columns`` of rows that are ``stride`` apart."""
    return rows[:, None] * stride + columns[None, :]


@triton.jit
def rows_at(pointer, rows, stride, columns):
    """Return the addresses of the elements ``columns`` of rows that are ``stride`` apart."""
    return pointer + rows[:, None] * stride + columns[None, :]


@triton.jit
def mask_of(rows, columns):
    """Return the mask of a tile: True where that of the row and that of the column are True."""
    return rows[:, None] & columns[None, :]
