# mypy: disable-error-code="no-untyped-call"
"""Gradients of weights that the backward pass computes late, under messages with gradients of rows.

A function that returns the gradients of rows and of a weight delays whatever waits for the rows. Here
the product for the weight becomes a node of its own in autograd's graph. Autograd runs the most
recently created of the nodes that are ready. So create the weight with `late_weight` before the node
that receives rows in forward: its backward then sends the gradients of the rows first.

Backends that multiply by plain autograd ignore this; their results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateGradient:
    """Product for the gradient of a weight, which the backward pass of `late_weight` runs."""

    def __init__(self) -> None:
        self.product: Callable[[], Tensor | None] | None = None
        """Returns the gradient, or None after adding it to ``main_grad``; None if there is no product."""


def late_weight(weight: Tensor) -> Tensor:
    """Return a view of a weight for one use, whose gradient is computed late.

    A frozen weight, and any weight outside of a backward pass, is returned itself.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    late = LateGradient()
    view: Any = _LateWeight.apply(weight, late)
    view.late_gradient = late
    if (main_grad := getattr(weight, "main_grad", None)) is not None:
        view.main_grad = main_grad
    used: Tensor = view
    return used


def late_gradient_of(weight: Tensor) -> LateGradient | None:
    """Return the late gradient of a result of `late_weight`; None for any other weight."""
    return getattr(weight, "late_gradient", None)


class _LateWeight(torch.autograd.Function):
    """Identity; backward runs the product that the use of the weight left."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: LateGradient) -> Tensor:
        ctx.late = late
        # A use that leaves a product has no gradient.
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dweight: Tensor | None) -> tuple[Tensor | None, None]:
        product = ctx.late.product
        ctx.late.product = None
        return dweight if product is None else product(), None
