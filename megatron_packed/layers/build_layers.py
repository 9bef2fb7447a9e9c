"""Construction of the layers of a pattern; `layers.kinds` has what each symbol stands for."""

from __future__ import annotations

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Rotary
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import HybridLayer, HybridLayers, build_norm
from megatron_packed.layers.kinds.mixer_kind import FIRST, Place
from megatron_packed.layers.kinds.registry import MIXERS


def build_layers(config: ModelConfig, build: Build, rotary: Rotary | None = None) -> HybridLayers:
    """Build all layers of the pattern: the main model, then each depth of multi-token prediction.

    Args:
        config: sizes of the model.
        build: arguments that all layers share.
        rotary: tables of the rotary embedding, shared by all layers, or None.
    """
    return HybridLayers(
        build_layer(symbol, config, build, Place(number, config.depth_of_layer(number), rotary))
        for number, symbol in enumerate(config.layer_types)
    )


def build_layer(
    symbol: str, config: ModelConfig, build: Build, place: Place = FIRST
) -> HybridLayer:
    """Build the layer for one symbol of the layer pattern.

    Args:
        symbol: key of `MIXERS`.
        config: sizes of the model.
        build: arguments that all layers share.
        place: place of the layer in the model.
    """
    kind = MIXERS[symbol]
    norm = build_norm(config, build)
    return kind.layer(
        norm,
        kind.build(config, build, place),
        config.hidden_dropout,
        config.residual_multiplier,
        norms_output=config.norms_output(place.number),
        backend=build.backends.residual_projection,
    )
