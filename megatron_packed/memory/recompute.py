"""Tensors that the backward pass computes again instead of keeping.

[Note: how a function is recomputed]
`checkpoint` runs a function as it is, gradients and all, but of the tensors that autograd would
save in it keeps none: a `_Placeholder` is saved for each. The first place that the backward pass looks
into runs the function once more, from its inputs, and fills all of them; autograd goes on with the
graph of the first run. So nothing else differs from a pass without recomputation: gradients reach
``.grad``, ``main_grad`` and hooks in the same order and exactly once, whether a layer adds them
itself or autograd does, within ``torch.autograd.grad`` too, and outputs may be of any structure.
The second run ends as soon as the last place is filled: what comes behind it (the last sum over
ranks, dropout) is not repeated. It runs on the stream and in the thread of the backward pass, asks
the device nothing, and so can be captured in a CUDA graph together with it.

torch.utils.checkpoint does the same and more; a checkpoint of it has no say in where its inputs are
kept, and looks for random states and autocast in every call.

[Note: collectives that run again]
Ranks that share a collective run the same functions with the same shapes, so each saves as many
tensors in them as the others. Places are looked into in the order of the backward pass, which is
one for all ranks. So they repeat the same collectives in the same order, and leave the same ones
out.

Inputs are saved by the argument ``save``, see [Note: where inputs are saved].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.memory.saved_tensors import (
    OuterPacked,
    SavedByAutograd,
    SavedTensors,
    SaveTensors,
    pack_by_outer,
)
from megatron_packed.torch_private import Hooks, saved_tensors_hooks_in_force

T = TypeVar("T")


class RecomputeError(RuntimeError):
    """A function computed something else when it ran again."""


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    rewind: bool = False,
    save: SaveTensors = SavedByAutograd,
) -> T:
    """``function(*args)``, of which the backward pass needs nothing but ``args``.

    Reads: [Note: how a function is recomputed].

    Args:
        function: its result depends on ``args``, parameters, buffers and, with ``rewind``, the
            default random generators; none of it changes before the backward pass is done.
        args: tensors, which ``save`` saves, and anything else, which is held as it is.
        rewind: ``function`` draws random numbers, of the host's generator or of the one of the
            first tensor's device. When it runs again it draws the same, and nobody else notices.
            Not inside a CUDA graph.
        save: see [Note: where inputs are saved].
    Returns:
        what ``function`` returns; without gradients asked for it is an ordinary call.
    Raises:
        RecomputeError: in the backward pass, where ``function`` saves other tensors than before.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = _Call(function, args, rewind, save)
    with saved_tensors_hooks(call.place, _look_into):
        return function(*args)


class _Arguments:
    """Arguments of a call that runs again: ``save`` saves the tensors."""

    def __init__(self, args: tuple[Any, ...], save: SaveTensors) -> None:
        tensors = {n: arg for n, arg in enumerate(args) if isinstance(arg, Tensor)}
        self._requires_grad = {n: tensor.requires_grad for n, tensor in tensors.items()}
        self._others = [None if n in tensors else arg for n, arg in enumerate(args)]
        self._saved: SavedTensors | None = save([tensor.detach() for tensor in tensors.values()])

    def take(self) -> list[Any]:
        """Return them, tensors detached from their graph; once, as nothing is held any longer."""
        args, saved = self._others, self._saved
        assert saved is not None, "arguments are taken once"
        # The stored tensors may be as large as a layer's input, and nothing reads them again.
        self._others = []
        self._saved = None
        for n, tensor in zip(self._requires_grad, saved.restore(), strict=True):
            args[n] = tensor.detach().requires_grad_(self._requires_grad[n])
        return args


class _Call:
    """One call of a checkpointed function. Its places hold it; it holds them weakly, as they belong
    to autograd. See [Note: collectives that run again].
    """

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        rewind: bool,
        save: SaveTensors,
    ) -> None:
        self._function: Callable[..., object] | None = function
        self._arguments = _Arguments(args, save)
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        self._random = RandomStates.of(device) if rewind else None
        self._places: list[weakref.ref[_Placeholder]] = []

    def place(self, tensor: Tensor) -> _Placeholder:
        """In the first run: what is saved in the stead of ``tensor``."""
        made = _Placeholder(self, tensor)
        self._places.append(weakref.ref(made))
        return made

    def fill(self) -> None:
        """Run the function again, and leave in every place that is still wanted what is saved
        there.
        """
        function = self._function
        assert function is not None, "all places were filled before"
        args = self._arguments.take()
        self._function = None  # what it refers to may go with the graph
        filling = _Filling(self._places)
        states = nullcontext() if self._random is None else self._random.rewound()
        with (
            states,
            torch.enable_grad(),
            saved_tensors_hooks(filling.put, _never_asked),
            suppress(_Full),
        ):
            function(*args)
        if filling.number != len(self._places):
            raise RecomputeError(
                f"a checkpointed function saves {len(self._places)} tensors in its first run and {filling.number} when "
                "it runs again; what it reads besides its arguments (a mode, a flag) must be as it was."
            )


class _Placeholder:
    """What autograd saves in the stead of a tensor. Whoever lets go of it lets go of the tensor."""

    __slots__ = ("__weakref__", "call", "looks", "tensor")

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call, self.looks = call, (tensor.shape, tensor.dtype)
        self.tensor: Tensor | None = None


def _look_into(place: _Placeholder) -> Tensor:
    if place.tensor is None:
        place.call.fill()
    assert place.tensor is not None
    return place.tensor


class _Full(BaseException):
    """Every place is filled. No error, and nobody's ``except Exception`` must see it."""


class _Filling:
    """In the second run: brings what is saved to its place."""

    def __init__(self, places: Sequence[weakref.ref[_Placeholder]]) -> None:
        self._places, self.number = places, 0

    def put(self, tensor: Tensor) -> None:
        place = self._places[self.number]()
        if place is not None:
            if place.looks != (tensor.shape, tensor.dtype):
                raise RecomputeError(
                    f"tensor {self.number} that a checkpointed function saves is {_looks(*place.looks)} in its first "
                    f"run and {_looks(tensor.shape, tensor.dtype)} when it runs again."
                )
            place.tensor = tensor.detach()
        self.number += 1
        if self.number == len(self._places):
            raise _Full


def _looks(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {dtype}"


def _never_asked(nothing: None) -> Tensor:
    raise AssertionError("there is no backward pass through a second run")


class RandomStates(NamedTuple):
    """States of the generators that functions on a device draw from. Reading and setting them is
    host work alone.
    """

    device: torch.device
    host: Tensor
    own: Tensor | None
    """Of a CUDA device."""

    @classmethod
    def of(cls, device: torch.device) -> RandomStates:
        """As they are now; in a graph capture there is nothing to read."""
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Inside, the generators are as they were; afterwards as before."""
        now = RandomStates.of(self.device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


@contextmanager
def regenerated(
    output: Tensor, function: Callable[..., Tensor], *args: Any, save: SaveTensors = SavedByAutograd
) -> Iterator[None]:
    """Inside, whatever saves ``output`` or a part of it saves a way to compute it again, by
    ``function(*args)``.

    For a cheap function whose output is large and whose inputs are kept anyway (a norm, an
    activation): call what reads the output in here, then drop it. Everything else is saved as it
    would be outside, by hooks too.

    Args:
        output: ``function(*args)``, in memory of its own.
        args: tensors, which ``save`` saves, and anything else, which is held as it is.
        save: see [Note: where inputs are saved].
    """
    if not torch.is_grad_enabled():
        yield
        return
    source = _Source(output, function, _Arguments(args, save), saved_tensors_hooks_in_force())
    with saved_tensors_hooks(source.save, _regenerate):
        yield


def without_output(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], T], x: Tensor
) -> T:
    """``second(first(x))``, which keeps nothing of what ``first`` returns. Reads: `regenerated`."""
    y = first(x)
    with regenerated(y, first, x):
        return second(y)


class _Source:
    """Where an output comes from, and what has been saved of it."""

    def __init__(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        arguments: _Arguments,
        around: Hooks | None,
    ) -> None:
        self._storage = output.untyped_storage().data_ptr()
        self._looks = (output.shape, output.stride(), output.dtype)
        self._offset = int(output.storage_offset())
        self._function = function
        self._arguments = arguments
        self._around = around
        self._parts: list[weakref.ref[_Part]] = []

    def save(self, tensor: Tensor) -> Tensor | _Part | OuterPacked:
        ours = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == self._storage
        if not ours or tensor.dtype != self._looks[2]:
            return pack_by_outer(tensor, self._around)
        part = _Part(
            self, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - self._offset
        )
        self._parts.append(weakref.ref(part))
        return part

    def fill(self) -> None:
        """Compute the output again, for all parts that are still wanted."""
        with torch.enable_grad():  # the way that it was computed
            output = self._function(*self._arguments.take()).detach()
        if (output.shape, output.stride(), output.dtype) != self._looks:
            raise RecomputeError(
                "a function returns another shape, dtype or layout when it runs again."
            )
        for reference in self._parts:
            part = reference()
            if part is not None:
                part.output = output


class _Part:
    """What is saved in the stead of an output or a view of it."""

    __slots__ = ("__weakref__", "offset", "output", "shape", "source", "stride")

    def __init__(
        self, source: _Source, shape: torch.Size, stride: tuple[int, ...], offset: int
    ) -> None:
        self.source, self.shape, self.stride, self.offset = source, shape, stride, offset
        self.output: Tensor | None = None


def _regenerate(saved: Tensor | _Part | OuterPacked) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, OuterPacked):
        return saved.unpack(saved.packed)
    if saved.output is None:
        saved.source.fill()
    assert saved.output is not None
    return saved.output.as_strided(
        saved.shape, saved.stride, saved.output.storage_offset() + saved.offset
    )
