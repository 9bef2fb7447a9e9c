"""Tiles of the products of quack on Hopper, chosen by the shape of the output, and where they serve."""

from __future__ import annotations

from math import ceil

import torch

TILES = ((128, 192), (192, 128), (128, 128))
"""Rows and columns of the tiles, the fastest for exact multiples first.

For each of 18 products of six sizes on an H200, the tile of `least_padded_tile` is the fastest of nine
tilings or up to 2 % slower.
"""
CLUSTER_N = 2


def device_reasons(device_type: str) -> list[str]:
    """Return the reasons why these tiles do not serve on this type of device; empty if they do."""
    if device_type != "cuda":
        return [f"the kernels run on CUDA devices, not on {device_type}"]
    if not torch.cuda.is_available():
        return ["this machine has no GPU that CUDA can use"]
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        return [f"the tiles are those of compute capability 9.x, found {capability}"]
    return []


def least_padded_tile(columns: int, rows: int | None = None) -> tuple[int, int]:
    """Return the tile that pads the output least, the first of several in `TILES`.

    Args:
        columns: columns of the output.
        rows: rows of a weight gradient; None if rows are tokens, whose number may differ in each
            step. Then only columns are padded.

    Example:
        1,024 columns are 8 tiles of 128, but 6 tiles of 192 are 1,152. So the tile is 192 x 128.
    """

    def padded(tile: tuple[int, int]) -> int:
        of_columns = ceil(columns / (tile[1] * CLUSTER_N)) * tile[1] * CLUSTER_N
        return of_columns * (1 if rows is None else ceil(rows / tile[0]) * tile[0])

    return min(TILES, key=padded)
