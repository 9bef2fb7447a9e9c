"""Recomputation and offload, put on the layers of a model from outside.

Layers compute and know of neither. What a flag names is a module of the layer (`PARTS`), whose
forward is replaced on the instance by one that recomputes or offloads around it. No module is added
and no parameter moves, so parameters keep their names and their order.

[Note: order of wrappers]
From inside to outside: a part's saved tensors are offloaded; the core of attention and the experts'
activation are recomputed; the mixer is recomputed; the norm's output is recomputed for the mixer;
the layer, or a unit of several layers, is recomputed. Hooks for saved tensors nest the same way: an
inner scope takes what it can, and what it declines goes to the outer hooks. Wrappers are objects that refer to
modules and are called in their place; a copied model gets copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from megatron_packed.config.sections.memory import (
    CORE_ATTENTION,
    EXPERT_ACTIVATION,
    LAYER_NORM,
    MIXERS,
    OFFLOADED_IN,
    RECOMPUTED_IN,
    MemoryConfig,
)
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.memory.recompute_outputs import recomputed_output
from megatron_packed.memory.saved_tensor_scopes import SavedTensorScopes
from megatron_packed.memory.saved_tensors import SavedByAutograd, SaveTensors

PARTS = {
    "attn_norm": "norm",
    "qkv_linear": "mixer.qkv",
    CORE_ATTENTION: "mixer.core_attn",
    "attn_proj": "mixer.proj",
    "mamba_norm": "norm",
    "mamba_in_proj": "mixer.in_proj",
    "mamba_scan": "mixer.mamba_scan",
    "mamba_out_proj": "mixer.out_proj",
    "mlp_norm": "norm",
    "mlp_fc1": "mixer.fc1",
    "mlp_act": "mixer.mlp_act",
    "mlp_fc2": "mixer.fc2",
    "expert_fc1": "mixer.experts.expert_fc1",
    EXPERT_ACTIVATION: "mixer.experts.moe_act",
    "expert_fc2": "mixer.experts.expert_fc2",
}
"""Name in a flag -> the module of a layer that it means."""
NORM_FORWARD = "with_residual"
"""Method of a layer's norm that the layer calls: it returns the output and the input."""


def apply_memory(
    layers: nn.ModuleList, symbols: Sequence[str], config: MemoryConfig, offload: Offload | None
) -> None:
    """Make ``layers`` recompute and offload what ``config`` says; without options change nothing.

    Args:
        layers: called with the hidden state, the metadata of the pack and optionally the numbers of
            the layers that run; returns the hidden state and a list with more of each layer.
        symbols: of the layers in the pattern.
        offload: copies to the host; None where nothing is offloaded.
    """
    save: SaveTensors = SavedByAutograd
    if offload is not None and config.offload_layer_inputs:
        save = offload.save
    for number, (symbol, layer) in enumerate(zip(symbols, layers, strict=True)):
        if offload is not None:
            offload_parts(layer, offloaded_parts(config, symbol, number), offload)
        recompute_parts(layer, recomputed_parts(config, symbol))
        if config.layers_per_unit == 1 and config.recomputes_layer(number):
            replace(layer, "forward", RecomputedLayer(layer, save))
    # A unit saves the input of its first layer alone, so no layer of it is wrapped by itself.
    if config.layers_per_unit > 1:
        replace(layers, "forward", RecomputedUnits(layers, config.layers_per_unit, save))


def offloaded_parts(config: MemoryConfig, symbol: str, number: int) -> list[str]:
    """Return the parts of layer ``number`` whose saved tensors are offloaded.

    A part that is recomputed is left out: it saves nothing that could be offloaded. So is the
    projection that reads the experts' activation where that is recomputed.
    """
    recomputed = recomputed_parts(config, symbol)
    if EXPERT_ACTIVATION in recomputed:
        recomputed = [*recomputed, "expert_fc2"]
    return [
        part
        for part, symbols in OFFLOADED_IN.items()
        if symbol in symbols and config.offloads_module(part, number) and part not in recomputed
    ]


def recomputed_parts(config: MemoryConfig, symbol: str) -> list[str]:
    """Return the parts of a ``symbol`` layer that are recomputed; a mixer contains its own parts."""
    found = [part for part in config.modules if RECOMPUTED_IN.get(part, symbol) == symbol]
    if "moe" in found:
        return [part for part in found if part != EXPERT_ACTIVATION]
    return found


def offload_parts(layer: nn.Module, parts: Sequence[str], offload: Offload) -> None:
    """Offload what the named parts of a layer save for their backward pass.

    A layer has scopes of its own, so that what layers share (positions of a pack) travels with each
    of them. Else the backward pass of a later layer would restore the whole offloaded group of an
    earlier one, and a graph would read what another graph has restored.
    """
    scopes = SavedTensorScopes(offload.save, offload.min_elements)
    for part in parts:
        module = attrgetter(PARTS[part])(layer)
        method = NORM_FORWARD if PARTS[part] == "norm" else "forward"
        replace(module, method, OffloadedCall(getattr(module, method), scopes, layer))


def offload_module(module: nn.Module, offload: Offload) -> None:
    """Offload what ``module`` saves for its backward pass, from its next forward pass on.

    The forward of this instance is replaced; ``del module.forward`` restores it. Parameters and
    buffers of the module stay on the device, and so does every tensor with fewer than
    ``offload.min_elements`` elements.

    Args:
        module: any module, for example one layer; the activations of one call are one group.
        offload: moves the activations of all modules of one model.
    """
    scopes = SavedTensorScopes(offload.save, offload.min_elements)
    replace(module, "forward", OffloadedCall(module.forward, scopes, module))


def recompute_parts(layer: nn.Module, parts: Sequence[str]) -> None:
    """Recompute the named parts of a layer in its backward pass. See [Note: order of wrappers]."""
    if CORE_ATTENTION in parts:
        core = attrgetter(PARTS[CORE_ATTENTION])(layer)
        # Kernels of attention move the generator although they draw nothing. Dropout around them
        # would draw other numbers when they run again.
        rewind = any(dropout.p > 0 for dropout in dropouts_of(layer))
        replace(core, "forward", RecomputedCall(core.forward, rewind))
    if EXPERT_ACTIVATION in parts:
        first = attrgetter(PARTS[EXPERT_ACTIVATION])(layer)
        second = attrgetter(PARTS["expert_fc2"])(layer)
        recompute_between(first, "forward", second)
    if any(part in MIXERS for part in parts):
        mixer = attrgetter("mixer")(layer)
        replace(mixer, "forward", RecomputedCall(mixer.forward))
    # After the mixer: the mixer's recomputation must save the norm's output through this hook.
    if LAYER_NORM in parts:
        recompute_between(attrgetter("norm")(layer), NORM_FORWARD, attrgetter("mixer")(layer))


def recompute_between(first: nn.Module, method: str, second: nn.Module) -> None:
    """Let ``second`` save a way to compute the output of ``first`` again, in place of the output."""
    hook = RecomputedBetween(getattr(first, method), second.forward)
    replace(first, method, hook.first)
    replace(second, "forward", hook.second)


def replace(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    """Set a method of one instance: a plain attribute, which is found before the class's."""
    setattr(module, method, function)


def dropouts_of(module: nn.Module) -> list[nn.Dropout]:
    """Return the submodules that draw random numbers in training."""
    return [part for part in module.modules() if isinstance(part, nn.Dropout)]


class OffloadedCall:
    """Forward of a part whose saved tensors are offloaded when it returns."""

    def __init__(
        self, forward: Callable[..., Any], scopes: SavedTensorScopes, layer: nn.Module
    ) -> None:
        self._forward = forward
        self._scopes = scopes
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        # Parameters and buffers of the whole layer stay on the device, whichever part reads them.
        with self._scopes.scope(self._layer):
            return self._forward(*args, **options)


class RecomputedCall:
    """Forward of a part that the backward pass runs again, from its inputs."""

    def __init__(self, forward: Callable[..., Any], rewind: bool = False) -> None:
        self._forward = forward
        self._rewind = rewind

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self._forward, *args, rewind=self._rewind)


class RecomputedLayer:
    """Forward of a layer that the backward pass runs again, from its input."""

    def __init__(self, layer: nn.Module, save: SaveTensors) -> None:
        self._forward = layer.forward
        self._save = save
        self._dropouts = dropouts_of(layer)

    def __call__(self, *args: Any) -> Any:
        # States of random generators cannot be read in a graph capture, so only where they matter.
        rewind = draws(self._dropouts)
        return checkpoint(self._forward, *args, rewind=rewind, save=self._save)


class RecomputedUnits:
    """Forward of all layers, of which the backward pass runs one unit after the other again.

    Args:
        size: layers of a unit; the last one may have fewer.
    """

    def __init__(self, layers: nn.ModuleList, size: int, save: SaveTensors) -> None:
        self._forward = layers.forward
        self._save = save
        self._dropouts = dropouts_of(layers)
        count = len(layers)
        self._units = [range(at, min(at + size, count)) for at in range(0, count, size)]

    def __call__(self, hidden: Tensor, *args: Any) -> tuple[Tensor, list[Any]]:
        reports: list[Any] = []
        rewind = draws(self._dropouts)
        for numbers in self._units:
            hidden, found = checkpoint(
                self._forward, hidden, *args, numbers, rewind=rewind, save=self._save
            )
            reports += found
        return hidden, reports


def draws(dropouts: Iterable[nn.Dropout]) -> bool:
    """Return whether a forward pass would draw random numbers now."""
    return any(dropout.training and dropout.p > 0 for dropout in dropouts)


class RecomputedBetween:
    """Forwards of two modules that follow each other: the backward pass of the second computes the
    output of the first again.

    Between the two calls it holds the arguments of the first, which autograd keeps anyway.
    """

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        self._first = first
        self._second = second
        self._args: tuple[Any, ...] = ()

    def first(self, *args: Any) -> Any:
        self._args = args
        return self._first(*args)

    def second(self, *args: Any) -> Any:
        # A failed pass may have left arguments; `first` has replaced them since.
        first_args = self._args
        self._args = ()
        output = next(arg for arg in args if isinstance(arg, Tensor))
        with recomputed_output(output, self._output, *first_args):
            return self._second(*args)

    def _output(self, *args: Any) -> Tensor:
        """Return what the second module reads: a norm returns the residual beside it."""
        result = self._first(*args)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output
