"""Product that adds a residual, on the meta device: its shape alone."""

from __future__ import annotations

from torch import Tensor


def added_product(residual_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return a tensor of the shape of ``residual + x W^T``."""
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
