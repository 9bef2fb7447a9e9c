"""Sizes of the Triton kernels' programs, and the numbers of programs.

They depend only on shapes and dtypes. There is no tuning, so equal inputs give equal bits in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from megatron_packed.ops.gated_delta_rule.tables import CHUNK, DeltaRuleTables
from megatron_packed.ops.triton_mode import splits_into_bf16

_SPARE_PROGRAMS = 16
"""Programs beyond T / 64, for documents whose last chunk is not whole."""


class Tiles(NamedTuple):
    """Sizes of a program, and the precision of its products."""

    values: int
    """Value channels of a program; the scores have none."""
    warps: int
    stages: int
    """Chunks whose tiles are in shared memory at a time; blocks of value channels for gradients of q and k."""
    precision: str
    """Precision of products of fp32 tiles; it has no effect on products of bf16 tiles."""

    def constants(self, heads: int, key_dim: int, value_dim: int) -> dict[str, int | str]:
        """Return the arguments of a launch that say the sizes of a program and of the value heads."""
        return {
            "K": key_dim,
            "V": value_dim,
            "BLOCK_K": key_block(key_dim),
            "BLOCK_V": self.values,
            "HEADS": heads,
            "STAGES": self.stages,
            "PRECISION": self.precision,
            "num_warps": self.warps,
        }


# Products of three parts have the precision of fp32. Two parts are enough where no state is passed on.
_THREE_PARTS, _TWO_PARTS = ("bf16x6", "bf16x3") if splits_into_bf16() else ("tf32x3", "tf32x3")
BF16, FP32 = torch.bfloat16, torch.float32
TILES = {
    (BF16, BF16): {
        "scores": Tiles(0, 4, 1, "tf32"),
        "outputs": Tiles(64, 4, 2, "tf32"),
        "states": Tiles(128, 8, 2, "tf32"),
        "back": Tiles(64, 4, 2, "tf32"),
        "queries": Tiles(64, 4, 2, "tf32"),
        "keys": Tiles(128, 4, 1, "tf32"),
        "joints": Tiles(16, 4, 2, "tf32"),
    },
    (BF16, FP32): {
        "scores": Tiles(0, 4, 1, _THREE_PARTS),
        "outputs": Tiles(64, 4, 1, _THREE_PARTS),
        "states": Tiles(64, 4, 1, _THREE_PARTS),
        "back": Tiles(64, 4, 1, _THREE_PARTS),
        "queries": Tiles(64, 4, 1, _TWO_PARTS),
        "keys": Tiles(64, 4, 1, _TWO_PARTS),
        "joints": Tiles(16, 4, 1, _THREE_PARTS),
    },
    (FP32, FP32): {
        "scores": Tiles(0, 4, 1, "tf32x3"),
        "outputs": Tiles(16, 4, 1, "tf32x3"),
        "states": Tiles(16, 4, 1, "tf32x3"),
        "back": Tiles(16, 4, 1, "tf32x3"),
        "queries": Tiles(16, 4, 1, "tf32x3"),
        "keys": Tiles(16, 4, 1, "tf32x3"),
        "joints": Tiles(16, 4, 1, "tf32x3"),
    },
}
"""Sizes of each kernel by the dtypes of inputs and of tiles. They are constants, so equal inputs give
equal bits in each run."""


def tiles_of(kernel: str, dtype: torch.dtype, of_tiles: torch.dtype, value_dim: int) -> Tiles:
    """Return the sizes of a kernel; a value head dimension below the block makes the block smaller.

    Args:
        dtype: dtype of the inputs.
        of_tiles: dtype of the tiles.
    """
    tiles = TILES[dtype, of_tiles][kernel]
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
