"""Tiles of quack's products on Hopper, and the GPUs and tensors that they serve."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, MutableMapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

TILES = ((128, 192), (192, 128), (128, 128))
"""Rows and columns of the tiles, the fastest for exact multiples first.

For each of 18 products of six sizes on an H200, the tile of `least_padded_tile` is the fastest of nine
tilings or up to 2 % slower.
"""
TOKEN_TILES = ((128, 192), (128, 128))
"""Tiles of products that also read or write a second tensor, with tokens as rows.

For six such products of three sizes on an H100, the tile of `least_padded_tile` is the fastest of
seven or up to 1 % slower.
"""
CLUSTER_N = 2
SCHEDULE = {"cluster_M": 1, "cluster_N": CLUSTER_N, "pingpong": True}
"""Arguments of ``quack.gemm.gemm`` that go with every tile."""
ALIGNMENT = 8
"""Required divisor of row lengths: each row must start at a multiple of 16 bytes (8 bfloat16)."""
_PLANS_KEPT = 1024
_THREAD = threading.local()


def version_reasons(product: Callable[..., Any], needed: set[str]) -> list[str]:
    """Return the reason why the installed quack does not serve; empty if it does.

    Args:
        product: function of quack.
        needed: arguments that callers give by name; later versions may change them.
    """
    missing = needed - set(inspect.signature(product).parameters)
    works = "this version of quack-kernels has no {}; 0.6.5 works"
    return [works.format(sorted(missing))] if missing else []


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


def alignment_reasons(**sizes: int) -> list[str]:
    """Return the sizes of rows that `ALIGNMENT` does not divide, with words for underscores."""
    return [
        f"{name.replace('_', ' ')} ({size}) is not divisible by {ALIGNMENT}"
        for name, size in sizes.items()
        if size % ALIGNMENT
    ]


def bound_plans(*caches: MutableMapping[Any, Any]) -> None:
    """Empty quack's caches of launch plans that are large: they get a plan for each number of rows.

    The number of rows may differ in each step, and quack has no public way to bound its caches.
    """
    for plans in caches:
        if len(plans) >= _PLANS_KEPT:
            plans.clear()


def join_context(device: torch.device) -> None:
    """Make the GPU's context current in this thread, by the first kernel that the thread launches.

    quack asks the driver for the largest number of clusters, which needs a context. In autograd's thread
    a product of quack may be the first work.
    """
    if not hasattr(_THREAD, "has_context"):
        torch.zeros(1, device=device)
        _THREAD.has_context = True


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous rows at an address that the TMA can read, a copy if needed."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def least_padded_tile(
    columns: int, rows: int | None = None, tiles: Sequence[tuple[int, int]] = TILES
) -> tuple[int, int]:
    """Return the tile that pads the output least, the first of several in ``tiles``.

    Args:
        columns: columns of the output.
        rows: rows of a weight gradient; None if rows are tokens, whose number may differ in each
            step. Then only columns are padded.
        tiles: rows and columns of the tiles to choose from.

    Example:
        1,024 columns are 8 tiles of 128, but 6 tiles of 192 are 1,152. So the tile is 192 x 128.
    """

    def padded(tile: tuple[int, int]) -> int:
        of_columns = ceil(columns / (tile[1] * CLUSTER_N)) * tile[1] * CLUSTER_N
        return of_columns * (1 if rows is None else ceil(rows / tile[0]) * tile[0])

    return min(tiles, key=padded)
