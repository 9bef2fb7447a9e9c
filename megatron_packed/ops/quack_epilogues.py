# mypy: disable-error-code="untyped-decorator"
"""Products of quack (Hopper) whose kernels also compute functions of the results, for bf16.

flash-attn 4 installs quack. Kernels are compiled on first use, in a few seconds, and kept in
``QUACK_CACHE_DIR`` (`config.environment_variables`). The tile depends on the widths, and one program
owns a tile. So a row depends on itself only, and equal inputs give equal bits.

[Note: names of epilogues]
quack knows a function of an installed package by its name only, also in its cache of kernels on disk.
So a function with other results needs another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cutlass import BFloat16, Float32
from cutlass.cute.arch import fmax
from quack.epilogue import gemm_epilogue
from quack.gemm_config import GemmConfig
from torch import Tensor

from megatron_packed.ops.quack_tiles import (
    CLUSTER_N,
    TILES,
    TOKEN_TILES,
    aligned,
    join_context,
    least_padded_tile,
)

_PLANS_KEPT = 1024


@gemm_epilogue(outputs=("activated",))
def _squared_relu(acc: Any) -> dict[str, Any]:
    """Return the product, and the square of its rounded positive values, which backward squares too.

    NaN stays NaN. See [Note: names of epilogues].
    """
    positive = fmax(acc, 0.0, nan=True).to(BFloat16).to(Float32)
    return {"D": acc, "activated": positive * positive}


def squared_relu_product(
    x_RD: Tensor, w1: Tensor, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``hidden = x W1^T`` and its squared ReLU, which has the bits of the op ``activation``.

    Args:
        x_RD: ``(R, D)`` rows.
        w1: ``(F, D)``; for experts ``(E, F, D)``.
        bounds: for experts, ``(E + 1,)`` int32 on the device: the first row of each expert and the row
            after the last one. Rows after it are neither read nor written.
    """
    return launch(_squared_relu, x_RD, aligned(w1).mT, bounds=bounds, tiles=TOKEN_TILES)


def launch(
    product: Any,
    *operands: Tensor,
    bounds: Tensor | None,
    tiles: Sequence[tuple[int, int]] = TILES,
) -> tuple[Tensor, Tensor]:
    """Run a product of quack with an epilogue, and return its result and the ``activated`` values.

    Args:
        product: object of quack.
        operands: rows, weight and, if the epilogue reads it, a tensor like the result.
        bounds: see `squared_relu_product`.
        tiles: rows and columns of the tiles to choose from.
    """
    left_RI, weight, *more = operands
    rows, columns = left_RI.shape[0], weight.shape[-1]
    if not rows:
        return left_RI.new_empty(rows, columns), left_RI.new_empty(rows, columns)
    bound_plans(product)
    join_context(left_RI.device)
    found = product(
        aligned(left_RI),
        weight,
        *map(aligned, more),
        cu_seqlens_m=bounds,
        **schedule(columns, tiles),
    )
    return found["D"], found["activated"]


def schedule(columns: int, tiles: Sequence[tuple[int, int]] = TILES) -> dict[str, Any]:
    """Return the arguments of a product that set its tile, by the columns of the result."""
    config = _config(least_padded_tile(columns, tiles=tiles))
    return {"config": config, "dynamic_scheduler": False, "tuned": False}


@lru_cache
def _config(tile: tuple[int, int]) -> Any:
    """Return quack's description of a tile, always the same object: quack's plans refer to it."""
    return GemmConfig(
        tile_m=tile[0],
        tile_n=tile[1],
        pingpong=True,
        cluster_m=1,
        cluster_n=CLUSTER_N,
        is_dynamic_persistent=False,
    )


def bound_plans(product: Any) -> None:
    """Drop quack's launch plans of a product if there are many: one for each number of rows.

    quack has no public way to bound them.
    """
    for plans in (product._call_cache, product._plan_cache):
        if len(plans) >= _PLANS_KEPT:
            plans.clear()
