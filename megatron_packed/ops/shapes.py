# mypy: disable-error-code="no-untyped-call"
"""Results of kernels on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def of_shape(shape: Sequence[int], *saved: Tensor) -> Tensor:
    """Return a tensor of this shape and of the dtype of ``saved[0]``, without values.

    Args:
        shape: shape of the result.
        saved: inputs that the kernel saves for its backward pass, which gives gradients of their
            shapes.
    """
    result: Tensor = _Result.apply(torch.Size(shape), *saved)
    return result


class _Result(torch.autograd.Function):
    """Autograd function of `of_shape`."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return saved[0].new_empty(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.empty_like(x) if needs else None for x, needs in needed))
