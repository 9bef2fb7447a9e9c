"""Cut a tensor into column slices whose gradients land in one tensor, without a copy.

A Mamba layer projects to [z | x | B | C | dt] at once and hands the slices to different kernels. Autograd would
allocate a gradient for each and concatenate them: one more read and write of the layer's widest
tensor. Here the slices carry a ``GradientSlot``; an op whose backward kernel can write strided
output asks ``gradient_like`` for its place in the common buffer. If every slice's gradient comes
back in its place, the buffer is the gradient; if not (another consumer, a sum of two gradients, an
op that knows nothing of this), the pieces are concatenated as always. Slots decide where a result
is written, never what it is.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GradientBuffer:
    """Gradient of a tensor that was cut into columns.

    The first ``take`` allocates it; ``collect`` frees it.
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
        """Return the place of slice ``index``'s gradient.

        A second call in one backward pass gets None: its gradient is another one.
        """
        if self._whole is None:
            self._whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._slices = column_views(self._whole, self._shapes)
        if index in self._taken:
            return None
        self._taken.add(index)
        return self._slices[index]

    def collect(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Return the gradient of the whole tensor.

        It is the buffer itself if every slice lies in its place, else a concatenation.
        """
        whole, slices = self._whole, self._slices
        self._whole = None
        self._slices = ()
        self._taken = set()
        if whole is not None and all(map(_is_same_memory, gradients, slices)):
            return whole
        return torch.cat([gradient.reshape(self._shape[0], -1) for gradient in gradients], dim=1)


class GradientSlot(NamedTuple):
    """Place for the gradient of one slice."""

    buffer: GradientBuffer
    place: int


def split_columns(x_TC: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Cut consecutive columns into views.

    Args:
        x_TC: ``(T, C)`` with column step 1.
        shapes: the shape of each slice after T; their products add up to C.
    Returns:
        for each shape a view ``(T, *shape)``, carrying a gradient slot when gradients are recorded.
    Raises:
        ValueError: the shapes do not add up to C.
    Example:
        ``x, B, C = split_columns(xBC, (N, P), (G, S), (G, S))``
    """
    if sum(map(prod, shapes)) != x_TC.shape[1]:
        raise ValueError(
            f"split_columns: {list(shapes)} hold {sum(map(prod, shapes))} columns of {x_TC.shape[1]}."
        )
    if not (torch.is_grad_enabled() and x_TC.requires_grad):
        return column_views(x_TC, shapes)
    buffer = GradientBuffer(x_TC, shapes)
    views: tuple[Tensor, ...] = _SplitColumns.apply(x_TC, shapes, buffer)  # type: ignore[no-untyped-call]
    for index, view in enumerate(views):
        view.gradient_slot = GradientSlot(buffer, index)  # type: ignore[attr-defined]
    return views


def gradient_slot(tensor: Tensor) -> GradientSlot | None:
    """Return the slot that ``split_columns`` gave this tensor; None without one.

    Reshaping the tensor loses it.
    """
    return getattr(tensor, "gradient_slot", None)


def gradient_like(tensor: Tensor, slot: GradientSlot | None) -> Tensor:
    """Return uninitialised memory for the gradient of ``tensor``.

    It is the slice's place in the common buffer if that is free, else contiguous.
    """
    gradient = slot.buffer.take(slot.place) if slot is not None else None
    if gradient is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return gradient


def column_views(x_TC: Tensor, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Return plain views of consecutive columns, without a gradient slot."""
    widths = [prod(shape) for shape in shapes]
    starts = accumulate(widths, initial=0)
    return tuple(
        x_TC.narrow(1, start, width).view(x_TC.shape[0], *shape)
        for start, width, shape in zip(starts, widths, shapes)
    )


class _SplitColumns(torch.autograd.Function):
    """Forward: views. Backward: the buffer that the slices' gradients were written into, or their
    concatenation.
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
