"""Forward graph and backward graph of one module, for one capture size and slot, and their static
tensors.

The output of a captured module and the input of the next captured module are the same memory, so a
replay copies nothing between them. A caller may pass hidden states in other memory: to the first
module, or to a module that follows an eager module. These hidden states are copied to the static
input.

Parameters take no part in autograd during a replay. The backward graph itself adds their gradients
to ``main_grad``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.cuda_graphs.capture_and_pool import (
    Copies,
    Graph,
    GraphBackend,
    address_of,
    addresses_noted,
    writable,
)
from megatron_packed.cuda_graphs.fallback_reasons import INDEPENDENT_OUTPUT, returns_another_type
from megatron_packed.cuda_graphs.slots import Slot, StaleMetadataError, bring, same_memory
from megatron_packed.torch_private import TreeSpec, tree_flatten, tree_unflatten


class Outputs(NamedTuple):
    """Tensors that a module returned, and the structure of its result."""

    tensors: list[Tensor]
    spec: TreeSpec

    @classmethod
    def flatten(cls, result: object) -> Outputs:
        """Flatten the result of a module into its tensors and its structure.

        Raises:
            TypeError: ``result`` contains a value that is not a tensor, which a replay could not
                update.
        """
        leaves, spec = tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(returns_another_type(type(leaf).__name__))
        return cls(leaves, spec)


class ModuleGraphs(ABC):
    """Forward graph and backward graph of a module, and their position in the order of replays.

    `TorchModuleGraphs` captures with torch, `TEModuleGraphs` with TransformerEngine.

    Args:
        slot: slot that holds the metadata.
        previous: graphs of the module whose first output is the input of this module.
        positions: numbers of the forward and the backward graph in the order of captures. Replays
            must follow this order.
        takes_packed: the module takes the metadata as its second argument.
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
    """For each output, True if it requires a gradient."""
    unfit = ""
    """Reason why the graphs must not be replayed, set by `adopt_forward`; empty if there is none."""
    gives_up_input = False
    """True if later graphs may use the memory of the input after the forward graph has read it."""

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
        """True if this forward graph, or a graph captured after it, was already replayed.

        Graphs of one pool share memory. A replay out of order may overwrite a tensor that another
        graph has yet to read. See [Note: order of memory] in slot_graphs.py.
        """
        return self.slot.replayed_position >= self.positions[0]

    def would_overwrite(self, hidden: Tensor) -> bool:
        """Return whether copying ``hidden`` to the static input would overwrite an output in use.

        The static input is also the output of the previous module, which a caller may still read.
        """
        return False

    def replay(self, hidden: Tensor) -> Any:
        """Replay the forward graph for ``hidden``; return a result with the module's structure.

        The returned tensors alias graph memory, and the next micro-batch overwrites them. The
        backward graph of the next captured module may overwrite the hidden states earlier.
        """
        self.slot.replayed_position = self.positions[0]
        if torch.is_grad_enabled() and hidden.requires_grad:
            if self.slot.final_position is None:
                # Backward runs in reverse order, so the backward of the first module runs last.
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
        """Replay the backward graph; return the gradient of the hidden states.

        The gradient is for the hidden states of the last `replay_forward`. Gradients of parameters
        are added to ``main_grad``.

        Args:
            grads: gradients of the differentiable outputs.
        """

    @abstractmethod
    def adopt_forward(self) -> None:
        """Prepare the forward graph for replays, after all captures; called in capture order."""

    @abstractmethod
    def adopt_backward(self) -> None:
        """Prepare the backward graph for replays, after all `adopt_forward`; called in reverse order."""

    @abstractmethod
    def reset(self) -> None:
        """Free the graphs."""


class TorchModuleGraphs(ModuleGraphs):
    """Forward graph and backward graph of a module, captured with torch.

    Use: call `capture_forward` for all modules in order and `capture_backward` in reverse order.
    Then call `adopt_forward` and `adopt_backward` for all.

    During the captures a module owns its tensors. Inputs, gradients, and hidden states that are the
    input of another captured module are read by graphs and by no caller. They are freed after the
    capture of the last graph that reads them, and backward graphs of earlier modules use their
    memory. Tensors that callers may read stay allocated until the module is adopted. After that the
    module holds only tensors without ownership (`GraphBackend.without_ownership`), so that graphs of another
    capture size may use the same memory. `SlotGraphs` owns static tensors outside the pool.

    Args:
        function: hidden states ``(T, D)`` -> result of the module for the metadata in the slot. The
            first tensor of the result is the new hidden states.
        parameters: trainable parameters, each with ``main_grad``.
        backend: captures the graphs.
        copies: copies to the host that ``function`` itself queues on other streams. If given, hidden
            states are freed after the forward graph that reads them, unless autograd saved them.
        slot, previous, positions, takes_packed: as for `ModuleGraphs`. The first output of
            ``previous`` and the input of this module are the same memory.
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
        """Generation of the slot for which the forward graph was last replayed."""
        self.backward_generation = -1
        """Generation of the slot for which the backward graph was last replayed."""
        self._copies = copies
        self._following: TorchModuleGraphs | None = None
        self._missing_copies: Graph | None = None
        """Graph of the missing copies of [Note: copies between graphs] in capture_and_pool.py."""

    def would_overwrite(self, hidden: Tensor) -> bool:
        previous = self.previous
        holds_outputs = (
            isinstance(previous, TorchModuleGraphs)
            and previous.forward_generation == self.slot.generation
        )
        return holds_outputs and not same_memory(hidden, self.input)

    def capture_forward(self, hidden: Tensor) -> Tensor:
        """Capture the forward graph on the static input ``hidden``; return the static output."""
        # Create a new leaf: the autograd graph of this capture must end at this module's input,
        # whose gradient the backward graph computes.
        self.input = hidden.detach()
        self._leaf = self.input.detach().requires_grad_()
        saved: set[int] = set()

        def forward() -> list[Tensor]:
            with (
                torch.enable_grad(),
                nullcontext() if self._copies is None else addresses_noted(saved),
            ):
                self._live = Outputs.flatten(self._function(self._leaf))
            if self._copies is not None:
                # Copies must end in the graph where they began: no other graph can wait for them.
                self._copies.graph_boundary()
            # Detach, because the outputs must not keep the autograd graph of the capture alive.
            return [writable(tensor.detach()) for tensor in self._live.tensors]

        self._forward, self.outputs = self._backend.capture(forward)
        assert self._live is not None
        self.spec = self._live.spec
        self.differentiable = [tensor.requires_grad for tensor in self._live.tensors]
        if not self.differentiable[0]:
            raise TypeError(INDEPENDENT_OUTPUT)
        # The activations were offloaded. If autograd did not save the input itself, no backward graph
        # reads the input, and the next forward graphs can use its memory.
        if (
            self._copies is not None
            and isinstance(self.previous, TorchModuleGraphs)
            and address_of(self.input) not in saved
        ):
            self._release_input(self.previous)
        return self.outputs[0]

    def _release_input(self, previous: TorchModuleGraphs) -> None:
        """Free the input's memory by replacing all references with a tensor without ownership."""
        self.gives_up_input = True
        self.input = previous.outputs[0] = self._backend.without_ownership(self.input)
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
        """Capture the backward graph.

        Args:
            grad_outputs: static gradients of the differentiable outputs.
            passed_on: the output hidden states are the input of another captured module.
            following: graphs of the next module in forward order, whose backward was captured last.
        Returns:
            Gradient of the input. After the previous module has captured its backward graph, which
            reads this gradient, `release_gradient` frees its memory.
        """
        static = list(grad_outputs)
        self._following = following
        again = None if self._copies is None else self._copies.prefetched_copies()
        if again is not None:
            self._missing_copies = self._backend.capture(again)[0]
            del again  # the closure `again` keeps tensors of the pool allocated

        def backward() -> Tensor:
            assert self._live is not None
            outputs = [t for t, differs in zip(self._live.tensors, self.differentiable) if differs]
            # Set allow_unused, because the module may have parameters that this call did not use.
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
            return writable(grads[0])

        self._backward, self.grad_input = self._backend.capture(backward)
        # Both graphs of this module exist and contain the addresses of its tensors. So the tensors
        # are freed, and backward graphs of earlier modules, which are replayed later, may reuse
        # their memory.
        self._live = None
        without_ownership = self._backend.without_ownership
        self.input = without_ownership(self.input)
        self._leaf = self.input.detach().requires_grad_()
        if passed_on:
            self.outputs[0] = without_ownership(self.outputs[0])
        self.grad_outputs = [without_ownership(tensor) for tensor in static]
        return self.grad_input

    def release_gradient(self) -> None:
        """Free the memory of the input's gradient, and store only its address."""
        self.grad_input = self._backend.without_ownership(self.grad_input)

    def adopt_forward(self) -> None:
        """Free the memory of the outputs, and store only their addresses."""
        self.outputs = [self._backend.without_ownership(tensor) for tensor in self.outputs]

    def adopt_backward(self) -> None:
        """Free the memory of the input's gradient, and store only its address."""
        self.release_gradient()

    def reset(self) -> None:
        # After a failed capture some of these graphs do not exist.
        for name in ("_forward", "_missing_copies", "_backward"):
            graph = getattr(self, name, None)
            if graph is not None:
                graph.reset()
        self._live = None

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        bring(hidden, self.input)
        # Remember the generation: the outputs are in use until the slot is filled again. See
        # `would_overwrite`.
        self.forward_generation = self.slot.generation
        self._forward.replay()
        return tuple(tensor.detach() for tensor in self.outputs)

    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        for grad, static in zip(grads, self.grad_outputs):
            bring(grad, static)
        # The backward graph of the next module copies this module's activations back. If that graph
        # was not replayed, make the copies now.
        if self._missing_copies is not None and (
            self._following is None or self._following.backward_generation != self.slot.generation
        ):
            self._missing_copies.replay()
        self.backward_generation = self.slot.generation
        self._backward.replay()
        return self.grad_input.detach()


class _Replay(torch.autograd.Function):
    """Autograd function of the hidden states that replays the forward graph and the backward graph."""

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
                f"backward of micro-batch {ctx.generation} was called after micro-batch {captured.slot.generation} "
                "was copied to the same slot, which overwrites the activations. Finish forward and backward of a "
                "micro-batch before its slot is filled again."
            )
        if captured.slot.replayed_position >= captured.positions[1]:
            raise RuntimeError(
                "the backward pass of a replayed module ran twice, or ran after the backward pass of an earlier "
                "module; the activations may be overwritten. Call backward once, on the sum of all losses."
            )
        captured.slot.replayed_position = captured.positions[1]
        wanted = [grad for grad, differs in zip(grads, captured.differentiable) if differs]
        grad_hidden = captured.replay_backward(wanted)
        # Autograd may store the returned tensor as the ``grad`` of a leaf, which the next replay would
        # overwrite. So return a copy, except between captured modules, where there is no leaf.
        return grad_hidden if captured.previous is not None else grad_hidden.clone(), None
