"""Dense MLP as one autograd function, whose backward joins a product and the activation's gradient.

Letters: T tokens, D channels, F inner channels. Forward runs the same operations as the separate
layers, so its results have the same bits. It saves x and ``hidden = x W1^T``, but not the activation:
the joined gradient writes the activation again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd, nn
from torch.autograd.function import once_differentiable

from megatron_packed.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    main_grad_of,
    weight_grad,
)
from megatron_packed.ops.dense_mlp.api import JoinedGradient

NOT_LOCAL = "the projections are not those of this package"
BIAS = "the projections have a bias"
TENSOR_PARALLEL = "tensor-parallel ranks exchange rows around the projections"


def joined_mlp(
    x_TD: Tensor,
    w1_FD: Tensor,
    w2_DF: Tensor,
    activate: Callable[[Tensor], Tensor],
    gradient: JoinedGradient,
) -> Tensor:
    """Compute ``activate(x W1^T) W2^T``; backward calls ``gradient``.

    Gradients of weights are added to their ``main_grad``; without it, autograd accumulates them.
    """
    y_TD: Tensor = _JoinedMLP.apply(x_TD, w1_FD, w2_DF, activate, gradient)
    return y_TD


def reason_apart(first: nn.Module, activation: nn.Module, second: nn.Module) -> str:
    """Return the reason why the three modules of an MLP must be called; empty if there is none.

    Modules of TransformerEngine, modules that adapters put in place of a layer, and modules whose call
    was replaced or is observed compute or save something else.
    """
    for projection in (first, second):
        if type(projection) not in (ColumnParallelLinear, RowParallelLinear):
            return NOT_LOCAL
        if projection.bias is not None:
            return BIAS
        if projection.tp.size > 1:
            return TENSOR_PARALLEL
    if any(_is_observed(each) for each in (first, activation, second)):
        return "calls of the projections or of the activation are replaced or observed"
    return ""


def _is_observed(module: nn.Module) -> bool:
    """Return True if a call of the module runs more than the ``forward`` of its class."""
    return "forward" in vars(module) or any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


class _JoinedMLP(autograd.Function):
    """Autograd function of `joined_mlp`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w1_FD: Tensor,
        w2_DF: Tensor,
        activate: Callable[[Tensor], Tensor],
        gradient: JoinedGradient,
    ) -> Tensor:
        hidden_TF = F.linear(x_TD, w1_FD)
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, hidden_TF)
        ctx.main_grads = main_grad_of(w1_FD), main_grad_of(w2_DF)
        ctx.gradient = gradient
        return F.linear(activate(hidden_TF), w2_DF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w1_FD, w2_DF, hidden_TF = ctx.saved_tensors
        of_w1, of_w2 = ctx.main_grads
        needs_dx, needs_dw1, needs_dw2 = ctx.needs_input_grad[:3]
        dx_TD = dw1_FD = dw2_DF = None
        dhidden_TF, activated_TF = ctx.gradient(dy_TD, w2_DF, hidden_TF)
        if needs_dw2:
            dw2_DF = weight_grad(of_w2, dy_TD, activated_TF)
        del activated_TF
        if needs_dx:
            dx_TD = dhidden_TF @ w1_FD
        if needs_dw1:
            dw1_FD = weight_grad(of_w1, dhidden_TF, x_TD)
        return dx_TD, dw1_FD, dw2_DF, None, None
