# mypy: disable-error-code="no-untyped-call"
"""Linear layers of the experts with autograd, for backends that multiply the rows of all experts at once.

A layer needs six products: two in forward, and for each of these one for the gradient of the input
and one for the gradient of the weight. A product does not write rows after the last offset, and may
leave the gradient of an unused expert unwritten. Both are set to zero wherever later code reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.ops.grouped_mlp.late_gradients import LateGradient, late_gradient_of
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_, zero_unused_experts_


class Products(NamedTuple):
    """Products of one backend. Rows after the last offset are neither read nor written."""

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(x_RI, weight_EIO, offsets_E) -> y_RO`` with ``y = x W_e``."""
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``(dy_RO, x_RI, offsets_E) -> dW_EOI`` with ``dW_e = dy_e^T x_e``."""
    can_add: Callable[[Tensor, Tensor, Tensor], bool]
    """``(main_grad_EOI, dy_RO, x_RI) -> bool``: whether `add_weight_gradient` supports the tensors."""
    add_weight_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """``(main_grad_EOI, dy_RO, x_RI, offsets_E)``: adds ``dW_e`` to ``main_grad``, in its dtype."""


def row_bounds(offsets_E: Tensor) -> Tensor:
    """Return the first row of each expert and the row after the last one, ``(E + 1,)``."""
    return pad(offsets_E, (1, 0))


def weight_gradient(
    products: Products,
    main_grad: Tensor | None,
    dy_RO: Tensor,
    x_RI: Tensor,
    offsets_E: Tensor,
    late: LateGradient | None = None,
) -> Tensor | None:
    """Add ``dW_e = dy_e^T x_e`` to ``main_grad``; without ``main_grad``, return it.

    With ``late`` the result is None, and ``late`` does this later.
    """
    if late is not None:
        late.product = partial(weight_gradient, products, main_grad, dy_RO, x_RI, offsets_E)
        return None
    if main_grad is not None and products.can_add(main_grad, dy_RO, x_RI):
        products.add_weight_gradient(main_grad, dy_RO, x_RI, offsets_E)
        return None
    dweight_EOI = zero_unused_experts_(products.weight_gradient(dy_RO, x_RI, offsets_E), offsets_E)
    if main_grad is None:
        return dweight_EOI
    main_grad.add_(dweight_EOI)
    return None


def first_linear(products: Products, x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the first product, ``(R, D)`` -> ``(R, F)``.

    Rows from the last offset on are undefined in the output and zero in the gradient of x.
    """
    main_grad = getattr(w1_EFD, "main_grad", None)
    hidden_RF: Tensor = _GroupedLinear.apply(
        x_RD, w1_EFD, main_grad, late_gradient_of(w1_EFD), offsets_E, products, False, True
    )
    return hidden_RF


def second_linear(products: Products, x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the second product, ``(R, F)`` -> ``(R, D)``.

    Rows from the last offset on are zero in the output and undefined in the gradient of x.
    """
    main_grad = getattr(w2_EDF, "main_grad", None)
    y_RD: Tensor = _GroupedLinear.apply(
        x_RF, w2_EDF, main_grad, late_gradient_of(w2_EDF), offsets_E, products, True, False
    )
    return y_RD


class _GroupedLinear(torch.autograd.Function):
    """Product ``y = x W_e^T`` for each expert; backward ``dx = dy W_e`` and ``dW_e = dy_e^T x_e``.

    dW_e is added to ``main_grad`` if there is one. ``clear_y`` and ``clear_dx`` set the rows after
    the last offset to zero in y and dx; otherwise they are unwritten.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        main_grad: Tensor | None,
        late: LateGradient | None,
        offsets_E: Tensor,
        products: Products,
        clear_y: bool,
        clear_dx: bool,
    ) -> Tensor:
        x_RI = x_RI.contiguous()
        ctx.save_for_backward(x_RI, weight_EOI, offsets_E)
        ctx.main_grad = main_grad
        ctx.late = late
        ctx.products = products
        ctx.clear_dx = clear_dx
        y_RO = products.rows(x_RI, weight_EOI.transpose(1, 2), offsets_E)
        return zero_rows_after_(y_RO, offsets_E) if clear_y else y_RO

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, offsets_E = ctx.saved_tensors
        products: Products = ctx.products
        dy_RO = dy_RO.contiguous()
        dx_RI = dweight_EOI = None
        if ctx.needs_input_grad[0]:
            dx_RI = products.rows(dy_RO, weight_EOI, offsets_E)
            dx_RI = zero_rows_after_(dx_RI, offsets_E) if ctx.clear_dx else dx_RI
        if ctx.needs_input_grad[1]:
            dweight_EOI = weight_gradient(products, ctx.main_grad, dy_RO, x_RI, offsets_E, ctx.late)
        return dx_RI, dweight_EOI, *(None,) * 6
