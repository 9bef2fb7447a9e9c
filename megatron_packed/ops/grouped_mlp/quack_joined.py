# mypy: disable-error-code="no-untyped-call"
"""MLPs of the experts by products of quack (Hopper) that compute squared ReLU too, for bf16.

In forward, the kernel of the first product writes ``hidden`` and its activation. In backward, the
kernel of ``dy W2`` applies the derivative at ``hidden`` and writes the activation again. So forward
does not save the activation. The other four products are those of `quack`.

All outputs and gradients have the bits of `quack`. They do not depend on options that make the steps
separate, for example offload.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs
from megatron_packed.ops.grouped_mlp.grouped_linear import row_bounds, weight_gradient
from megatron_packed.ops.grouped_mlp.late_gradients import LateGradient, late_gradient_of
from megatron_packed.ops.grouped_mlp.on_meta import reasons_to_keep_apart
from megatron_packed.ops.grouped_mlp.quack import PRODUCTS
from megatron_packed.ops.grouped_mlp.quack import not_supported_reasons as reasons_of_products
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_
from megatron_packed.ops.quack_epilogues import (
    not_supported_reasons as reasons_of_epilogues,
)
from megatron_packed.ops.quack_epilogues import squared_relu_gradient, squared_relu_product
from megatron_packed.ops.quack_tiles import aligned


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why these products do not support these inputs; empty if they do."""
    of_products = reasons_of_epilogues() + reasons_of_products(inputs)
    return of_products + reasons_to_keep_apart(inputs)


def run(x_RD: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the op with squared ReLU; see `api.grouped_mlp`.

    Gradients of weights are added to their ``main_grad``; without it, autograd accumulates them.
    """
    main_grads = (getattr(weight, "main_grad", None) for weight in (w1_EFD, w2_EDF))
    late = late_gradient_of(w1_EFD), late_gradient_of(w2_EDF)
    y_RD: Tensor = _JoinedExperts.apply(x_RD, w1_EFD, w2_EDF, *main_grads, *late, offsets_E)
    return y_RD


class _JoinedExperts(torch.autograd.Function):
    """Autograd function of `run`; saves x and ``hidden``, but not the activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        w1_EFD: Tensor,
        w2_EDF: Tensor,
        main_grad_w1: Tensor | None,
        main_grad_w2: Tensor | None,
        late_w1: LateGradient | None,
        late_w2: LateGradient | None,
        offsets_E: Tensor,
    ) -> Tensor:
        x_RD = aligned(x_RD)
        hidden_RF, activated_RF = squared_relu_product(x_RD, w1_EFD, row_bounds(offsets_E))
        ctx.save_for_backward(x_RD, w1_EFD, w2_EDF, hidden_RF, offsets_E)
        ctx.main_grads = main_grad_w1, main_grad_w2
        ctx.late = late_w1, late_w2
        y_RD = PRODUCTS.rows(activated_RF, w2_EDF.transpose(1, 2), offsets_E)
        return zero_rows_after_(y_RD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w1_EFD, w2_EDF, hidden_RF, offsets_E = ctx.saved_tensors
        (of_w1, of_w2), (late_w1, late_w2) = ctx.main_grads, ctx.late
        needs_dx, needs_dw1, needs_dw2 = ctx.needs_input_grad[:3]
        dx_RD = dw1_EFD = dw2_EDF = None
        dy_RD = aligned(dy_RD)
        dhidden_RF, activated_RF = squared_relu_gradient(
            dy_RD, w2_EDF, hidden_RF, row_bounds(offsets_E)
        )
        if needs_dw2:
            dw2_EDF = weight_gradient(PRODUCTS, of_w2, dy_RD, activated_RF, offsets_E, late_w2)
        del activated_RF
        if needs_dx:
            dx_RD = zero_rows_after_(PRODUCTS.rows(dhidden_RF, w1_EFD, offsets_E), offsets_E)
        if needs_dw1:
            dw1_EFD = weight_gradient(PRODUCTS, of_w1, dhidden_RF, x_RD, offsets_E, late_w1)
        return dx_RD, dw1_EFD, dw2_EDF, *(None,) * 5
