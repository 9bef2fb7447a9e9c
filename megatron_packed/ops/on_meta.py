# mypy: disable-error-code="no-untyped-call"
"""Stand-ins of kernels on the meta device: shapes, saved tensors and workspaces, without values.

An estimate of memory counts what a stand-in allocates. So a stand-in saves what its GPU kernels save
for the backward pass, and allocates their workspaces while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.memory_purpose import Purpose, counted_as, purpose_now, running
from megatron_packed.ops.backend_dispatch import planned_op
from megatron_packed.ops.column_slices import gradient_like, gradient_slot

PROCESSORS = 132
"""Multiprocessors of an H200, whose kernels a planned rank has."""


class Workspace(NamedTuple):
    """Memory that kernels need in addition to inputs, results and gradients."""

    bytes: int
    purpose: Purpose | None = None

    def allocate(self) -> Tensor:
        with nullcontext() if self.purpose is None else counted_as(self.purpose):
            return torch.empty(self.bytes, dtype=torch.uint8, device="meta")


def workspace(
    *shape: int, dtype: torch.dtype = torch.float32, purpose: Purpose | None = None
) -> Workspace:
    """Return a workspace of the size of a tensor, by default in float32."""
    return Workspace(prod(shape) * dtype.itemsize, purpose)


class Memory(NamedTuple):
    """Memory of kernels in one call; see `kernel`."""

    saved: Sequence[Workspace] = ()
    """Tensors that forward saves in addition to inputs."""
    forward: Sequence[Workspace] = ()
    """Workspaces of the forward pass."""
    early: Sequence[Workspace] = ()
    """Workspaces of the backward pass that are freed before the gradients are allocated."""
    backward: Sequence[Workspace] = ()
    """Workspaces of the backward pass."""
    keeps_result: bool = False
    """Forward saves the result, too."""


NOTHING = Memory()


def of_shape(
    shape: Sequence[int],
    *inputs: Tensor | None,
    saved: Sequence[Tensor | None] | None = None,
    memory: Memory = NOTHING,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor of this shape, by default in the dtype of ``inputs[0]``; see `kernel`."""
    [result] = kernel([shape], *inputs, saved=saved, memory=memory, dtype=dtype)
    return result


def kernel(
    shapes: Sequence[Sequence[int]],
    *inputs: Tensor | None,
    saved: Sequence[Tensor | None] | None = None,
    memory: Memory = NOTHING,
    dtype: torch.dtype | None = None,
    passes_on: bool = False,
) -> tuple[Tensor, ...]:
    """Return tensors without values, as the kernels of one call would.

    Backward gives gradients of the shapes of the inputs, in the slots of `column_slices` if they have
    any. An input with ``main_grad`` gets none, because its gradient is added there.

    Args:
        shapes: shapes of the results.
        inputs: differentiable and other inputs.
        saved: tensors among the inputs that forward saves; by default all.
        memory: what the kernels need in addition.
        dtype: dtype of the results; by default that of ``inputs[0]``.
        passes_on: the last result is ``inputs[0]`` itself; backward adds its gradient in a kernel.
    """
    slots = tuple(None if x is None else gradient_slot(x) for x in inputs)
    results: tuple[Tensor, ...] = _Kernel.apply(
        shapes, dtype, inputs if saved is None else saved, slots, memory, passes_on, *inputs
    )
    return results


class _Kernel(torch.autograd.Function):
    """Autograd function of `kernel`."""

    @staticmethod
    def forward(
        ctx: Any,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype | None,
        saved: Sequence[Tensor | None],
        slots: Sequence[Any],
        memory: Memory,
        passes_on: bool,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        first = inputs[0]
        assert first is not None
        ctx.op = planned_op()
        with running(ctx.op):
            workspaces = [each.allocate() for each in memory.forward]
            results = tuple(first.new_empty(shape, dtype=dtype) for shape in shapes)
            saved_workspaces = [each.allocate() for each in memory.saved]
        ctx.save_for_backward(*saved, *saved_workspaces, *(results if memory.keeps_result else ()))
        ctx.memory = memory
        purpose = purpose_now()
        # A recomputed call saves activations, and has gradients.
        ctx.purpose = None if purpose is Purpose.ACTIVATIONS else purpose
        ctx.slots = slots
        # Shapes alone: backward reads no input that forward did not save.
        ctx.shapes = [
            _gradient_shape(x, needed) for x, needed in zip(inputs, ctx.needs_input_grad[6:])
        ]
        del workspaces
        return (*results, first) if passes_on else results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Unpack what was saved: recomputation and offload bring it back now.
        saved, memory = ctx.saved_tensors, ctx.memory
        with counted_as(ctx.purpose), running(ctx.op):
            workspaces = [each.allocate() for each in memory.backward]
            early = [each.allocate() for each in memory.early]
            del early
            input_gradients = [
                None if x is None else gradient_like(x, slot)
                for x, slot in zip(ctx.shapes, ctx.slots)
            ]
        del saved, workspaces
        return (None,) * 6 + tuple(input_gradients)


class _GradientShape(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _gradient_shape(x: Tensor | None, needed: bool) -> Any:
    if x is None or not needed or getattr(x, "main_grad", None) is not None:
        return None
    return _GradientShape(x.shape, x.dtype, x.device)
