"""Bound of the element offsets of mamba-ssm's kernels, which compute offsets in 32 bits.

An offset of 2^31 or more wraps around without an error. `mamba_ssm` avoids this by running the heads
in several pieces. The overflow was reported for wide models from 40,960 tokens on
(state-spaces/mamba issue 1015). The functions of this module use no device.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from torch import Tensor

from megatron_packed.ops.ssd.api import SSDInputs

OFFSET_LIMIT = 2**31 - 1
"""Largest element offset that a kernel can compute without overflow."""

_SMALLEST_TILE = 32
_MULTIPROCESSORS = 256
"""Upper bound of a GPU's multiprocessors (H200 132, RTX PRO 6000 188).

The backward kernels allocate partial sums for at most this many additional chunks.
"""


def largest_offset(inputs: SSDInputs) -> int:
    """Return an upper bound of the element offsets in all tensors, forward and backward.

    Example:
        131,072 tokens, 256 heads of 64, 8 groups, state 128, chunks of 128, contiguous:
            2,147,483,648, which exceeds the limit by one.
    """
    chunks = ceil(inputs.tokens / inputs.chunk_size)
    rows = chunks * inputs.chunk_size
    splits = _MULTIPROCESSORS * inputs.chunk_size
    tiles = ceil(max(inputs.head_dim, inputs.state_dim, inputs.chunk_size) / _SMALLEST_TILE)
    return max(
        # x, y, B and C, and their gradients
        rows * max(inputs.row_stride, inputs.heads * inputs.head_dim),
        # C B^T, and partial sums of the gradients of B and C
        (rows * inputs.groups + splits) * max(inputs.state_dim, inputs.chunk_size),
        # states of all chunks
        chunks * inputs.heads * inputs.head_dim * inputs.state_dim,
        # partial sums of the gradient of the restarting sums
        inputs.heads * rows * tiles,
    )


def pieces(inputs: SSDInputs) -> int:
    """Return the smallest number of equal pieces of the heads without an overflow of offsets.

    Each piece is a contiguous copy. Return 0 if even one head at a time overflows.
    """
    for count in range(1, inputs.heads + 1):
        if inputs.heads % count or (inputs.groups % count and count % inputs.groups):
            continue
        heads, groups = inputs.heads // count, max(inputs.groups // count, 1)
        row_stride = max(heads * inputs.head_dim, groups * inputs.state_dim)
        if (
            largest_offset(replace(inputs, heads=heads, groups=groups, row_stride=row_stride))
            <= OFFSET_LIMIT
        ):
            return count
    return 0


def piece(arguments: tuple[Tensor, ...], i: int, count: int) -> tuple[Tensor, ...]:
    """Return piece ``i`` of ``count`` of the heads: parts of (x, dt, A_log, B, C, D, dt_bias)."""
    x, dt, A_log, B, C, D, dt_bias = arguments
    heads, groups = x.shape[1], B.shape[1]
    per_head = slice(i * heads // count, (i + 1) * heads // count)
    first = i * groups // count
    per_group = slice(first, first + max(groups // count, 1))
    return (
        x[:, per_head].contiguous(),
        dt[:, per_head],
        A_log[per_head],
        B[:, per_group].contiguous(),
        C[:, per_group].contiguous(),
        D[per_head],
        dt_bias[per_head],
    )
