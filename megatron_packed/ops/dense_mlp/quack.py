"""Gradient of squared ReLU in a product of quack (Hopper), for bf16.

flash-attn 4 installs quack. The kernel applies the derivative to the fp32 sums of the product, which
are rounded once. It also writes the activation again, so forward need not save it. On an H200 it
takes 0.81 to 0.84 of the time of the product and the kernel of the derivative. Kernels are compiled
on first use, in a few seconds, and kept in ``QUACK_CACHE_DIR`` (`config.environment_variables`).

The tile depends on the widths, and one program owns a tile. So a row depends on itself only, and
equal inputs give equal bits.
"""

from __future__ import annotations

import inspect
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from quack import gemm_interface as _quack
from quack.epilogue.library import dact_mod
from quack.gemm_config import GemmConfig
from torch import Tensor

from megatron_packed.ops.quack_tiles import CLUSTER_N, device_reasons, least_padded_tile

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import DenseMLPInputs

_ACTIVATION = "relu_sq"
_ALIGNMENT = 8
"""Required divisor of row lengths: each row must start at a multiple of 16 bytes (8 bfloat16)."""
_NEEDED = {"activation", "dynamic_scheduler", "tuned", "config"}
"""Arguments of quack's product that this module gives by name; later versions may change them."""
_PLANS_KEPT = 1024
_THREAD = threading.local()


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
        f"{name} ({size}) is not divisible by {_ALIGNMENT}"
        for name, size in (("hidden size", inputs.channels), ("inner size", inputs.inner))
        if size % _ALIGNMENT
    )
    return reasons + ([inputs.apart] if inputs.apart else [])


def gradient(dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``hidden`` and its activation. See `api.JoinedGradient`."""
    if not hidden_TF.shape[0]:
        return torch.empty_like(hidden_TF), torch.empty_like(hidden_TF)
    _bound_plans()
    _join_context(hidden_TF.device)
    dhidden_TF, activated_TF = _quack.gemm_dact(
        _aligned(dy_TD),
        _aligned(w2_DF),
        _aligned(hidden_TF),
        activation=_ACTIVATION,
        config=_config(least_padded_tile(hidden_TF.shape[1])),
        dynamic_scheduler=False,
        tuned=False,
    )
    return dhidden_TF, activated_TF


def _join_context(device: torch.device) -> None:
    """Make the GPU's context current in this thread, by the first kernel that the thread launches.

    quack asks the driver for the largest number of clusters, which needs a context. In autograd's thread
    this product may be the first work.
    """
    if not hasattr(_THREAD, "has_context"):
        torch.zeros(1, device=device)
        _THREAD.has_context = True


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous rows at an address that the TMA can read, a copy if needed."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


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


def _bound_plans() -> None:
    """Drop quack's launch plans if there are many: one for each number of rows.

    quack has no public way to bound them.
    """
    product = dact_mod(_ACTIVATION, has_scale=False, has_reduce=False)
    for plans in (product._call_cache, product._plan_cache):
        if len(plans) >= _PLANS_KEPT:
            plans.clear()
