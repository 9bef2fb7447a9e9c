# mypy: disable-error-code="untyped-decorator"
"""Products of quack (Hopper) whose kernels also compute functions of the results, for bf16.

flash-attn 4 installs quack. Kernels are compiled on first use, in a few seconds, and kept in
``QUACK_CACHE_DIR`` (`config.environment_variables`). The tile depends on the widths, and one program
owns a tile. So a row depends on itself only, and equal inputs give equal bits.

[Note: bits of the joined products]
Results of a product are rounded to bf16 before the kernel uses them, as if a second kernel read them.
So outputs and gradients have the bits of the same product and a kernel of the activation. quack's own
``gemm_act`` and ``gemm_dact`` use the fp32 sums.

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
    bound_plans,
    join_context,
    least_padded_tile,
    version_reasons,
)

_NEEDED = {"cu_seqlens_m", "dynamic_scheduler", "tuned", "config"}


@gemm_epilogue(outputs=("activated",))
def _squared_relu(acc: Any) -> dict[str, Any]:
    """Return the product, and the square of its rounded positive values, which backward squares too.

    NaN stays NaN. See [Note: names of epilogues].
    """
    positive = fmax(acc, 0.0, nan=True).to(BFloat16).to(Float32)
    return {"D": acc, "activated": positive * positive}


@gemm_epilogue(outputs=("activated",))
def _squared_relu_gradient(acc: Any, c: Any) -> dict[str, Any]:
    """Return the product times the derivative of squared ReLU at ``c``, and the squared ReLU of ``c``.

    See [Note: bits of the joined products] and [Note: names of epilogues].
    """
    result = acc.to(BFloat16).to(Float32)
    positive = fmax(c, 0.0, nan=True)
    # In another order of the factors the kernel needs more registers than it has.
    return {"D": result * positive * 2.0, "activated": positive * positive}


def not_supported_reasons() -> list[str]:
    """Return the reason why the installed quack does not serve; empty if it does."""
    return version_reasons(type(_squared_relu).__call__, _NEEDED)


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
    return _launch(_squared_relu, x_RD, aligned(w1).mT, bounds=bounds, tiles=TOKEN_TILES)


def squared_relu_gradient(
    dy_RD: Tensor, w2: Tensor, hidden_RF: Tensor, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``hidden``, and its squared ReLU with the bits of forward.

    Args:
        dy_RD: ``(R, D)``, gradient of ``activated W2^T``.
        w2: ``(D, F)``; for experts ``(E, D, F)``.
        hidden_RF: ``(R, F)``.
        bounds: see `squared_relu_product`.
    """
    return _launch(_squared_relu_gradient, dy_RD, aligned(w2), hidden_RF, bounds=bounds)


def _launch(
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
    left_RI, weight, *epilogue_operands = operands
    rows, columns = left_RI.shape[0], weight.shape[-1]
    if not rows:
        return left_RI.new_empty(rows, columns), left_RI.new_empty(rows, columns)
    bound_plans(product._call_cache, product._plan_cache)
    join_context(left_RI.device)
    outputs = product(
        aligned(left_RI),
        weight,
        *map(aligned, epilogue_operands),
        cu_seqlens_m=bounds,
        config=_config(least_padded_tile(columns, tiles=tiles)),
        dynamic_scheduler=False,
        tuned=False,
    )
    return outputs["D"], outputs["activated"]


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
