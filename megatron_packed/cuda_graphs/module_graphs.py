"""The forward graph and the backward graph of one module, for one capture size and slot, and their
static tensors.

Inputs and outputs of neighbouring modules are the same memory, so a replay copies nothing between
them. Where a caller brings other memory (to the first module, or to one after a module that runs
eagerly), it is copied to the static tensor.

Parameters take no part in autograd during a replay: the backward graph adds their gradients to
``main_grad``, as the layers' own backward does or, where autograd forms a gradient, in its stead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.cuda_graphs.capture_and_pool import Copies, Graph, GraphBackend
from megatron_packed.cuda_graphs.fallback_reasons import INDEPENDENT_OUTPUT, returns_another_type
from megatron_packed.cuda_graphs.slots import Slot, StaleMetadataError, bring, same_memory
from megatron_packed.torch_private import TreeSpec, tree_flatten, tree_unflatten


class Outputs(NamedTuple):
    """Tensors that a module returned, and the structure to put them together again."""

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
                raise TypeError(returns_another_type(type(leaf).__name__))
        return cls(leaves, spec)


class ModuleGraphs(ABC):
    """Forward and backward of a module in two graphs, and the order in which they may be replayed.

    `TorchModuleGraphs` is captured here, `TEModuleGraphs` by TransformerEngine.

    Args:
        slot: where the metadata lies.
        previous: the module whose first output is the input of this one.
        positions: of forward and backward in the order of captures, which replays must follow.
        takes_packed: whether the module itself wants the metadata as an argument.
    """

    input: Tensor
    """Static tensor from which the forward graph reads hidden states ``(T, D)``."""
    outputs: list[Tensor]
    """Static tensors that the forward graph writes."""
    grad_outputs: list[Tensor]
    """Static gradients of the differentiable outputs, which the backward graph reads."""
    grad_input: Tensor
    """Static gradient of the hidden states, which the backward graph writes."""
    spec: TreeSpec
    differentiable: list[bool]
    """For each output, True if it gets a gradient."""
    unfit = ""
    """Reason against replays that `adopt_forward` has found; empty if there is none."""
    gives_up_input = False
    """True if later graphs may use the memory of the input once the forward graph has read it."""

    def __init__(
        self,
        slot: Slot,
        *,
        previous: ModuleGraphs | None = None,
        positions: tuple[int, int] = (0, 1),
        takes_packed: bool = True,
    ) -> None:
        self.slot = slot
        self.previous = previous
        self.positions = positions
        self.takes_packed = takes_packed

    @property
    def out_of_order(self) -> bool:
        """True if a graph that was captured later, or this one, was already replayed.

        In one pool a graph may write where an earlier graph left what a later one still reads. Only
        the order of the captures is safe. See [Note: order of memory] in slot_graphs.py.
        """
        return self.slot.replayed_position >= self.positions[0]

    def would_overwrite(self, hidden: Tensor) -> bool:
        """Return whether a copy of ``hidden`` to the static input would write over a result of the
        module before, which shares that memory.
        """
        return False

    def replay(self, hidden: Tensor) -> Any:
        """Replay forward for ``hidden`` and return what the module returns.

        The tensors alias graph memory: the next micro-batch overwrites them. Hidden states that the
        next captured module takes are overwritten by its backward pass already.
        """
        self.slot.replayed_position = self.positions[0]
        if torch.is_grad_enabled() and hidden.requires_grad:
            if self.slot.final_position is None:
                # Backward passes come in reverse: that of the first module ends the micro-batch.
                self.slot.final_position = self.positions[1]
            tensors: Sequence[Tensor] = _Replay.apply(hidden, self)  # type: ignore[no-untyped-call]
        else:
            tensors = self.replay_forward(hidden)
        return tree_unflatten(list(tensors), self.spec)

    @abstractmethod
    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward graph for ``hidden`` and return the outputs, without gradients."""

    @abstractmethod
    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        """Replay the backward graph; return the gradient of the last `replay_forward`'s hidden states.

        Gradients of parameters are added to ``main_grad``.

        Args:
            grads: of the differentiable outputs.
        """

    @abstractmethod
    def adopt_forward(self) -> None:
        """Make the forward graph ready for replays, after all captures of the capture size.

        Modules are adopted in the order of their captures.
        """

    @abstractmethod
    def adopt_backward(self) -> None:
        """Make the backward graph ready, after `adopt_forward` of all modules, in reverse order."""

    @abstractmethod
    def reset(self) -> None:
        """Free the graphs."""


class TorchModuleGraphs(ModuleGraphs):
    """Forward and backward of ``function`` in two graphs.

    Use: `capture_forward` for all modules in order, `capture_backward` in reverse order, then
    `adopt_forward` and `adopt_backward` for all.

    Who owns the memory: during the captures a module owns its tensors. A tensor that only graphs
    read (inputs, gradients, hidden states that another captured module takes) is freed after the last
    graph that reads it, as eager autograd would, and the pool uses it for the backward graphs of
    modules before. Tensors that callers may read live until they are adopted. From then on the module
    knows addresses alone (`GraphBackend.borrowed`), so that graphs of another capture size may use
    the same memory; the pool lives as long as its graphs. Static tensors outside the pool belong to
    `SlotGraphs`.

    Args:
        function: hidden states ``(T, D)`` -> what the module returns for the metadata in the slot.
            The first tensor of its result is the new hidden states.
        parameters: those that get gradients, each with ``main_grad``.
        slot, backend: the metadata lies in the slot; the backend captures.
        copies: what ``function`` queues on other streams by itself. Then hidden states of the
            graphs' pool live no longer than the forward graph that reads them, unless autograd
            holds them.
        previous: the module whose first output is the input of this one, both in the same memory.
        positions, takes_packed: as for `ModuleGraphs`.
    """

    def __init__(
        self,
        function: Callable[[Tensor], object],
        parameters: Sequence[nn.Parameter],
        slot: Slot,
        backend: GraphBackend,
        *,
        copies: Copies | None = None,
        previous: TorchModuleGraphs | None = None,
        positions: tuple[int, int] = (0, 1),
        takes_packed: bool = True,
    ) -> None:
        super().__init__(slot, previous=previous, positions=positions, takes_packed=takes_packed)
        self._function = function
        self._parameters = parameters
        self._backend = backend
        self._live: Outputs | None = None
        self.forward_generation = -1
        """Generation of the slot whose activations the outputs are."""
        self.backward_generation = -1
        """Generation of the slot whose gradient ``grad_input`` is."""
        self._copies = copies
        self._following: TorchModuleGraphs | None = None
        self._missing_copies: Graph | None = None
        """Repeats the copies that the backward graph of ``_following`` makes for this one. See [Note:
        copies between graphs] in capture_and_pool.py.
        """

    def would_overwrite(self, hidden: Tensor) -> bool:
        previous = self.previous
        holds_outputs = (
            isinstance(previous, TorchModuleGraphs)
            and previous.forward_generation == self.slot.generation
        )
        return holds_outputs and not same_memory(hidden, self.input)

    def capture_forward(self, hidden: Tensor) -> Tensor:
        """Capture on ``hidden``, which becomes the static input; returns the static output."""
        # A leaf of its own: the autograd graph of the capture ends here, where its gradient is taken.
        self.input = hidden.detach()
        self._leaf = self.input.detach().requires_grad_()
        saved: set[int] = set()

        def forward() -> list[Tensor]:
            with torch.enable_grad(), nullcontext() if self._copies is None else _noting(saved):
                self._live = Outputs.of(self._function(self._leaf))
            if self._copies is not None:
                # Copies that began in this graph must end in it: a graph cannot wait for another.
                self._copies.graph_boundary()
            # Detached: the graph's outputs must not keep the autograd graph of the capture alive.
            return [_writable(tensor.detach()) for tensor in self._live.tensors]

        self._forward, self.outputs = self._backend.capture(forward)
        assert self._live is not None
        self.spec = self._live.spec
        self.differentiable = [tensor.requires_grad for tensor in self._live.tensors]
        if not self.differentiable[0]:
            raise TypeError(INDEPENDENT_OUTPUT)
        # The activations were offloaded; if autograd has not saved the input itself, no backward
        # graph reads it, and the next forward graphs can have its memory.
        if (
            self._copies is not None
            and isinstance(self.previous, TorchModuleGraphs)
            and _address(self.input) not in saved
        ):
            self._release_input(self.previous)
        return self.outputs[0]

    def _release_input(self, previous: TorchModuleGraphs) -> None:
        """Free the memory of the input after the forward graph: no backward graph reads it."""
        self.gives_up_input = True
        self.input = previous.outputs[0] = self._backend.borrowed(self.input)
        self._leaf.data = self.input
        assert previous._live is not None
        previous._live.tensors[0].data = self.input

    def capture_backward(
        self,
        grad_outputs: Sequence[Tensor],
        *,
        passed_on: bool = False,
        following: TorchModuleGraphs | None = None,
    ) -> Tensor:
        """Capture with ``grad_outputs`` as static gradients of the differentiable outputs.

        Args:
            passed_on: the hidden states go to another captured module.
            following: the module whose backward was captured before, so the next one in forward order.
        Returns:
            The input's gradient; the module that reads it frees it by `release_gradient`.
        """
        static = list(grad_outputs)
        self._following = following
        again = None if self._copies is None else self._copies.prefetched_copies()
        if again is not None:
            self._missing_copies = self._backend.capture(again)[0]
            del again  # it holds tensors of the pool

        def backward() -> Tensor:
            assert self._live is not None
            outputs = [t for t, differs in zip(self._live.tensors, self.differentiable) if differs]
            # allow_unused: a module may have parameters that this call did not use.
            grads = torch.autograd.grad(
                outputs, [self._leaf, *self._parameters], static, allow_unused=True
            )
            with torch.no_grad():
                for parameter, grad in zip(self._parameters, grads[1:]):
                    if grad is not None:
                        parameter.main_grad.add_(grad)  # type: ignore[attr-defined]
            if grads[0] is None:
                raise TypeError(INDEPENDENT_OUTPUT)
            if self._copies is not None:
                self._copies.graph_boundary()
            return _writable(grads[0])

        self._backward, self.grad_input = self._backend.capture(backward)
        # Both graphs exist, so from here on addresses are enough: the pool may use the memory for
        # the backward graphs of modules before, which are replayed later.
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
        # A capture that failed has set some of them only.
        for name in ("_forward", "_missing_copies", "_backward"):
            graph = getattr(self, name, None)
            if graph is not None:
                graph.reset()
        self._live = None

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        bring(hidden, self.input)
        # Until the next fill the outputs belong to this micro-batch. See `would_overwrite`.
        self.forward_generation = self.slot.generation
        self._forward.replay()
        return tuple(tensor.detach() for tensor in self.outputs)

    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        for grad, static in zip(grads, self.grad_outputs):
            bring(grad, static)
        # The next module's backward graph was not replayed for this micro-batch, so the copies that
        # it makes for this one are missing.
        if self._missing_copies is not None and (
            self._following is None or self._following.backward_generation != self.slot.generation
        ):
            self._missing_copies.replay()
        self.backward_generation = self.slot.generation
        self._backward.replay()
        return self.grad_input.detach()


class _Replay(torch.autograd.Function):
    """Forward graph and backward graph as one differentiable operation of the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, captured: ModuleGraphs) -> tuple[Tensor, ...]:
        outputs = captured.replay_forward(hidden)
        ctx.captured = captured
        ctx.generation = captured.slot.generation
        ctx.mark_non_differentiable(
            *(t for t, differs in zip(outputs, captured.differentiable) if not differs)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        captured: ModuleGraphs = ctx.captured
        if captured.slot.generation != ctx.generation:
            raise StaleMetadataError(
                f"backward of micro-batch {ctx.generation} came when the slot already held micro-batch "
                f"{captured.slot.generation}, whose activations lie where its own lay; a micro-batch in a slot must be "
                "done, forward and backward, before the next."
            )
        if captured.slot.replayed_position >= captured.positions[1]:
            raise RuntimeError(
                "backward through a replayed module ran twice, or after that of a module in front of it; its "
                "activations may be overwritten by now. Replayed modules need one backward, of all losses together."
            )
        captured.slot.replayed_position = captured.positions[1]
        wanted = [grad for grad, differs in zip(grads, captured.differentiable) if differs]
        grad_hidden = captured.replay_backward(wanted)
        # Autograd may keep the tensor itself as a leaf's ``grad``, and the next replay would write
        # over it. Between captured modules nothing keeps it.
        return grad_hidden if captured.previous is not None else grad_hidden.clone(), None


@contextmanager
def _noting(saved: set[int]) -> Iterator[None]:
    """Add the addresses of all tensors that autograd saves inside to ``saved``."""

    def note(tensor: Tensor) -> Tensor:
        saved.add(_address(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if elements share memory, as after ``expand``."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.contiguous() if overlaps else tensor
