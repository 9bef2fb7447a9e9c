"""Sizes of the Triton kernels' programs, and the numbers of programs.

They depend only on shapes and dtypes. There is no tuning, so equal inputs give equal bits in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables

_SPARE_PROGRAMS = 16
"""Programs beyond T / 64, for documents whose last chunk is not whole."""


class Tiles(NamedTuple):
    """Sizes of a program."""

    values: int
    """Value channels of a program."""
    warps: int
    stages: int
    """Chunks whose tiles are in shared memory at a time."""


TILES = {
    torch.bfloat16: {
        "outputs": Tiles(64, 4, 2),
        "states": Tiles(64, 4, 2),
        "back": Tiles(64, 4, 2),
        "queries": Tiles(64, 8, 3),
        "keys": Tiles(64, 8, 3),
    },
    torch.float32: {
        "outputs": Tiles(16, 4, 1),
        "states": Tiles(16, 4, 1),
        "back": Tiles(16, 4, 1),
        "queries": Tiles(16, 4, 1),
        "keys": Tiles(16, 4, 1),
    },
}
"""Sizes of each kernel by dtype. They are constants, so equal inputs give equal bits in each run."""


def tiles_of(kernel: str, dtype: torch.dtype, value_dim: int) -> Tiles:
    """Return the sizes of a kernel; a value head dimension below the block makes the block smaller."""
    tiles = TILES[dtype][kernel]
    return tiles._replace(values=min(tiles.values, max(triton.next_power_of_2(value_dim), 16)))


def chunk_programs(tokens: int, tables: DeltaRuleTables) -> int:
    """Return the number of programs that share the chunks of a pack.

    It suffices for one chunk per program if the pack has at most 16 documents. With more documents
    some programs compute several chunks. So spare capacity in documents starts few idle programs.
    """
    enough: int = triton.cdiv(tokens, CHUNK) + _SPARE_PROGRAMS
    return min(tables.start_Q.shape[0], enough)


def key_block(key_dim: int) -> int:
    """Return the width of the tiles of q and k, a power of 2 that is at least 16."""
    block: int = triton.next_power_of_2(key_dim)
    return max(block, 16)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of fp32 tiles; it has no effect on products of bf16 tiles."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
