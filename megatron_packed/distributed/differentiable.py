"""Collectives that autograd passes through; each is the identity for ``group`` None.

A tensor that several ranks hold a part in is in one of three states:

* **shared**: equal on all ranks, and so is the gradient of the one loss by it (hidden states
  between the matrices of a tensor-parallel layer without sequence parallelism, replicated weights);
* **own**: each rank has its own term of a sum, or its own use of a shared value (partial products
  of a row-parallel matrix; the gradient of a column-parallel one by its input);
* **split**: each rank holds its rows or columns of one tensor.

Every collective here is a linear map from one state to another, and its backward is exactly the
adjoint:

| function       | forward                           | backward       |
|----------------|-----------------------------------|----------------|
| `copy_to`      | shared -> own: nothing to do      | all-reduce     |
| `reduce_from`  | own -> shared: all-reduce         | nothing to do  |
| `gather_rows`  | rows -> own: all-gather           | reduce-scatter |
| `scatter_rows` | own -> rows: reduce-scatter       | all-gather     |
| `split_rows`   | shared -> rows: take one's own    | all-gather     |
| `join_rows`    | rows -> shared: all-gather        | take one's own |
| `gather_last`  | columns -> shared: all-gather     | take one's own |
| `pass_on`      | own -> own: to the next rank      | one before     |

Sums are made in the tensor's dtype, by the backend's order: equal on all ranks. No input is written
to. Nothing waits for the host.
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

Group = dist.ProcessGroup
LinearMap = Callable[[Tensor, Group], Tensor]


class _Linear(torch.autograd.Function):
    """Forward: a linear map over a group. Backward: its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, apply: LinearMap, adjoint: LinearMap) -> Tensor:
        # Only the map is kept, no tensor: the adjoint of a linear map does not depend on its input.
        ctx.group = group
        ctx.adjoint = adjoint
        return apply(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy, ctx.group), None, None, None


def linear_map(x: Tensor, group: Group | None, apply: LinearMap, adjoint: LinearMap) -> Tensor:
    """``apply(x, group)``, whose backward is ``adjoint(gradient, group)``; ``x`` itself where
    ``group`` is None.

    Neither function may write to its argument.
    """
    if group is None:
        return x
    return cast(Tensor, _Linear.apply(x, group, apply, adjoint))  # type: ignore[no-untyped-call]


def _same(x: Tensor, group: Group) -> Tensor:
    # A new tensor object, which gets the autograd node of this map; the input keeps its own.
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    # A new tensor: autograd may hand the same gradient to others.
    return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group)


def copy_to(x: Tensor, group: Group | None) -> Tensor:
    """Pass a shared ``x`` on for use by each rank on its own: forward nothing, backward all-reduce (sum)."""
    return linear_map(x, group, _same, _sum)


def reduce_from(x: Tensor, group: Group | None) -> Tensor:
    """Return the shared sum of every rank's own ``x``: forward all-reduce, backward nothing."""
    return linear_map(x, group, _sum, _same)


def gather_rows(x: Tensor, group: Group | None) -> Tensor:
    """All rows, for use by each rank on its own: forward all-gather, backward reduce-scatter (sum).

    Args:
        x: ``(T / size, ...)``, rows of this rank; equally many on all.
    Returns:
        ``(T, ...)`` in the order of ranks.
    """
    return linear_map(x, group, all_gather_rows, reduce_scatter_rows)


def scatter_rows(x: Tensor, group: Group | None) -> Tensor:
    """This rank's rows of the sum of every rank's own ``x``: forward reduce-scatter, backward
    all-gather.

    Args:
        x: ``(T, ...)``.
    Returns:
        ``(T / size, ...)``.
    Raises:
        ValueError: the rows do not divide among the ranks.
    """
    return linear_map(x, group, reduce_scatter_rows, all_gather_rows)


def split_rows(x: Tensor, group: Group | None) -> Tensor:
    """This rank's rows of a shared ``x``: forward a view, backward all-gather.

    Args:
        x: ``(T, ...)``.
    Returns:
        ``(T / size, ...)``.
    Raises:
        ValueError: the rows do not divide among the ranks.
    """
    return linear_map(x, group, own_rows, all_gather_rows)


def join_rows(x: Tensor, group: Group | None) -> Tensor:
    """The shared whole of rows that are split: forward all-gather, backward take one's own.

    Args:
        x: ``(T / size, ...)``, rows of this rank; equally many on all.
    Returns:
        ``(T, ...)`` in the order of ranks.
    """
    return linear_map(x, group, all_gather_rows, own_rows)


def gather_last(x: Tensor, group: Group | None) -> Tensor:
    """The shared whole of columns that are split: forward all-gather, backward take one's own.

    Args:
        x: ``(..., D / size)``, columns of this rank; equally many on all.
    Returns:
        ``(..., D)`` in the order of ranks.
    """
    return linear_map(x, group, all_gather_last, own_last)


def pass_on(x: Tensor, group: Group | None) -> Tensor:
    """Return what the previous rank of a ring holds: forward to the next rank, backward to the
    previous one.
    """
    return linear_map(x, group, pass_to_next, partial(pass_to_next, back=True))
