"""Functions that the backward pass runs again instead of keeping what they save.

[Note: how a function is recomputed]
`checkpoint` runs a function with gradients. In place of each tensor that autograd would save in it,
a `RecomputedTensor` without memory is saved. The first one that the backward pass unpacks runs the
function once more, from its inputs, and gives all of them their tensors. Autograd goes on with the
graph of the first run. So nothing else differs from a pass without recomputation: gradients reach
``.grad``, ``main_grad`` and hooks in the same order and exactly once, whether a layer adds them
itself or autograd does, within ``torch.autograd.grad`` too. Outputs may be of any structure. The
second run ends when the last tensor is saved; what follows in the function (the last sum over
ranks, dropout) is not repeated. The second run uses the stream and the thread of the backward pass
and asks the device nothing, so a CUDA graph can capture it with the backward pass.

torch.utils.checkpoint does the same and more. It cannot be told where inputs are stored, and reads
random states and autocast in every call.

[Note: collectives that run again]
Ranks that share a collective run the same functions with the same shapes, so each saves the same
number of tensors in them. Saved tensors are unpacked in the order of the backward pass, which is
one for all ranks. So ranks repeat the same collectives in the same order, and leave out the same
ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.memory.saved_tensors import SavedByAutograd, SavedTensors, SaveTensors

T = TypeVar("T")


class RecomputeError(RuntimeError):
    """A function computed something else when it ran again."""


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    rewind: bool = False,
    save: SaveTensors = SavedByAutograd,
) -> T:
    """Call ``function(*args)``, and keep nothing but ``args`` for its backward pass.

    Reads: [Note: how a function is recomputed].

    Args:
        function: its result depends on ``args``, parameters, buffers and, with ``rewind``, the
            default random generators; none of it changes before the backward pass is done.
        args: tensors, which ``save`` saves, and anything else, which is held as it is.
        rewind: ``function`` draws random numbers, of the host's generator or of the one of the
            first tensor's device. The second run draws the same numbers and leaves the generators
            as they were. Not inside a CUDA graph.
        save: see [Note: where inputs are saved].
    Returns:
        the result of ``function``; without gradients this is an ordinary call.
    Raises:
        RecomputeError: in the backward pass, where ``function`` saves other tensors than before.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = RecomputedFunction(function, args, rewind, save)
    with saved_tensors_hooks(call.pack, unpack_recomputed):
        return function(*args)


class RerunArguments:
    """Arguments of a call that runs again; ``save`` saves the tensors among them."""

    def __init__(self, args: tuple[Any, ...], save: SaveTensors) -> None:
        tensors = {n: arg for n, arg in enumerate(args) if isinstance(arg, Tensor)}
        self._requires_grad = {n: tensor.requires_grad for n, tensor in tensors.items()}
        self._others = [None if n in tensors else arg for n, arg in enumerate(args)]
        self._stored: SavedTensors | None = save([tensor.detach() for tensor in tensors.values()])

    def take(self) -> list[Any]:
        """Return the arguments, tensors detached from their graph; only once.

        An error of the restore (no device memory) leaves them here for another backward pass.
        """
        assert self._stored is not None, "arguments are taken once"
        tensors = self._stored.restore()
        args = self._others
        # Drop the references now: a layer's input must not live until the graph is freed.
        self._others = []
        self._stored = None
        for n, tensor in zip(self._requires_grad, tensors, strict=True):
            args[n] = tensor.detach().requires_grad_(self._requires_grad[n])
        return args


class RecomputedFunction:
    """One call of a checkpointed function.

    Its tensors refer to it, and it to them weakly: they belong to autograd, and their memory goes
    when autograd frees them. See [Note: collectives that run again].
    """

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        rewind: bool,
        save: SaveTensors,
    ) -> None:
        self._function: Callable[..., object] | None = function
        self._arguments = RerunArguments(args, save)
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        self._random = RandomStates.of(device) if rewind else None
        # Weak, so that the second run gives no memory to tensors that autograd has freed.
        self._saved: list[weakref.ref[RecomputedTensor]] = []

    def pack(self, tensor: Tensor) -> RecomputedTensor:
        """Return what autograd saves in place of ``tensor`` in the first run."""
        saved = RecomputedTensor(self, tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def run_again(self) -> None:
        """Run the function again, and give every tensor that autograd still holds its memory."""
        function = self._function
        assert function is not None, "the second run has given all tensors their memory"
        args = self._arguments.take()
        # A bound method refers to a module; it must not keep that alive with the graph.
        self._function = None
        run = SecondRun(self._saved)
        # Reading random states costs more than a small function, so only where asked for.
        states = nullcontext() if self._random is None else self._random.rewound()
        with (
            states,
            torch.enable_grad(),
            saved_tensors_hooks(run.pack, unpack_in_second_run),
            suppress(AllRecomputed),
        ):
            function(*args)
        if run.count != len(self._saved):
            raise RecomputeError(
                f"a checkpointed function saves {len(self._saved)} tensors in its first run and {run.count} when "
                "it runs again; what it reads besides its arguments (a mode, a flag) must be as it was."
            )


class RecomputedTensor:
    """Placeholder for a saved tensor, without memory until the function has run again."""

    # One for each saved tensor of a step, so without a dictionary.
    __slots__ = ("__weakref__", "dtype", "function", "shape", "tensor")

    def __init__(self, function: RecomputedFunction, tensor: Tensor) -> None:
        self.function = function
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.tensor: Tensor | None = None


def unpack_recomputed(saved: RecomputedTensor) -> Tensor:
    if saved.tensor is None:
        saved.function.run_again()
    assert saved.tensor is not None
    return saved.tensor


class AllRecomputed(BaseException):
    """Signal that ends a second run when all tensors are saved.

    It is no error: an ``except Exception`` of the function must not stop it.
    """


class SecondRun:
    """Saved tensors of a second run, counted in the order of the first."""

    def __init__(self, saved: Sequence[weakref.ref[RecomputedTensor]]) -> None:
        self._saved = saved
        self.count = 0

    def pack(self, tensor: Tensor) -> None:
        saved = self._saved[self.count]()
        if saved is not None:
            if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise RecomputeError(
                    f"tensor {self.count} that a checkpointed function saves is {tuple(saved.shape)} {saved.dtype} "
                    f"in its first run and {tuple(tensor.shape)} {tensor.dtype} when it runs again."
                )
            # Detached: the graph of the second run must not live as long as its tensors.
            saved.tensor = tensor.detach()
        self.count += 1
        if self.count == len(self._saved):
            raise AllRecomputed


def unpack_in_second_run(nothing: None) -> Tensor:
    raise AssertionError("there is no backward pass through a second run")


class RandomStates(NamedTuple):
    """States of the random generators of a device and the host; reading and setting them does not
    touch the device.
    """

    device: torch.device
    host: Tensor
    own: Tensor | None
    """State of a CUDA device's generator; None on a CPU."""

    @classmethod
    def of(cls, device: torch.device) -> RandomStates:
        """Return the present states; a graph capture has none to read."""
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.own is not None:
            torch.cuda.set_rng_state(self.own, self.device)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Restore these states inside; afterwards the generators are as they were before."""
        now = RandomStates.of(self.device)
        self.restore()
        try:
            yield
        finally:
            now.restore()
