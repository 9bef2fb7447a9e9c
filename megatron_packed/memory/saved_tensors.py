"""Interface for tensors that the forward pass saves and the backward pass restores.

`SavedByAutograd` is the default implementation, with autograd's saved tensors.

[Note: where inputs are saved]
A recomputed function needs its inputs again in the backward pass. A `SaveTensors` function receives
the inputs in the forward pass and returns a `SavedTensors`. The backward pass restores each
`SavedTensors` once, in the reverse order of the forward pass. `SavedByAutograd` leaves the inputs on
the device, and applies the saved-tensor hooks around the call. `Offload.save` copies them to the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from megatron_packed.torch_private import Hooks


class SavedTensors(Protocol):
    """Tensors that were saved in the forward pass."""

    def restore(self) -> Sequence[Tensor]:
        """Return all tensors with the values that were saved. The method is called at most once."""


SaveTensors = Callable[[Sequence[Tensor]], SavedTensors]
"""Function that saves detached tensors; their memory must not be written to until the restore."""

WRITTEN_TO = (
    "a tensor that the backward pass needs has been modified by an inplace operation after it was "
    "saved."
)


def span_of(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last element in memory, including gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return autograd's version counter of each tensor, which every in-place write increments."""
    return [tensor._version for tensor in tensors]


class SavedByAutograd:
    """Tensors saved by autograd: on the device, with the current hooks and version checks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        anchor = torch.empty(0, requires_grad=True)
        # Hold the output, not its node. Up to torch 2.11, a node that only Python refers to has
        # already released its saved tensors.
        self._output: Any = _SavingNode.apply(anchor, *tensors)  # type: ignore[no-untyped-call]

    def restore(self) -> Sequence[Tensor]:
        tensors = self._output.grad_fn.saved_tensors
        self._output = None  # now only the caller keeps the memory alive
        return cast(Sequence[Tensor], tensors)


class _SavingNode(torch.autograd.Function):
    """Autograd function that only saves tensors; its node is not part of any graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("no tensor depends on the output of this node")


class OuterPacked(NamedTuple):
    """Result of the pack hook of an outer scope, with the hook that unpacks it."""

    unpack: Callable[[Any], Tensor]
    packed: Any


def pack_by_outer(tensor: Tensor, hooks: Hooks | None) -> Tensor | OuterPacked:
    """Pack a tensor with the hooks of the outer scope.

    torch calls only the innermost hooks. So an inner scope must itself call the outer hooks for
    tensors that it does not handle. Otherwise an outer offload would miss these tensors.
    """
    if hooks is None:
        return tensor
    pack, unpack = hooks
    return OuterPacked(unpack, pack(tensor))
