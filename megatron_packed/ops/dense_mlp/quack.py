"""Squared ReLU and its gradient in products of quack (Hopper), for bf16. See `quack_epilogues`.

The kernel of forward writes the product and the activation of its rounded values. The kernel of
backward applies the derivative to the fp32 sums of its product, which are rounded once. It also writes
the activation again, so forward need not save it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from quack import gemm_interface as _quack
from quack.epilogue.library import dact_mod
from torch import Tensor

from megatron_packed.ops.quack_epilogues import bound_plans, schedule, squared_relu_product
from megatron_packed.ops.quack_tiles import (
    ALIGNMENT,
    aligned,
    device_reasons,
    join_context,
    version_reasons,
)

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import DenseMLPInputs

_ACTIVATION = "relu_sq"
_NEEDED = {"activation", "dynamic_scheduler", "tuned", "config"}
"""Arguments of quack's product that this package gives by name; later versions may change them."""
JOINS = True


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return the reasons why quack's product does not support these inputs; empty if it does."""
    reasons = version_reasons(_quack.gemm_dact, _NEEDED) + device_reasons(inputs.device_type)
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


def hidden_and_activation(x_TD: Tensor, w1_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x W1^T`` and its activation. See `api.JoinedProducts`."""
    return squared_relu_product(x_TD, w1_FD)


def gradient(dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``hidden`` and its activation. See `api.JoinedProducts`."""
    if not hidden_TF.shape[0]:
        return torch.empty_like(hidden_TF), torch.empty_like(hidden_TF)
    bound_plans(dact_mod(_ACTIVATION, has_scale=False, has_reduce=False))
    join_context(hidden_TF.device)
    dhidden_TF, activated_TF = _quack.gemm_dact(
        aligned(dy_TD),
        aligned(w2_DF),
        aligned(hidden_TF),
        activation=_ACTIVATION,
        **schedule(hidden_TF.shape[1]),
    )
    return dhidden_TF, activated_TF
