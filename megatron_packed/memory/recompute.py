"""Recomputation: functions that the backward pass runs again, so that their activations are not saved.

[Note: how a function is recomputed]
`checkpoint` runs a function with gradients. For each tensor that autograd would save in the
function, it saves a `RecomputedTensor`, a placeholder without memory. When the backward pass unpacks
the first placeholder, the function runs again from its inputs, and the second run fills all
placeholders. Autograd then continues with the graph of the first run. So gradients are the same as
without recomputation. They reach ``.grad``, ``main_grad`` and hooks in the same order and exactly
once. This also holds for layers that add gradients to ``main_grad`` themselves, and for
``torch.autograd.grad``. Outputs may have any structure. The second run ends when the last tensor is
saved. The rest of the function (the last sum over ranks, dropout) is not repeated. The second run
uses the stream and the thread of the backward pass and does not synchronize, so a CUDA graph can
capture it with the backward pass.

torch.utils.checkpoint does the same and more. But it has no argument for where inputs are stored,
and it reads random states and autocast in every call.

[Note: collectives that run again]
Ranks of a collective run the same functions with the same shapes, so each rank saves the same number
of tensors. All ranks unpack saved tensors in the same order, that of the backward pass. So all ranks
repeat the same collectives in the same order, and leave out the same collectives.
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
from megatron_packed.memory_purpose import Purpose, counted_as

T = TypeVar("T")


class RecomputeError(RuntimeError):
    """Difference between the first and the second run of a recomputed function."""


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    rewind: bool = False,
    save: SaveTensors = SavedByAutograd,
) -> T:
    """Call ``function(*args)``, and save only ``args`` for its backward pass.

    See [Note: how a function is recomputed].

    Args:
        function: function whose result depends only on ``args``, parameters, buffers and, with
            ``rewind``, the default random generators. None of these may change before the backward
            pass has ended.
        args: arguments; ``save`` saves the tensors among them. The other arguments are held by
            reference, or replaced by the result of their method ``for_second_run``.
        rewind: ``function`` draws random numbers from the generator of the host or of the first
            tensor's device. The second run draws the same numbers, and restores the generators
            afterwards. ``rewind`` does not work inside a CUDA graph.
        save: saves the tensors; see [Note: where inputs are saved].
    Returns:
        The result of ``function``. Without gradients this is an ordinary call.
    Raises:
        RecomputeError: in the backward pass, if ``function`` saves other tensors in its second run.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    call = RecomputedFunction(function, args, rewind, save)
    with saved_tensors_hooks(call.pack, unpack_recomputed):
        return function(*args)


def _kept(arg: Any) -> Any:
    """Return an argument, or its own substitute if it contains tensors that must not be held."""
    return arg.for_second_run() if hasattr(arg, "for_second_run") else arg


class RerunArguments:
    """Arguments of a recomputed call; ``save`` saves the tensors among them."""

    def __init__(self, args: tuple[Any, ...], save: SaveTensors) -> None:
        tensors = {n: arg for n, arg in enumerate(args) if isinstance(arg, Tensor)}
        self._requires_grad = {n: tensor.requires_grad for n, tensor in tensors.items()}
        self._others = [None if n in tensors else _kept(arg) for n, arg in enumerate(args)]
        self._stored: SavedTensors | None = save([tensor.detach() for tensor in tensors.values()])

    def take(self) -> list[Any]:
        """Return the arguments, with detached tensors. The method can succeed only once.

        If the restore fails (no device memory), another backward pass may call the method again.
        """
        assert self._stored is not None, "arguments can be taken only once"
        tensors = self._stored.restore()
        args = self._others
        # Drop the references now. Otherwise a layer's input would live until the graph is freed.
        self._others = []
        self._stored = None
        for n, tensor in zip(self._requires_grad, tensors, strict=True):
            args[n] = tensor.detach().requires_grad_(self._requires_grad[n])
        return args


class RecomputedFunction:
    """One call of a checkpointed function.

    Autograd owns the placeholders, and their memory is freed when autograd frees them. A placeholder
    refers to this object; this object has only weak references to placeholders. See [Note:
    collectives that run again].
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
        self._random = RandomStates.capture(device) if rewind else None
        # Weak references, so that the second run does not fill placeholders that autograd has freed.
        self._saved: list[weakref.ref[RecomputedTensor]] = []

    def pack(self, tensor: Tensor) -> RecomputedTensor:
        """Return the placeholder that autograd saves instead of ``tensor`` in the first run."""
        saved = RecomputedTensor(self, tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def run_again(self) -> None:
        """Run the function again, and fill every placeholder that autograd still holds."""
        function = self._function
        assert function is not None, "the second run has filled all placeholders"
        args = self._arguments.take()
        # Drop the function: a bound method would keep its module alive as long as the graph.
        self._function = None
        run = SecondRun(self._saved)
        # Reading random states takes longer than a small function, so do it only with `rewind`.
        states = nullcontext() if self._random is None else self._random.rewound()
        with (
            states,
            torch.enable_grad(),
            saved_tensors_hooks(run.pack, unpack_in_second_run),
            suppress(AllRecomputed),
            counted_as(Purpose.ACTIVATIONS),
        ):
            function(*args)
        if run.count != len(self._saved):
            raise RecomputeError(
                f"a checkpointed function saves {len(self._saved)} tensors in its first run and {run.count} when "
                "it runs again. Modes and flags that the function reads must not change between the two runs."
            )


class RecomputedTensor:
    """Placeholder for a saved tensor, without memory until the function has run again."""

    # A step creates one object per saved tensor, so save the memory of a `__dict__`.
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

    It is not an `Exception`, so that an ``except Exception`` in the function does not catch it.
    """


class SecondRun:
    """Saved tensors of a second run, matched by their order with those of the first run."""

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
            # Detach: the tensors must not keep the autograd graph of the second run alive.
            saved.tensor = tensor.detach()
        self.count += 1
        if self.count == len(self._saved):
            raise AllRecomputed


def unpack_in_second_run(nothing: None) -> Tensor:
    raise AssertionError("a recomputed forward pass has no backward pass")


class RandomStates(NamedTuple):
    """States of the random generators of a device and of the host.

    Reading and setting them does not synchronize with the device.
    """

    device: torch.device
    host: Tensor
    cuda: Tensor | None
    """State of a CUDA device's generator; None for a CPU."""

    @classmethod
    def capture(cls, device: torch.device) -> RandomStates:
        """Return the current states. Do not call it during a graph capture."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Return a context with these states; the states from before are restored at its end."""
        outer_states = RandomStates.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            outer_states.restore()
