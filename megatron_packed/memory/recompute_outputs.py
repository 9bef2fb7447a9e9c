"""Recomputation of single outputs: consumers do not save them, and backward computes them again.

[Note: one output for each stream]
Consumers may run on several streams, as a shared expert beside the dispatch does. Autograd runs the
backward of a consumer on the stream of its forward. Each stream computes the output again for its own
consumers, so no stream waits for another one, and memory never passes between streams. The arguments
were saved before the consumers of either stream began, and the function's own backward, which needs
them too, waits for all consumers. Such functions are cheap, and the result has the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.memory.recompute import RecomputeError, RerunArguments
from megatron_packed.memory.saved_tensors import (
    OuterPacked,
    SavedByAutograd,
    pack_by_outer,
)
from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.torch_private import Hooks, saved_tensors_hooks_in_force, storage_address


@contextmanager
def recomputed_output(
    output: Tensor, function: Callable[..., Tensor], *args: Any
) -> Iterator[None]:
    """Return a context in which autograd saves placeholders for ``output`` and for its views.

    `checkpoint` replaces the tensors that a function itself saves. This context replaces the tensors
    that consumers of the function's output save. Use it for a cheap function with a large output
    whose inputs are saved anyway (a norm, an activation): call the consumers inside the context, then
    drop the output. Inside the context, all other tensors are saved as usual, also by outer hooks.

    Args:
        output: ``function(*args)``; it must not share memory with other tensors.
        function: computes ``output`` again in the backward pass.
        args: arguments; autograd saves the tensors among them. The other arguments are held by
            reference.
    """
    if not torch.is_grad_enabled():
        yield
        return
    arguments = RerunArguments(args, SavedByAutograd)
    source = RecomputedOutput(output, function, arguments, saved_tensors_hooks_in_force())
    with saved_tensors_hooks(source.pack, unpack_recomputed_view):
        yield


class RecomputedOutput:
    """Output that is computed again for the views that autograd has saved."""

    def __init__(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        arguments: RerunArguments,
        outer_hooks: Hooks | None,
    ) -> None:
        # Store the address, not the tensor, because this object must not keep the output alive.
        self._address = storage_address(output)
        self._layout = (output.shape, output.stride(), output.dtype)
        self._offset = int(output.storage_offset())
        self._function = function
        self._arguments = arguments
        self._outer_hooks = outer_hooks
        # Views by the stream of their consumer; see [Note: one output for each stream].
        self._views: dict[int, list[weakref.ref[RecomputedView]]] = {}
        self._taken: list[Any] | None = None

    def pack(self, tensor: Tensor) -> Tensor | RecomputedView | OuterPacked:
        if self._contains(tensor):
            offset = int(tensor.storage_offset()) - self._offset
            stream = _current_stream(tensor.device)
            view = RecomputedView(self, tensor, offset, stream)
            self._views.setdefault(stream, []).append(weakref.ref(view))
            return view
        return pack_by_outer(tensor, self._outer_hooks)

    def _contains(self, tensor: Tensor) -> bool:
        # The output is alive while hooks run, so no other storage can have this address.
        same_storage = storage_address(tensor) == self._address
        return tensor.numel() > 0 and same_storage and tensor.dtype == self._layout[2]

    def run_again(self, stream: int) -> None:
        """Compute the output again, for all views of a stream that autograd still holds."""
        args = self._arguments.take() if self._taken is None else self._taken
        # Enable gradients as in the first run, because kernels may be selected by this mode.
        with torch.enable_grad(), counted_as(Purpose.ACTIVATIONS):
            output = self._function(*args).detach()
        if (output.shape, output.stride(), output.dtype) != self._layout:
            raise RecomputeError(
                "a recomputed function returns another shape, dtype or layout when it runs again."
            )
        for reference in self._views.pop(stream):
            view = reference()
            if view is not None:
                view.output = output
        # Another stream needs the arguments too; otherwise the layer's input would live longer.
        self._taken = args if self._views else None


def _current_stream(device: torch.device) -> int:
    """Return a number for the current stream of a device; 0 on a device without streams."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class RecomputedView:
    """Placeholder for the output or a view, without memory until the output is computed again."""

    # A step creates one object per saved view, so save the memory of a `__dict__`.
    __slots__ = ("__weakref__", "offset", "output", "shape", "source", "stream", "stride")

    def __init__(self, source: RecomputedOutput, tensor: Tensor, offset: int, stream: int) -> None:
        self.source = source
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = offset
        self.stream = stream
        self.output: Tensor | None = None


def unpack_recomputed_view(saved: Tensor | RecomputedView | OuterPacked) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, OuterPacked):
        return saved.unpack(saved.packed)
    if saved.output is None:
        saved.source.run_again(saved.stream)
    assert saved.output is not None
    start = saved.output.storage_offset() + saved.offset
    return saved.output.as_strided(saved.shape, saved.stride, start)
