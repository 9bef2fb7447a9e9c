"""Construction of the layers of a pattern; `layers.kinds` has what each symbol stands for."""

from __future__ import annotations

from megatron_packed.config.kinds.layer_kind import LayerKind
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import has_shard
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
    Raises:
        ValueError: a part of the kind's record is no module of the layer, or a parameter does not say
            what a tensor-parallel rank holds of it.
    """
    kind = MIXERS[symbol]
    norm = build_norm(config, build)
    layer = kind.layer(
        norm,
        kind.build(config, build, place),
        config.hidden_dropout,
        config.residual_multiplier,
        norms_output=config.norms_output(place.number),
        backend=build.backends.residual_projection,
    )
    _check_parts(kind.kind, layer)
    if build.tp.size > 1:
        _check_shards(kind.kind, layer, build.tp.size)
    return layer


def _check_parts(kind: LayerKind, layer: HybridLayer) -> None:
    for part in kind.parts:
        try:
            layer.get_submodule(part.path)
        except AttributeError as error:
            raise ValueError(
                f"the {kind.layer} has no module {part.path!r}, which its record names for "
                f"{part.name!r}: {error}"
            ) from error


def _check_shards(kind: LayerKind, layer: HybridLayer, tp_size: int) -> None:
    """Refuse parameters without a shard.

    Their gradients would not be summed, and with sequence parallelism each rank has only the term of
    its own rows.
    """
    unmarked = [name for name, parameter in layer.named_parameters() if not has_shard(parameter)]
    if unmarked:
        raise ValueError(
            f"the {kind.layer} has parameters that do not say what each of {tp_size} tensor-parallel "
            f"ranks holds of them: {', '.join(unmarked)}. Build projections with column_parallel and "
            "row_parallel, and mark other parameters with set_shard, tp.use_inside or tp.use_on_rows."
        )
