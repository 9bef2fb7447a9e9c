"""Mamba-2 scan on the meta device: the shape of its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_packed.ops.shapes import of_shape


def run(x_TNP: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """Return a tensor of the output's shape. The arguments are those of `reference.run`."""
    return of_shape(x_TNP.shape, x_TNP, *tensors)
