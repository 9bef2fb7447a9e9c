"""Replacement for the ``forward`` of a captured module, which replays graphs or runs eagerly.

A graph repeats one recorded call, so a call that differs from the recorded call must run eagerly.
`GraphedForward` observes one call in a warm-up, and reports why a graph could not repeat that call.
Later it checks every call before it replays. `KeywordLayer` adapts layers that are called with
keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs import fallback_reasons as reasons
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend, address_of
from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters, GraphFallbackError
from megatron_packed.cuda_graphs.module_graphs import ModuleGraphs
from megatron_packed.cuda_graphs.slots import Slot, SlotPackedSeqParams, SlotRing
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.host_reads import host_reads
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.torch_private import tree_leaves


class Observation(NamedTuple):
    """Input and output of one call of a module in a warm-up."""

    hidden: Tensor
    output: Tensor
    """The first tensor of the module's result."""
    takes_packed: bool


class GraphedForward:
    """Replacement for the ``forward`` of a module that has graphs.

    Args:
        name: name of the module in messages.
        module: module whose forward takes hidden states ``(T, D)`` and the pack's metadata, or only
            hidden states. The constructor assigns this object to ``module.forward``.
        slots: slots that determine to which micro-batch a call belongs.
        backend: captures the graphs.
        counters: receives the fallbacks of this module.
        strict: an eager call within a replayed micro-batch is an error.
        calls: list to which this object appends itself for every observed call.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        slots: SlotRing,
        backend: GraphBackend,
        counters: GraphCounters,
        *,
        strict: bool,
        calls: list[GraphedForward],
    ) -> None:
        self.name = name
        self.module = module
        self.slots = slots
        self.original_forward = module.forward
        self._replaced = module.forward
        self._captured: dict[Slot, dict[CaptureSize, ModuleGraphs]] = {
            slot: {} for slot in slots.slots
        }
        self.refusals: dict[CaptureSize, str] = {}
        """Capture size -> reason why the module could not be captured for this size."""
        self.mode = "replay"
        """``replay``, or in warm-ups ``observe`` or ``bypass`` (run eagerly without checks)."""
        self.observed: Observation | None = None
        self.problem: str | None = None
        """Reason why a graph could not repeat the observed call."""
        self._backend = backend
        self._counters = counters
        self._strict = strict
        self._calls = calls
        # An attribute of the object takes precedence over the forward of its class. `nn.Module.__call__`
        # is unchanged, so hooks of the module still run.
        self._forward_was_replaced = "forward" in vars(module)
        module.forward = self

    def remove(self) -> None:
        """Restore the module's original ``forward``, and free all graphs."""
        del self.module.forward
        if self._forward_was_replaced:
            self.module.forward = self._replaced
        self.forget()

    def check_first_call(self, say: Callable[[str], None]) -> None:
        """Report host reads of the module's next eager call, which is on a CPU.

        Later calls have no additional cost.

        Args:
            say: receives one sentence if the call reads values on the host.
        """
        original = self.original_forward

        def checked(*args: Any, **options: Any) -> Any:
            self.original_forward = original
            result, reads = host_reads(original, args, options)
            if reads:
                say(reasons.reads_on_host(self.name, [str(read) for read in reads]))
            return result

        self.original_forward = checked

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name} has CUDA graphs, which cannot be copied or saved; copy or save its state_dict(), or close "
            "the graphs first."
        )

    def forget(self, slot: Slot | None = None, size: CaptureSize | None = None) -> None:
        """Free graphs.

        Args:
            slot: slot whose graphs are freed; by default all slots.
            size: capture size whose graphs are freed; by default all sizes.
        """
        for graphs in self._captured.values() if slot is None else [self._captured[slot]]:
            for captured_size in list(graphs) if size is None else [size]:
                captured = graphs.pop(captured_size, None)
                if captured is not None:
                    captured.reset()

    def in_slot(self, slot: Slot) -> dict[CaptureSize, ModuleGraphs]:
        return self._captured[slot]

    @property
    def captured(self) -> dict[CaptureSize, ModuleGraphs]:
        """Graphs of the module in the first slot, which is the only slot in training."""
        return self._captured[self.slots.slots[0]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.mode == "observe":
            return self._observe(args, options)
        current = None if self.mode == "bypass" else self.slots.of_call(args, options)
        if current is None:
            # Do not count a fallback: `place` has already counted an eager micro-batch. A pack that was
            # never placed, for example in text generation, is not expected to be replayed.
            return self.original_forward(*args, **options)
        captured = self._captured[current.slot].get(current.capture_size)
        reason = self._why_eager(captured, current, args, options)
        if captured is not None and reason is None:
            return captured.replay(args[0])
        if self._strict:
            raise GraphFallbackError(
                f"a module would run eagerly, which {flags.CUDA_GRAPH_STRICT} forbids: {self.name}: {reason}."
            )
        self._counters.module_fallbacks[f"{self.name}: {reason}"] += 1
        if (
            captured is not None
            and captured.gives_up_input
            and args
            and isinstance(args[0], Tensor)
        ):
            # The memory of the input is in the pool, and a later graph overwrites it. The eager call
            # may save its input for backward, so give it a copy.
            args = (args[0].clone(), *args[1:])
        return self.original_forward(*args, **options)

    def _why_eager(
        self,
        captured: ModuleGraphs | None,
        current: SlotPackedSeqParams,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> str | None:
        if captured is None:
            return self.refusals.get(current.capture_size, reasons.NOT_IN_WARM_UP)
        hidden, takes_packed = args[0] if args else None, len(args) == 2 and args[1] is current
        as_before = (
            len(args) == 1 + takes_packed and takes_packed == captured.takes_packed and not options
        )
        if not isinstance(hidden, Tensor) or not as_before:
            return reasons.OTHER_ARGUMENTS
        if hidden.shape != captured.input.shape or hidden.dtype != captured.input.dtype:
            return reasons.other_hidden_states(hidden.shape, hidden.dtype)
        if torch.is_autocast_enabled(hidden.device.type):
            return reasons.UNDER_AUTOCAST
        if torch.is_grad_enabled() and not self.module.training:
            return reasons.IN_EVALUATION_MODE
        if torch.is_grad_enabled() and not hidden.requires_grad:
            return reasons.WITHOUT_INPUT_GRADIENT
        if captured.out_of_order:
            return reasons.OUT_OF_ORDER
        if captured.would_overwrite(hidden):
            return reasons.INPUT_OVERWRITTEN
        return None

    def _observe(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        self._calls.append(self)
        states_before = self._random_states()
        result = self.original_forward(*args, **options)
        takes_packed = len(args) > 1 and any(slot.holds(args[1]) for slot in self.slots.slots)
        leaves = tree_leaves(result)
        self.problem = self._problem(args, options, takes_packed, leaves, states_before)
        if self.problem is None:
            self.observed = Observation(args[0], leaves[0], takes_packed)
        return result

    def _problem(
        self,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        takes_packed: bool,
        leaves: Sequence[object],
        random_states: Sequence[Tensor],
    ) -> str | None:
        if self.observed is not None or self.problem is not None:
            return self.problem or reasons.RUNS_TWICE
        if not all(map(torch.equal, random_states, self._random_states())) and self._differs(
            args, options, leaves
        ):
            return reasons.RANDOM_NUMBERS
        if len(args) > 1 and isinstance(args[1], PackedSeqParams) and not takes_packed:
            return reasons.DERIVED_METADATA
        if options or len(args) != 1 + takes_packed or not isinstance(args[0], Tensor):
            return reasons.MORE_ARGUMENTS
        if any(getattr(parameter, "main_grad", None) is None for parameter in self.parameters):
            return reasons.NO_MAIN_GRAD
        if torch.is_autocast_enabled(args[0].device.type):
            return reasons.UNDER_AUTOCAST
        if not self.module.training:
            return reasons.IN_EVALUATION_MODE
        if torch.is_grad_enabled() and not args[0].requires_grad:
            return reasons.WITHOUT_INPUT_GRADIENT
        other_types = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
        if other_types or not leaves:
            return reasons.returns_no_tensors(other_types)
        # The pool treats the results as the graph's own memory, which replays overwrite and which
        # other graphs may use. So a result must not be memory with another owner.
        statics = [slot.buffer for slot in self.slots.slots]
        foreign = {
            address_of(t)
            for t in (args[0], *statics, *self.module.parameters(), *self.module.buffers())
        }
        if any(
            isinstance(leaf, Tensor) and leaf.numel() and address_of(leaf) in foreign
            for leaf in leaves
        ):
            return reasons.FOREIGN_MEMORY
        return None

    @torch.no_grad()
    def _differs(
        self, args: tuple[Any, ...], options: Mapping[str, Any], leaves: Sequence[object]
    ) -> bool:
        """Return whether a second call returns different values.

        Some kernels advance the generator without using its numbers. A graph may repeat such kernels.
        """
        pairs = zip(leaves, tree_leaves(self.original_forward(*args, **options)))
        return not all(
            torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)
        )

    def _random_states(self) -> list[Tensor]:
        """Return the states of the device's generator and the host's."""
        return [
            self._backend.random_state(self.slots.slots[0].buffer.device),
            torch.get_rng_state(),
        ]


class KeywordLayer(nn.Module):
    """Adapter for a layer that is called with keywords, as megatron-core's layers are.

    The adapter is for library users who train a model of megatron-core's layers. The trainer's own
    models do not need it. Make one adapter for each layer, and pass the adapters to `LayerGraphs`.

    `LayerGraphs` captures modules that are called as ``module(hidden_states, packed)``, and the
    adapter is such a module. The adapter also replaces the forward of ``layer``. The new forward
    accepts the same keywords, calls the adapter, and returns the same kind of result. So the model
    that calls ``layer`` does not change, and parameters keep their names. Only one argument changes:
    pass megatron_packed's `PackedSeqParams` as ``packed_seq_params``. The adapter converts it to
    megatron-core's class.

    Args:
        layer: layer whose forward takes ``hidden_states``, ``packed_seq_params`` and other keywords.
            It returns hidden states, or ``(hidden_states, context)`` with None as context.
        constants: values of the other keywords. They must be the same in every call, because a graph
            repeats them. Keywords that are None may be left out. A tensor must keep its address.
    Example:
        ``KeywordLayer(transformer_layer)``, captured by `LayerGraphs`, is replayed when the model
        calls ``transformer_layer(hidden_states=x, attention_mask=None, packed_seq_params=packed)``.
    """

    def __init__(self, layer: nn.Module, **constants: object) -> None:
        super().__init__()
        self.layer = layer
        self._constants = constants
        self._layer_forward = layer.forward
        self._layer_forward_was_replaced = "forward" in vars(layer)
        self._returns_tuple = False
        layer.forward = self._called_by_keywords

    @property
    def training(self) -> bool:
        """Mode of the layer. The model sets the mode of the layer, not the mode of the adapter."""
        return self.layer.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass  # `nn.Module.train` also sets the mode of the layer, a submodule, right after this

    def forward(self, hidden_states: Tensor, packed: PackedSeqParams) -> Tensor:
        """Call the layer with keywords, and with ``packed`` converted to megatron-core's class.

        Raises:
            TypeError: the layer returns a context, or ``packed`` is not a `PackedSeqParams`.
        """
        if not isinstance(packed, PackedSeqParams):
            raise TypeError(
                f"packed_seq_params is a {type(packed).__name__}, and a graph would repeat the documents of this one "
                "pack; pass megatron_packed.packed.params.PackedSeqParams, which KeywordLayer converts."
            )
        result = self._layer_forward(
            hidden_states=hidden_states,
            packed_seq_params=packed.to_megatron_core(),
            **self._constants,
        )
        self._returns_tuple = isinstance(result, tuple)
        hidden: Tensor
        hidden, *context = result if self._returns_tuple else (result,)
        if any(value is not None for value in context):
            raise TypeError(
                "the layer returns a context besides hidden states; only a context of None can be captured."
            )
        return hidden

    def _called_by_keywords(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        *,
        packed_seq_params: PackedSeqParams,
        **others: object,
    ) -> Tensor | tuple[Tensor, None]:
        others["attention_mask"] = attention_mask
        for name in others.keys() | self._constants.keys():
            # Also check constants that this call leaves out: a replay would still use the constant.
            if others.get(name) is not self._constants.get(name):
                raise ValueError(
                    f"{name} is not the object with which KeywordLayer was made, and a graph would repeat that object; "
                    f"pass the object of every call as KeywordLayer(layer, {name}=...)."
                )
        hidden = self(hidden_states, packed_seq_params)
        return (hidden, None) if self._returns_tuple else hidden

    def remove(self) -> None:
        """Restore the layer's original ``forward``. Close the graphs first."""
        del self.layer.forward
        if self._layer_forward_was_replaced:
            self.layer.forward = self._layer_forward


def check_apart(modules: Mapping[str, nn.Module]) -> None:
    """Check that no module already has graphs, and that no module is a part of another one.

    Raises:
        ValueError: a module already has graphs, or is a part of another module.
        TypeError: ``modules`` is not a mapping of names to modules.
    """
    if not isinstance(modules, Mapping):
        raise TypeError(
            f"modules is of type {type(modules).__name__}; pass a dictionary of names and modules, "
            "for example dict(model.layers.named_children())."
        )
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} is of type {type(module).__name__}; pass a torch.nn.Module.")
    names = {id(module): name for name, module in modules.items()}
    for name, module in modules.items():
        if isinstance(module.forward, GraphedForward):
            raise ValueError(
                f"{name} has the graphs of another LayerGraphs; close that LayerGraphs first."
            )
        for part in module.modules():
            other = names.get(id(part), name)
            if other != name:
                raise ValueError(
                    f"{other} is, or is a part of, {name}; capture only one of the two."
                )
