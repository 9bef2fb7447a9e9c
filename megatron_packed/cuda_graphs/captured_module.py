"""One module captured for one capture size: a forward graph, a backward graph, and the static
tensors between them.

Inputs and outputs of neighbouring modules are the same memory, so a replay copies nothing between
them. Where a caller brings other memory (the first module, or one behind a module that runs
eagerly), it is copied to its static place.

Parameters take no part in autograd during a replay: the backward graph adds their gradients to
``main_grad``, as the layers' own backward does or, where autograd forms a gradient, in its stead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.cuda_graphs.backend import Copies, Graph, GraphBackend
from megatron_packed.cuda_graphs.slots import Slot, StaleMetadataError
from megatron_packed.torch_private import TreeSpec, tree_flatten, tree_unflatten


class Outputs(NamedTuple):
    """What a module returned, taken apart: tensors, and how to put them together again."""

    tensors: list[Tensor]
    spec: TreeSpec

    @classmethod
    def of(cls, result: object) -> Outputs:
        """
        Raises:
            TypeError: something in it is no tensor; a graph could not refresh it.
        """
        leaves, spec = tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"a captured module returns tensors only, and this one returns a {type(leaf).__name__}"
                )
        return cls(leaves, spec)


class Captured(ABC):
    """Forward and backward of a module in two graphs, whoever captured them; and when they may be
    replayed.

    Args:
        slot: where the metadata lies.
        before: the module whose first output is the input of this one.
        turns: numbers of forward and backward in the order of captures, which that of replays must
        follow.
        takes_packed: whether the module itself wants the metadata as an argument.
    """

    input: Tensor
    """Where the forward graph reads hidden states ``(T, D)``."""
    outputs: list[Tensor]
    """Where it writes."""
    grad_outputs: list[Tensor]
    """In shape, dtype and strides like the gradients of what is differentiable of it."""
    grad_input: Tensor
    """Where the backward graph writes the gradient of the hidden states."""
    spec: TreeSpec
    differentiable: list[bool]
    """Which outputs get gradients."""
    unfit = ""
    """Why it must not be replayed, if `adopt_forward` has found something."""
    gives_up_input = False
    """Whether graphs behind the forward graph may use the memory of the hidden states that it has
    read.
    """

    def __init__(
        self,
        slot: Slot,
        *,
        before: Captured | None = None,
        turns: tuple[int, int] = (0, 1),
        takes_packed: bool = True,
    ) -> None:
        self.slot, self.before, self.turns, self.takes_packed = slot, before, turns, takes_packed

    @property
    def missed_its_turn(self) -> bool:
        """Whether a replay now would come after one that was captured later, or a second time, in
        one micro-batch: it might write where that one left what is still needed.
        """
        return self.slot.turn >= self.turns[0]

    def would_overwrite(self, hidden: Tensor) -> bool:
        """Whether bringing ``hidden`` to its place would write over what the module before has
        given.
        """
        return False

    def replay(self, hidden: Tensor) -> Any:
        """What the module returns for ``hidden``; the tensors are overwritten by the next
        micro-batch, and hidden states that the next captured module takes by its backward pass.
        """
        self.slot.turn = self.turns[0]
        if torch.is_grad_enabled() and hidden.requires_grad:
            if (
                self.slot.last_turn is None
            ):  # backward passes come in reverse: the first module's is the last
                self.slot.last_turn = self.turns[1]
            tensors: Sequence[Tensor] = _Replay.apply(hidden, self)  # type: ignore[no-untyped-call]
        else:
            tensors = self.replay_forward(hidden)
        return tree_unflatten(list(tensors), self.spec)

    @abstractmethod
    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Outputs for ``hidden``, without gradients."""

    @abstractmethod
    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradient of the hidden states of the last `replay_forward`; those of parameters go to
        ``main_grad``.

        Args:
            grads: of the differentiable outputs.
        """

    @abstractmethod
    def adopt_forward(self) -> None:
        """Make the forward graph ready, behind the captures of the whole capture size and in their
        order.
        """

    @abstractmethod
    def adopt_backward(self) -> None:
        """As `adopt_forward`, behind that of the whole capture size and in reverse."""

    @abstractmethod
    def reset(self) -> None:
        """Give up the graphs."""


class CapturedModule(Captured):
    """Forward and backward of ``function`` in two graphs.

    Use: `capture_forward` for all modules in order, `capture_backward` in reverse order, then
    `adopt_forward` and `adopt_backward` for all. What only graphs read is given back behind the
    last of them, as eager autograd would, and serves the backward graphs of the modules before:
    inputs, gradients, and hidden states that another captured module takes. What callers may read
    lives until it is adopted. From then on all memory is only borrowed, so that another capture
    size's graphs may use the same. Static tensors that lie outside the graphs' pool must be kept by
    who made them.

    Args:
        function: hidden states ``(T, D)`` -> what the module returns for the metadata in the slot.
            The first tensor of its result is the new hidden states.
        parameters: those that get gradients, each with ``main_grad``.
        slot: where the metadata lies.
        backend: captures.
        copies: what ``function`` queues on other streams by itself. Then hidden states of the
            graphs' pool live no longer than the forward graph that reads them, unless autograd
            holds them.
        before: the module whose first output is the input of this one, both in the same memory.
        turns: numbers of forward and backward in the order of captures, which that of replays must
        follow.
        takes_packed: whether the module itself wants the metadata as an argument.
    """

    def __init__(
        self,
        function: Callable[[Tensor], object],
        parameters: Sequence[nn.Parameter],
        slot: Slot,
        backend: GraphBackend,
        *,
        copies: Copies | None = None,
        before: CapturedModule | None = None,
        turns: tuple[int, int] = (0, 1),
        takes_packed: bool = True,
    ) -> None:
        super().__init__(slot, before=before, turns=turns, takes_packed=takes_packed)
        self._function, self._parameters, self._backend = function, parameters, backend
        self._live: Outputs | None = None
        self._replayed = self._went_back = -1
        """Of which generation of the slot the activations are, and the gradient is."""
        self._copies = copies
        self._after: CapturedModule | None = None
        self._load: Graph | None = None
        """What the backward graph of ``_after`` should have copied for this one. See [Note: copies
        between graphs].
        """

    def would_overwrite(self, hidden: Tensor) -> bool:
        before = self.before
        holds_outputs = (
            isinstance(before, CapturedModule) and before._replayed == self.slot.generation
        )
        return holds_outputs and not same_memory(hidden, self.input)

    def capture_forward(self, hidden: Tensor) -> Tensor:
        """Capture on ``hidden``, which becomes the static input; returns the static output."""
        self.input = hidden.detach()
        self._leaf = self.input.detach().requires_grad_()

        saved: set[int] = set()

        def forward() -> list[Tensor]:
            with torch.enable_grad(), nullcontext() if self._copies is None else _noting(saved):
                self._live = Outputs.of(self._function(self._leaf))
            if self._copies is not None:
                self._copies.graph_boundary()
            return [_writable(tensor.detach()) for tensor in self._live.tensors]

        self._forward, self.outputs = self._backend.capture(forward)
        assert self._live is not None
        self.spec = self._live.spec
        self.differentiable = [tensor.requires_grad for tensor in self._live.tensors]
        if not self.differentiable[0]:
            raise TypeError(INDEPENDENT)
        if (
            self._copies is not None
            and isinstance(self.before, CapturedModule)
            and _address(self.input) not in saved
        ):
            self._release_input(self.before)
        return self.outputs[0]

    def _release_input(self, before: CapturedModule) -> None:
        """Give up the memory of the hidden states behind the forward graph: no backward graph reads
        it.
        """
        self.gives_up_input = True
        self.input = before.outputs[0] = self._backend.borrowed(self.input)
        self._leaf.data = self.input
        assert before._live is not None
        before._live.tensors[0].data = self.input

    def capture_backward(
        self,
        grad_outputs: Sequence[Tensor],
        *,
        passed_on: bool = False,
        after: CapturedModule | None = None,
    ) -> Tensor:
        """Capture with ``grad_outputs`` as static gradients of the differentiable outputs.

        Args:
            passed_on: the hidden states go to another captured module.
            after: the module that was captured before this one, and so comes behind it.
        Returns:
            The input's gradient, which its taker gives back by `release_gradient`.
        """
        static, self._after = list(grad_outputs), after
        again = None if self._copies is None else self._copies.prefetched_copies()
        if again is not None:
            self._load = self._backend.capture(again)[0]
            del again

        def backward() -> Tensor:
            assert self._live is not None
            outputs = [t for t, differs in zip(self._live.tensors, self.differentiable) if differs]
            grads = torch.autograd.grad(
                outputs, [self._leaf, *self._parameters], static, allow_unused=True
            )
            with torch.no_grad():
                for parameter, grad in zip(self._parameters, grads[1:]):
                    if grad is not None:
                        parameter.main_grad.add_(grad)  # type: ignore[attr-defined]
            if grads[0] is None:
                raise TypeError(INDEPENDENT)
            if self._copies is not None:
                self._copies.graph_boundary()
            return _writable(grads[0])

        self._backward, self.grad_input = self._backend.capture(backward)
        self._live = None
        borrowed = self._backend.borrowed
        self.input = borrowed(self.input)
        self._leaf = self.input.detach().requires_grad_()
        if passed_on:
            self.outputs[0] = borrowed(self.outputs[0])
        self.grad_outputs = [borrowed(tensor) for tensor in static]
        return self.grad_input

    def release_gradient(self) -> None:
        """Keep the address of the input's gradient instead of its memory."""
        self.grad_input = self._backend.borrowed(self.grad_input)

    def adopt_forward(self) -> None:
        """Keep addresses instead of memory."""
        self.outputs = [self._backend.borrowed(tensor) for tensor in self.outputs]

    def adopt_backward(self) -> None:
        """Keep addresses instead of memory."""
        self.release_gradient()

    def reset(self) -> None:
        for graph in (
            getattr(self, "_forward", None),
            self._load,
            getattr(self, "_backward", None),
        ):
            if graph is not None:
                graph.reset()
        self._live = None

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        _bring(hidden, self.input)
        self._replayed = self.slot.generation
        self._forward.replay()
        return tuple(tensor.detach() for tensor in self.outputs)

    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        for grad, static in zip(grads, self.grad_outputs):
            _bring(grad, static)
        if self._load is not None and (
            self._after is None or self._after._went_back != self.slot.generation
        ):
            self._load.replay()
        self._went_back = self.slot.generation
        self._backward.replay()
        return self.grad_input.detach()


class _Replay(torch.autograd.Function):
    """Forward graph and backward graph as one differentiable operation of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, captured: Captured) -> tuple[Tensor, ...]:
        outputs = captured.replay_forward(hidden)
        ctx.captured, ctx.generation = captured, captured.slot.generation
        ctx.mark_non_differentiable(
            *(t for t, differs in zip(outputs, captured.differentiable) if not differs)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        captured: Captured = ctx.captured
        if captured.slot.generation != ctx.generation:
            raise StaleMetadataError(
                f"backward of micro-batch {ctx.generation} came when the slot already held micro-batch "
                f"{captured.slot.generation}, whose activations lie where its own lay; a micro-batch in a slot must be "
                "done, forward and backward, before the next."
            )
        if captured.slot.turn >= captured.turns[1]:
            raise RuntimeError(
                "backward through a replayed module ran twice, or after that of a module in front of it; its "
                "activations may be overwritten by now. Replayed modules need one backward, of all losses together."
            )
        captured.slot.turn = captured.turns[1]
        wanted = [grad for grad, differs in zip(grads, captured.differentiable) if differs]
        grad_hidden = captured.replay_backward(wanted)
        # Autograd keeps a gradient that it is given where it can, in a leaf's ``grad`` for good.
        return grad_hidden if captured.before is not None else grad_hidden.clone(), None


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """What lies in ``tensors`` lies there again afterwards, at the same addresses."""
    before = [
        (tensor, tensor.detach().clone())
        for tensor in {id(tensor): tensor for tensor in tensors}.values()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)


@contextmanager
def _noting(saved: set[int]) -> Iterator[None]:
    """Inside, addresses of what autograd saves are noted, and nothing else changes."""

    def note(tensor: Tensor) -> Tensor:
        saved.add(_address(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


INDEPENDENT = "the first tensor that a captured module returns must depend on its input"


def _writable(tensor: Tensor) -> Tensor:
    """Itself, or a copy if several of its elements are the same memory, as behind ``expand``."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.contiguous() if overlaps else tensor


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements at the same addresses."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


@torch.no_grad()
def _bring(tensor: Tensor, static: Tensor) -> None:
    """To where a graph reads it: nothing to do where it already lies there."""
    if not same_memory(tensor, static):
        static.copy_(tensor)
