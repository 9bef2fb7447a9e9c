"""Dense MLP as one autograd function, whose products also compute the activation and its gradient.

Letters: T tokens, D channels, F inner channels. Forward saves x and ``hidden = x W1^T``, but not the
activation: backward computes the activation again.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable

from megatron_packed.layers.linear import JoinedResidual, main_grad_of, weight_grad
from megatron_packed.ops.dense_mlp.api import JoinedProducts
from megatron_packed.ops.residual_projection.api import AddedProduct


def joined_mlp(
    x_TD: Tensor,
    w1_FD: Tensor,
    w2_DF: Tensor,
    products: JoinedProducts,
    joined: JoinedResidual | None = None,
) -> Tensor:
    """Compute ``activation(x W1^T) W2^T`` with ``products``, plus the residual of ``joined``.

    Gradients of weights are added to their ``main_grad``; without it, autograd accumulates them.
    """
    residual_TD, product = (None, None) if joined is None else joined
    y_TD: Tensor = _JoinedMLP.apply(  # type: ignore[no-untyped-call]
        x_TD, w1_FD, w2_DF, residual_TD, products, product
    )
    return y_TD


class _JoinedMLP(autograd.Function):
    """Autograd function of `joined_mlp`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w1_FD: Tensor,
        w2_DF: Tensor,
        residual_TD: Tensor | None,
        products: JoinedProducts,
        product: AddedProduct | None,
    ) -> Tensor:
        hidden_TF, activated_TF = products.hidden_and_activation(x_TD, w1_FD)
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, hidden_TF)
        ctx.main_grads = main_grad_of(w1_FD), main_grad_of(w2_DF)
        ctx.products = products
        if product is None:
            return F.linear(activated_TF, w2_DF)
        return product(residual_TD, activated_TF, w2_DF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w1_FD, w2_DF, hidden_TF = ctx.saved_tensors
        of_w1, of_w2 = ctx.main_grads
        needs_dx, needs_dw1, needs_dw2 = ctx.needs_input_grad[:3]
        dx_TD = dw1_FD = dw2_DF = None
        dhidden_TF, activated_TF = ctx.products.gradient(dy_TD, w2_DF, hidden_TF)
        if needs_dw2:
            dw2_DF = weight_grad(of_w2, dy_TD, activated_TF)
        del activated_TF
        if needs_dx:
            dx_TD = dhidden_TF @ w1_FD
        if needs_dw1:
            dw1_FD = weight_grad(of_w1, dhidden_TF, x_TD)
        d_residual_TD = dy_TD if ctx.needs_input_grad[3] else None
        return dx_TD, dw1_FD, dw2_DF, d_residual_TD, None, None
