# mypy: disable-error-code="untyped-decorator"
"""Squared ReLU and its gradient in products of quack (Hopper), for bf16.

flash-attn 4 installs quack. The kernel of forward writes the product and the activation of its rounded
values. The kernel of backward applies the derivative to the fp32 sums of its product, which are rounded
once. It also writes the activation again, so forward need not save it. Kernels are compiled on first
use, in a few seconds, and kept in ``QUACK_CACHE_DIR`` (`config.environment_variables`).

The tile depends on the widths, and one program owns a tile. So a row depends on itself only, and
equal inputs give equal bits.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
import torch
from quack import gemm_interface as _quack
from quack.activation import relu_sq
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import dact_mod
from quack.gemm_config import GemmConfig
from torch import Tensor

from megatron_packed.ops.quack_tiles import (
    ALIGNMENT,
    CLUSTER_N,
    TOKEN_TILES,
    aligned,
    device_reasons,
    join_context,
    least_padded_tile,
)

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import DenseMLPInputs

_ACTIVATION = "relu_sq"
_NEEDED = {"activation", "dynamic_scheduler", "tuned", "config"}
"""Arguments of quack's product that this module gives by name; later versions may change them."""
_PLANS_KEPT = 1024
JOINS = True


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return the reasons why quack's product does not support these inputs; empty if it does."""
    reasons = []
    if missing := _NEEDED - set(inspect.signature(_quack.gemm_dact).parameters):
        reasons.append(f"this version of quack-kernels has no {sorted(missing)}; 0.6.5 works")
    reasons += device_reasons(inputs.device_type)
    if inputs.kind != "squared_relu":
        reasons.append(f"the derivative is that of squared_relu, not of {inputs.kind}")
    if inputs.dtype != torch.bfloat16:
        reasons.append(f"rows and weights must be bfloat16, not {inputs.dtype}")
    reasons.extend(
        f"{name} ({size}) is not divisible by {ALIGNMENT}"
        for name, size in (("hidden size", inputs.channels), ("inner size", inputs.inner))
        if size % ALIGNMENT
    )
    return reasons + ([inputs.apart] if inputs.apart else [])


@gemm_epilogue(outputs=("mAuxOut",))
def _squared_relu(acc: Any) -> dict[str, Any]:
    """Store the product and the square of its rounded positive values, which backward squares too."""
    hidden = acc.to(cutlass.BFloat16).to(cutlass.Float32)
    return {"D": acc, "mAuxOut": relu_sq(hidden)}


def hidden_and_activation(x_TD: Tensor, w1_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x W1^T`` and its activation. See `api.JoinedProducts`."""
    # Not one storage: the activation is freed long before the hidden values.
    hidden_TF = torch.empty(x_TD.shape[0], w1_FD.shape[0], dtype=x_TD.dtype, device=x_TD.device)
    activated_TF = torch.empty_like(hidden_TF)
    if x_TD.shape[0]:
        _bound_plans(_squared_relu)
        join_context(x_TD.device)
        _squared_relu(
            aligned(x_TD),
            aligned(w1_FD).t(),
            out={"D": hidden_TF, "mAuxOut": activated_TF},
            config=_config(least_padded_tile(w1_FD.shape[0], tiles=TOKEN_TILES)),
            tuned=False,
        )
    return hidden_TF, activated_TF


def gradient(dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``hidden`` and its activation. See `api.JoinedProducts`."""
    if not hidden_TF.shape[0]:
        return torch.empty_like(hidden_TF), torch.empty_like(hidden_TF)
    _bound_plans(dact_mod(_ACTIVATION, has_scale=False, has_reduce=False))
    join_context(hidden_TF.device)
    dhidden_TF, activated_TF = _quack.gemm_dact(
        aligned(dy_TD),
        aligned(w2_DF),
        aligned(hidden_TF),
        activation=_ACTIVATION,
        config=_config(least_padded_tile(hidden_TF.shape[1])),
        dynamic_scheduler=False,
        tuned=False,
    )
    return dhidden_TF, activated_TF


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


def _bound_plans(product: Any) -> None:
    """Drop quack's launch plans of a product if there are many: one for each number of rows.

    quack has no public way to bound them.
    """
    for plans in (product._call_cache, product._plan_cache):
        if len(plans) >= _PLANS_KEPT:
            plans.clear()
