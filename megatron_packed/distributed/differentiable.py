"""Collectives with autograd support; a collective over the group ``None`` is the identity.

A tensor that is distributed over several ranks is in one of three states:

* **replicated**: the tensor is equal on all ranks, and so is its gradient. Examples are replicated
  weights, and hidden states between the layers of a tensor-parallel model without sequence
  parallelism.
* **partial**: each rank holds its own tensor, and the sum over ranks is the value that matters.
  Examples are the output of a row-parallel matrix, and the input gradient of a column-parallel one.
* **split**: each rank holds its own rows or columns of one tensor.

Every function in the table is a linear map from one state to another. Its backward is exactly the
adjoint map:

| function       | forward                           | backward          |
|----------------|-----------------------------------|-------------------|
| `copy_to`      | replicated: identity              | all-reduce        |
| `reduce_from`  | partial -> replicated: all-reduce | identity          |
| `gather_rows`  | rows -> all rows: all-gather      | reduce-scatter    |
| `scatter_rows` | partial -> rows: reduce-scatter   | all-gather        |
| `split_rows`   | replicated -> rows: own slice     | all-gather        |
| `join_rows`    | rows -> replicated: all-gather    | own slice         |
| `gather_last`  | columns -> replicated: all-gather | own slice         |
| `pass_on`      | send to the next rank             | to the previous   |

`copy_to` and `gather_rows` give each rank a value that the rank uses in its own way, e.g. with its
own heads, so the gradients on the ranks are partial.

Sums are computed in the tensor's dtype and in the backend's order, and are equal on all ranks. No
function writes to its input. No function makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.collectives import (
    all_gather_last,
    all_gather_rows,
    all_reduce_sum,
    own_last,
    own_rows,
    pass_to_next,
    reduce_scatter_rows,
)
from megatron_packed.memory_purpose import Purpose, counted_as

Group = dist.ProcessGroup
LinearMap = Callable[[Tensor, Group], Tensor]


class _Linear(torch.autograd.Function):
    """Autograd function: a linear map over a group in forward, its adjoint in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, apply: LinearMap, adjoint: LinearMap) -> Tensor:
        # No tensor is saved: the adjoint of a linear map does not depend on the input.
        ctx.group = group
        ctx.adjoint = adjoint
        return apply(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy, ctx.group), None, None, None


def linear_map(x: Tensor, group: Group | None, apply: LinearMap, adjoint: LinearMap) -> Tensor:
    """Return ``apply(x, group)`` with the backward ``adjoint(gradient, group)``.

    For ``group`` None the result is ``x``. Neither function may write to its argument.
    """
    if group is None:
        return x
    return cast(Tensor, _Linear.apply(x, group, apply, adjoint))  # type: ignore[no-untyped-call]


def _same(x: Tensor, group: Group) -> Tensor:
    # Return a new tensor object, because the output gets its own autograd node, different from the
    # input's.
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    # Sum a copy, because autograd may pass the same gradient tensor to other functions.
    with counted_as(Purpose.COMMUNICATION):
        copy = x.clone(memory_format=torch.contiguous_format)
    return all_reduce_sum(copy, group)


def copy_to(x: Tensor, group: Group | None) -> Tensor:
    """Return a replicated ``x`` for rank-specific use: identity forward, all-reduce (sum) backward.

    This is the entry of a tensor-parallel region without sequence parallelism.
    """
    return linear_map(x, group, _same, _sum)


def reduce_from(x: Tensor, group: Group | None) -> Tensor:
    """Sum a partial ``x`` over the ranks: all-reduce forward, identity backward.

    This is the exit of a tensor-parallel region without sequence parallelism.
    """
    return linear_map(x, group, _sum, _same)


def gather_rows(x: Tensor, group: Group | None) -> Tensor:
    """Gather rows for rank-specific use: all-gather forward, reduce-scatter (sum) backward.

    Args:
        x: ``(T / size, ...)`` rows of this rank; the same number on every rank.
        group: process group; ``None`` is the identity.
    Returns:
        ``(T, ...)`` rows of all ranks, in the order of ranks.
    """
    return linear_map(x, group, all_gather_rows, reduce_scatter_rows)


def scatter_rows(x: Tensor, group: Group | None) -> Tensor:
    """Sum a partial ``x`` and return this rank's rows: reduce-scatter forward, all-gather backward.

    Args:
        x: ``(T, ...)``.
        group: process group; ``None`` is the identity.
    Returns:
        ``(T / size, ...)`` rows of the sum.
    Raises:
        ValueError: T is not a multiple of the group size.
    """
    return linear_map(x, group, reduce_scatter_rows, all_gather_rows)


def split_rows(x: Tensor, group: Group | None) -> Tensor:
    """Return this rank's rows of a replicated ``x``: a view forward, all-gather backward.

    Args:
        x: ``(T, ...)``.
        group: process group; ``None`` is the identity.
    Returns:
        ``(T / size, ...)``.
    Raises:
        ValueError: T is not a multiple of the group size.
    """
    return linear_map(x, group, own_rows, all_gather_rows)


def join_rows(x: Tensor, group: Group | None) -> Tensor:
    """Gather split rows into a replicated tensor: all-gather forward, own rows backward.

    The gradient must be equal on all ranks, so each rank takes its own rows of that gradient.

    Args:
        x: ``(T / size, ...)`` rows of this rank; the same number on every rank.
        group: process group; ``None`` is the identity.
    Returns:
        ``(T, ...)`` rows of all ranks, in the order of ranks.
    """
    return linear_map(x, group, all_gather_rows, own_rows)


def gather_last(x: Tensor, group: Group | None) -> Tensor:
    """Gather split columns into a replicated tensor: all-gather forward, own columns backward.

    Args:
        x: ``(..., D / size)`` columns of this rank; the same number on every rank.
        group: process group; ``None`` is the identity.
    Returns:
        ``(..., D)`` columns of all ranks, in the order of ranks.
    """
    return linear_map(x, group, all_gather_last, own_last)


def pass_on(x: Tensor, group: Group | None) -> Tensor:
    """Send ``x`` to the next rank of a ring and return the tensor that the previous rank sent.

    The backward pass sends gradients to the previous rank.
    """
    return linear_map(x, group, pass_to_next, partial(pass_to_next, back=True))
