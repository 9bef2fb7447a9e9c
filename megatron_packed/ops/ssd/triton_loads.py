# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Loads and stores of tiles of a chunk and of decay factors, and products of scaled tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_packed.ops.triton_loads import load, tile_of


@triton.jit
def load_tile(ptr, tile, mask, FULL: tl.constexpr):
    """Load the elements ``tile``, with zeros where the mask is False; FULL if it is True everywhere."""
    if FULL:
        value = tl.load(ptr + tile)
    else:
        value = load(ptr + tile, mask)
    return value


@triton.jit
def store_tile(ptr, tile, value, mask, FULL: tl.constexpr):
    """Store the elements ``tile`` in the dtype of ``ptr``; FULL as for `load_tile`."""
    if FULL:
        tl.store(ptr + tile, value)
    else:
        tl.store(ptr + tile, value, mask=mask)


@triton.jit
def load_rows(ptr, start, stride, token, column, mask, FULL: tl.constexpr = False):
    """Load the columns ``column`` of the rows ``start + token``; mask and FULL as for `load_tile`."""
    tile = tile_of(token, stride, column)
    return load_tile(ptr + start * stride, tile, mask, FULL)


@triton.jit
def store_rows(ptr, start, stride, token, column, mask, value):
    """Store a tile in the columns ``column`` of the rows ``start + token``, in the dtype of ``ptr``."""
    base = ptr + start * stride
    tile = tile_of(token, stride, column)
    tl.store(base + tile, value, mask=mask)


@triton.jit
def load_factors(ptr, plane, token):
    """Load the planes of `triton_steps.chunk_factors` for the tokens of a chunk."""
    step = tl.load(ptr + token)
    total = tl.load(ptr + plane + token)
    enter = tl.load(ptr + 2 * plane + token)
    rest = tl.load(ptr + 3 * plane + token)
    return step, total, enter, rest


@triton.jit
def add_products(total, scaled, b, PRECISE: tl.constexpr):
    """Return ``total`` plus the product of an fp32 tile and ``b``, with the tile in ``b``'s dtype.

    With PRECISE the tile is the sum of two values of 8 bits each, and both are multiplied.
    """
    if PRECISE:
        # The upper half of the bits of an fp32 number is a bf16 number.
        high = (scaled.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        total = tl.dot((scaled - high).to(b.dtype), b, total)
        scaled = high
    return tl.dot(scaled.to(b.dtype), b, total)
