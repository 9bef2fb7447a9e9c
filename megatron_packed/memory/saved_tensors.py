"""Interface for tensors that a forward pass saves and its backward pass restores, and its default
implementation: autograd's own saved tensors.

[Note: where inputs are saved]
Functions that are recomputed start from inputs that must survive until the backward pass. A
`SaveTensors` function receives them in the forward pass and returns a `SavedTensors`, which is
restored once, in the backward pass, in reverse order of the forward pass. `SavedByAutograd` leaves
them on the device, where they pass through whatever saved-tensor hooks surround the call.
`Offload.save` copies them to the host.
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
        """Return all of them with the values that they had; called at most once."""


SaveTensors = Callable[[Sequence[Tensor]], SavedTensors]
"""Saves detached tensors, whose memory must not be written to until they are restored."""

WRITTEN_TO = (
    "a tensor that waits for its backward pass has been modified by an inplace operation after it "
    "was put away."
)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return autograd's counts of in-place writes; equal at two moments if none came between."""
    return [tensor._version for tensor in tensors]


class SavedByAutograd:
    """Tensors that autograd saves: on the device, through the hooks in force, and guarded against
    in-place writes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        anchor = torch.empty(0, requires_grad=True)
        # Hold the output, not its node: up to torch 2.11 a node that only Python references has
        # already released what it saved.
        self._output: Any = _SavingNode.apply(anchor, *tensors)  # type: ignore[no-untyped-call]

    def restore(self) -> Sequence[Tensor]:
        tensors = self._output.grad_fn.saved_tensors
        self._output = None  # the memory now belongs to the caller alone
        return cast(Sequence[Tensor], tensors)


class _SavingNode(torch.autograd.Function):
    """Autograd node that saves tensors and is part of no graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing depends on what it returns")


class OuterPacked(NamedTuple):
    """Result of the pack hook of an outer scope, with the hook that unpacks it."""

    unpack: Callable[[Any], Tensor]
    packed: Any


def pack_by_outer(tensor: Tensor, hooks: Hooks | None) -> Tensor | OuterPacked:
    """Pack a tensor as the outer scope would.

    torch calls the innermost hooks alone. An inner scope takes what it can; what it declines goes to
    the outer hooks, which it has to call itself, or an outer offload would lose the tensor.
    """
    if hooks is None:
        return tensor
    pack, unpack = hooks
    return OuterPacked(unpack, pack(tensor))
