"""Column slices of a tensor whose gradients are written into one common buffer.

A Mamba layer projects to ``[z | x | B | C | dt]`` in one product and passes the slices to different
kernels. Autograd would allocate a gradient for each slice and concatenate them, which reads and
writes the layer's widest tensor once more.

Here each slice carries a ``GradientSlot``. An op with a backward kernel that can write strided
output gets the slice's columns of the common buffer from ``gradient_like``. If the gradients of all
slices are in their columns, the buffer is the gradient of the tensor. Otherwise the gradients are
concatenated, as autograd does. This happens if a slice has a second consumer, or an op that does not
use slots. A slot changes only the memory location of a gradient, never its values.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GradientBuffer:
    """Buffer for the gradient of a tensor that was split into column slices.

    The first ``take`` allocates the memory; ``collect`` releases it.
    """

    def __init__(self, x_TC: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
        self._shape = x_TC.shape
        self._dtype = x_TC.dtype
        self._device = x_TC.device
        self._shapes = shapes
        self._slices: tuple[Tensor, ...] = ()
        self._whole: Tensor | None = None
        self._taken: set[int] = set()

    def take(self, index: int) -> Tensor | None:
        """Return the part of the buffer for the gradient of slice ``index``.

        A second call for the same slice in one backward pass returns None. It comes from a second
        consumer of the slice, and autograd adds the two gradients.
        """
        if self._whole is None:
            self._whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._slices = column_views(self._whole, self._shapes)
        if index in self._taken:
            return None
        self._taken.add(index)
        return self._slices[index]

    def collect(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Return the gradient of the complete tensor.

        Return the buffer itself if all slices were written into it, else a concatenation.
        """
        buffer, slices = self._whole, self._slices
        self._whole = None
        self._slices = ()
        self._taken = set()
        if buffer is not None and all(map(_is_same_memory, gradients, slices)):
            return buffer
        return torch.cat([gradient.reshape(self._shape[0], -1) for gradient in gradients], dim=1)


class GradientSlot(NamedTuple):
    """Location of the gradient of one slice in the common buffer."""

    buffer: GradientBuffer
    place: int
    """Number of the slice."""


def split_columns(x_TC: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split a tensor into views of consecutive columns.

    Args:
        x_TC: ``(T, C)`` with stride 1 between columns.
        shapes: shape of each slice without T; the products of the shapes must add up to C.
    Returns:
        one view ``(T, *shape)`` per shape; the views have gradient slots if autograd records.
    Raises:
        ValueError: the shapes do not add up to C.
    Example:
        ``x, B, C = split_columns(xBC, (N, P), (G, S), (G, S))``
    """
    if sum(map(prod, shapes)) != x_TC.shape[1]:
        raise ValueError(
            f"split_columns: the shapes {list(shapes)} have {sum(map(prod, shapes))} columns, "
            f"but the tensor has {x_TC.shape[1]}."
        )
    if not (torch.is_grad_enabled() and x_TC.requires_grad):
        return column_views(x_TC, shapes)
    buffer = GradientBuffer(x_TC, shapes)
    views: tuple[Tensor, ...] = _SplitColumns.apply(x_TC, shapes, buffer)  # type: ignore[no-untyped-call]
    for index, view in enumerate(views):
        view.gradient_slot = GradientSlot(buffer, index)  # type: ignore[attr-defined]
    return views


def gradient_slot(tensor: Tensor) -> GradientSlot | None:
    """Return the slot that ``split_columns`` attached to this tensor, or None.

    Views of the slice, e.g. after a reshape, have no slot.
    """
    return getattr(tensor, "gradient_slot", None)


def gradient_like(tensor: Tensor, slot: GradientSlot | None) -> Tensor:
    """Return uninitialised memory for the gradient of ``tensor``.

    Return the slice's columns of the common buffer if they are free, else a new contiguous tensor.
    """
    gradient = slot.buffer.take(slot.place) if slot is not None else None
    if gradient is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return gradient


def column_views(x_TC: Tensor, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Return views of consecutive columns without gradient slots."""
    widths = [prod(shape) for shape in shapes]
    starts = accumulate(widths, initial=0)
    return tuple(
        x_TC.narrow(1, start, width).view(x_TC.shape[0], *shape)
        for start, width, shape in zip(starts, widths, shapes)
    )


class _SplitColumns(torch.autograd.Function):
    """Split into column views in forward; in backward return the common gradient buffer.

    If a slice's gradient is elsewhere, backward concatenates the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, shapes: tuple[tuple[int, ...], ...], buffer: GradientBuffer
    ) -> tuple[Tensor, ...]:
        ctx.buffer = buffer
        return column_views(x_TC, shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.collect(gradients), None, None


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.shape == b.shape
        and a.dtype == b.dtype
    )
