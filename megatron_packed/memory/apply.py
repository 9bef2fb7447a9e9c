"""Application of recomputation and offload to the layers of a model, by wrappers around modules.

Layers contain no code for recomputation or offload. A name in an option stands for a module of a
layer (`PARTS`). The forward of this module instance is replaced by a wrapper that recomputes or
offloads, and calls the original forward. No module is added and no parameter moves, so parameters
keep their names and their order.

[Note: order of wrappers]
From inside to outside:

1. The saved tensors of a part are offloaded.
2. The core of attention and the experts' activation are recomputed.
3. The mixer is recomputed.
4. The norm's output is recomputed for the mixer.
5. The layer, or a unit of several layers, is recomputed.

Hooks for saved tensors nest in the same order. An inner scope handles the tensors that it supports,
and passes the other tensors to the outer hooks. Wrappers are objects that hold references to
modules. A copy of a model, or a pickle, has copies of its wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.kinds.layer_kind import LAYER_NORM
from megatron_packed.config.sections.memory import (
    MIXERS,
    MODULES,
    OFFLOADED,
    OFFLOADED_IN,
    PARTS,
    RECOMPUTED_IN,
    RECOMPUTED_PARTS,
    MemoryConfig,
)
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.memory.recompute_outputs import recomputed_output
from megatron_packed.memory.saved_tensor_scopes import SavedTensorScopes
from megatron_packed.memory.saved_tensors import SavedByAutograd, SaveTensors

NORM_FORWARD = "with_residual"
"""Method of the norm before a mixer that a layer calls; it returns the output and the input."""


def apply_memory(
    layers: nn.ModuleList, symbols: Sequence[str], config: MemoryConfig, offload: Offload | None
) -> None:
    """Wrap the parts of ``layers`` that ``config`` selects for recomputation or offload.

    Args:
        layers: the layers. Their container is called with the hidden state, the metadata of the pack
            and, optionally, the numbers of the layers to run. It returns the hidden state, and a
            list with additional results of each layer.
        symbols: symbol of each layer in the hybrid layer pattern.
        config: options.
        offload: offloader that copies to the host; None if nothing is offloaded.
    """
    save: SaveTensors = SavedByAutograd
    if offload is not None and config.offload_layer_inputs:
        save = offload.save
    for number, (symbol, layer) in enumerate(zip(symbols, layers, strict=True)):
        if offload is not None:
            offload_parts(layer, offloaded_parts(config, symbol, number), offload)
        recompute_parts(layer, recomputed_parts(config, symbol))
        if config.layers_per_unit == 1 and config.recomputes_layer(number):
            layer.forward = RecomputedLayer(layer, save)
    # A unit saves only the input of its first layer, so its layers are not wrapped one by one.
    if config.layers_per_unit > 1:
        layers.forward = RecomputedUnits(layers, config.layers_per_unit, save)


def offloaded_parts(config: MemoryConfig, symbol: str, number: int) -> list[str]:
    """Return the parts of layer ``number`` whose saved tensors are offloaded.

    A recomputed part is not offloaded, because it saves no tensors. If the experts' activation is
    recomputed, the projection that reads the activation is not offloaded either.
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
    """Return the parts of a ``symbol`` layer that are recomputed.

    If the mixer of experts (``moe``) is recomputed, its activation is not listed separately.
    """
    parts = [part for part in config.modules if RECOMPUTED_IN.get(part, symbol) == symbol]
    if "moe" in parts:
        return [part for part in parts if part != EXPERT_ACTIVATION]
    return parts


def offload_parts(layer: nn.Module, parts: Sequence[str], offload: Offload) -> None:
    """Offload the tensors that the named parts of a layer save for their backward pass.

    Each layer has separate scopes. So a tensor that several layers save (positions of a pack) is
    copied once for each of them. With shared scopes the backward pass of a later layer would restore
    the offloaded group of an earlier layer, and a graph would read a tensor that another graph
    restored.
    """
    scopes = SavedTensorScopes(offload.save, offload.min_elements)
    for part in parts:
        module = attrgetter(PARTS[part].path)(layer)
        before_mixer = PARTS[part].path == "norm" and not norms_output(layer)
        method = NORM_FORWARD if before_mixer else "forward"
        call = OffloadedCall(method_of(module, method), scopes, layer)
        call.reason = f"{OFFLOADED} names {part}"
        setattr(module, method, call)


def offload_module(module: nn.Module, offload: Offload) -> None:
    """Offload the tensors that ``module`` saves for its backward pass, from the next forward on.

    The forward of this instance is replaced; ``del module.forward`` restores it. Parameters and
    buffers of the module stay on the device. Tensors with fewer than ``offload.min_elements``
    elements stay on the device too.

    Args:
        module: any module, for example one layer; the activations of one call are one group.
        offload: offloader; one object for all modules of a model.
    """
    scopes = SavedTensorScopes(offload.save, offload.min_elements)
    module.forward = OffloadedCall(method_of(module, "forward"), scopes, module)


def recompute_parts(layer: nn.Module, parts: Sequence[str]) -> None:
    """Recompute the named parts of a layer in its backward pass. See [Note: order of wrappers]."""
    for name in parts:
        if name not in RECOMPUTED_PARTS:
            continue
        modules = [attrgetter(PARTS[part].path)(layer) for part in RECOMPUTED_PARTS[name]]
        if len(modules) > 1:
            recompute_between(modules[0], "forward", modules[1], f"{MODULES} names {name}")
        else:
            # Attention kernels advance the random generator, although they use no random numbers.
            # If they run again, dropout elsewhere in the layer would draw other numbers. So rewind
            # the generator if the layer has dropout.
            modules[0].forward = RecomputedCall(
                method_of(modules[0], "forward"), dropouts_of(layer)
            )
    if any(part in MIXERS for part in parts):
        mixer = attrgetter("mixer")(layer)
        mixer.forward = RecomputedCall(method_of(mixer, "forward"), dropouts_of(mixer))
    # Apply this wrapper after the wrapper of the mixer. A recomputed mixer saves its input, which
    # is the norm's output, and the hook of this wrapper must receive that tensor.
    # The mixer does not read the output of a norm after it.
    if LAYER_NORM in parts and not norms_output(layer):
        recompute_between(attrgetter("norm")(layer), NORM_FORWARD, attrgetter("mixer")(layer))


def norms_output(layer: nn.Module) -> bool:
    """Return True if the layer's norm is after its mixer."""
    return bool(getattr(layer, "norms_output", False))


def recompute_between(
    first: nn.Module, method: str, second: nn.Module, reason: str = "a part is recomputed"
) -> None:
    """Make ``second`` save a function that computes the output of ``first``, instead of that output.

    Args:
        reason: reason why both calls stay separate.
    """
    hook = RecomputedBetween(method_of(first, method), method_of(second, "forward"), reason)
    setattr(first, method, hook.first)
    second.forward = hook.second


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method for a wrapper of it, which may replace it. The wrapper can be pickled."""
    replaced: Callable[..., Any] | None = vars(module).get(name)
    return OwnMethod(module, name) if replaced is None else replaced


def dropouts_of(module: nn.Module) -> list[nn.Dropout]:
    """Return the dropout submodules, which draw random numbers in training."""
    return [part for part in module.modules() if isinstance(part, nn.Dropout)]


class OwnMethod:
    """Method of a module's class, bound to the module, also if an attribute of the module replaces it.

    A bound method is pickled as module and name. When the pickle is loaded, this name may already
    stand for a wrapper of the method, and the wrapper would then call itself without end.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.__self__ = module
        self._name = name

    @property
    def __func__(self) -> Callable[..., Any]:
        """Function of the class, as of a bound method; see `layers.joined.is_observed`."""
        function: Callable[..., Any] = getattr(type(self.__self__), self._name)
        return function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__func__(self.__self__, *args, **options)


class OffloadedCall:
    """Forward of a part that offloads its saved tensors when it returns.

    Attributes:
        wrapped_forward: function that gets all arguments; see `layers.joined.is_observed`.
        reason: reason why this call stays separate; see `layers.joined.observation`.
    """

    reason = "activations of a part are offloaded"

    def __init__(
        self, forward: Callable[..., Any], scopes: SavedTensorScopes, layer: nn.Module
    ) -> None:
        self.wrapped_forward = forward
        self._scopes = scopes
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        # A part may read any parameter or buffer of the layer. All of them stay on the device, so
        # the scope must not offload them.
        with self._scopes.scope(self._layer):
            return self.wrapped_forward(*args, **options)


class RecomputedCall:
    """Forward of a part that the backward pass runs again from the saved inputs.

    Args:
        dropouts: if one of them draws random numbers, the second run begins with the random states
            of the first.

    Attributes:
        wrapped_forward: as in `OffloadedCall`.
    """

    def __init__(self, forward: Callable[..., Any], dropouts: Sequence[nn.Dropout] = ()) -> None:
        self.wrapped_forward = forward
        self._dropouts = dropouts

    def __call__(self, *args: Any) -> Any:
        # Rewind only if dropout is active, because a capture cannot read the generators' states.
        return checkpoint(self.wrapped_forward, *args, rewind=draws(self._dropouts))


class RecomputedLayer:
    """Forward of a layer that the backward pass runs again from the saved input."""

    def __init__(self, layer: nn.Module, save: SaveTensors) -> None:
        self._forward = method_of(layer, "forward")
        self._save = save
        self._dropouts = dropouts_of(layer)

    def __call__(self, *args: Any) -> Any:
        rewind = draws(self._dropouts)
        return checkpoint(self._forward, *args, rewind=rewind, save=self._save)


class RecomputedUnits:
    """Forward of layers in units; the backward pass runs one unit after the other again.

    A call with the numbers of consecutive layers begins with a new unit.

    Args:
        layers: all layers.
        size: number of layers in a unit; the last unit may have fewer.
        save: saves the input of each unit.
    """

    def __init__(self, layers: nn.ModuleList, size: int, save: SaveTensors) -> None:
        self._forward = method_of(layers, "forward")
        self._save = save
        self._dropouts = dropouts_of(layers)
        self._size = size
        self._all = range(len(layers))

    def __call__(
        self, hidden: Tensor, packed: Any, numbers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Any]]:
        reports: list[Any] = []
        rewind = draws(self._dropouts)
        chosen = self._all if numbers is None else numbers
        for at in range(0, len(chosen), self._size):
            unit = chosen[at : at + self._size]
            hidden, unit_reports = checkpoint(
                self._forward, hidden, packed, unit, rewind=rewind, save=self._save
            )
            reports += unit_reports
        return hidden, reports


def draws(dropouts: Iterable[nn.Dropout]) -> bool:
    """Return whether a forward pass would draw random numbers now."""
    return any(dropout.training and dropout.p > 0 for dropout in dropouts)


class RecomputedBetween:
    """Forwards of two consecutive modules, where the backward of the second recomputes the first.

    Between the two calls this object holds the arguments of the first module, which autograd holds
    too.

    Attributes:
        wrapped_forward: as in `OffloadedCall`, for the second module.
    """

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any], reason: str) -> None:
        self.reason = reason
        self._first = first
        self.wrapped_forward = second
        self._args: tuple[Any, ...] = ()

    def first(self, *args: Any) -> Any:
        self._args = args
        return self._first(*args)

    def second(self, *args: Any) -> Any:
        # Arguments of an earlier pass that failed cannot be left here: `first` has replaced them.
        first_args = self._args
        self._args = ()
        output = next(arg for arg in args if isinstance(arg, Tensor))
        with recomputed_output(output, self._output, *first_args):
            return self.wrapped_forward(*args)

    def _output(self, *args: Any) -> Tensor:
        """Compute the tensor that the second module reads, without the residual of a norm."""
        result = self._first(*args)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output
