"""Tensors in the forms that kernels take: rows of adjacent elements, and buffers of gradients."""

from __future__ import annotations

from torch import Tensor


def adjacent(x: Tensor) -> Tensor:
    """Return the tensor with stride 1 in the last dimension, a copy if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """Return (rows, features) with contiguous features; copy only if no such view exists."""
    return adjacent(x.reshape(-1, x.shape[-1]))


def main_grads_of(*parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the ``main_grad`` of each parameter whose gradient is computed; None for others.

    Do not pass these buffers to ``save_for_backward``: backward writes to them, and autograd would
    report a modified saved tensor.
    """
    return tuple(
        getattr(x, "main_grad", None) if x is not None and x.requires_grad else None
        for x in parameters
    )
