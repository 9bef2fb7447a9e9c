# mypy: disable-error-code="no-untyped-call"
"""Linear layer of the experts with a low-rank adapter for each expert, for backends with `Products`.

Letters: as in `grouped_linear`, and P the inner width of the adapters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.grouped_mlp.grouped_linear import Products, weight_gradient
from megatron_packed.ops.grouped_mlp.low_rank_update import add_low_rank_
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_


def adapted_linear(
    products: Products,
    which: str,
    x_RI: Tensor,
    weight_EOI: Tensor,
    A_EPI: Tensor,
    B_EOP: Tensor,
    scale: float,
    offsets_E: Tensor,
) -> Tensor:
    """Compute ``x W_e^T + scale (x A_e^T) B_e^T``, ``(R, O)``; the weight is frozen.

    Gradients of A and B are added to their ``main_grad``; without it, autograd accumulates them.

    Args:
        which: ``fc1`` or ``fc2``, which treat rows from the last offset on as `first_linear` and
            `second_linear` do.
    """
    main_grads = (getattr(factor, "main_grad", None) for factor in (A_EPI, B_EOP))
    y_RO: Tensor = _AdaptedGroupedLinear.apply(
        x_RI, weight_EOI, A_EPI, B_EOP, offsets_E, *main_grads, products, scale, which == "fc2"
    )
    return y_RO


class _AdaptedGroupedLinear(torch.autograd.Function):
    """Autograd function of `adapted_linear`. ``second`` clears rows of y, otherwise those of dx."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        A_EPI: Tensor,
        B_EOP: Tensor,
        offsets_E: Tensor,
        main_grad_A: Tensor | None,
        main_grad_B: Tensor | None,
        products: Products,
        scale: float,
        second: bool,
    ) -> Tensor:
        x_RI = x_RI.contiguous()
        low_RP = products.rows(x_RI, A_EPI.transpose(1, 2), offsets_E).mul_(scale)
        y_RO = products.rows(x_RI, weight_EOI.transpose(1, 2), offsets_E)
        add_low_rank_(y_RO, low_RP, B_EOP.transpose(1, 2), offsets_E)
        ctx.save_for_backward(x_RI, weight_EOI, A_EPI, B_EOP, low_RP, offsets_E)
        ctx.main_grads = main_grad_A, main_grad_B
        ctx.products = products
        ctx.scale = scale
        ctx.second = second
        return zero_rows_after_(y_RO, offsets_E) if second else y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, A_EPI, B_EOP, low_RP, offsets_E = ctx.saved_tensors
        products: Products = ctx.products
        of_A, of_B = ctx.main_grads
        needs_x, _, needs_A, needs_B = ctx.needs_input_grad[:4]
        dy_RO = dy_RO.contiguous()
        dx_RI = dA_EPI = dB_EOP = None
        dlow_RP = products.rows(dy_RO, B_EOP, offsets_E).mul_(ctx.scale)
        if needs_x:
            dx_RI = products.rows(dy_RO, weight_EOI, offsets_E)
            add_low_rank_(dx_RI, dlow_RP, A_EPI, offsets_E)
            dx_RI = dx_RI if ctx.second else zero_rows_after_(dx_RI, offsets_E)
        if needs_A:
            dA_EPI = weight_gradient(products, of_A, dlow_RP, x_RI, offsets_E)
        if needs_B:
            dB_EOP = weight_gradient(products, of_B, dy_RO, low_RP, offsets_E)
        return dx_RI, None, dA_EPI, dB_EOP, *(None,) * 6
