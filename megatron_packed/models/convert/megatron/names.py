"""Names of megatron-core's tensors for each parameter of the project's model.

megatron-core stores the sections of a Mamba layer's projection and convolution as tensors of their
own, and all experts of a layer as one tensor. Hybrid models number their layers as the pattern does.
One layer of a GPT model is two layers of the pattern. The tensors of all its layers may be stored as
one tensor, with the layers as its first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.kinds.mixer_kind import hybrid_layer_name
from megatron_packed.layers.kinds.registry import MIXERS, kinds_of
from megatron_packed.models.convert.families.family import OUTPUT, TABLE
from megatron_packed.models.convert.megatron.torch_dist import StoredTensor
from megatron_packed.models.convert.model_weights import model_on_meta, stored_tensors
from megatron_packed.models.convert.row_maps import Part, interleaved
from megatron_packed.models.convert.weight_rows import (
    HuggingFaceTensor,
    Shape,
    Weight,
    rows_without_padding,
    their_shape,
)
from megatron_packed.models.hybrid_model import HybridModel

WORD_TABLE = "embedding.word_embeddings.weight"
OUTPUT_TABLE = "output_layer.weight"
PREFIXES = ("", "module.", "model.")
"""Beginnings of all names: none in Megatron, ``module.`` in NeMo."""
_GPT_NORM = "decoder.final_layernorm.weight"
_GPT_DEPTH = ("transformer_layer", "mtp_model_layer")
"""Names of the layer in one depth of multi-token prediction of a GPT model."""
OPTIMIZER = ("optimizer.", "chained_")
"""Beginnings of the names of the optimizer's tensors."""
_OUTSIDE = {
    TABLE: (WORD_TABLE,),
    OUTPUT: (OUTPUT_TABLE,),
    "final_norm.weight": ("decoder.final_norm.weight", _GPT_NORM),
    "final_norm.bias": ("decoder.final_norm.bias", "decoder.final_layernorm.bias"),
}


class Source(NamedTuple):
    """Tensor of a checkpoint, or one layer of a tensor that holds all layers."""

    tensor: str
    layer: int | None
    weight: str | None = None
    """Bf16 tensor of which ``tensor`` holds the remainders of float32 masters; None for values."""


@dataclass(frozen=True, kw_only=True)
class NamedWeights:
    """Parameters of the project's model, and the tensor of the checkpoint for each part."""

    weights: dict[str, Weight]
    sources: dict[str, Source]
    buffers: frozenset[str] = frozenset()
    """Names of weights that are not trained, and have no state of the optimizer."""


def prefix_of(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the beginning of all names of the model; None if there is no table of words."""
    return next((prefix for prefix in PREFIXES if prefix + WORD_TABLE in tensors), None)


def named_weights(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    *,
    path: Path,
) -> NamedWeights:
    """Return the tensors of the checkpoint for every parameter.

    Args:
        path: folder of the checkpoint, for messages.
    Raises:
        CheckpointError: tensors are missing, additional, or have another shape.
    """
    model = model_on_meta(config, dtype)
    if unknown := unknown_layers(config):
        raise CheckpointError(
            f"does not fit the model: Megatron has no {', '.join(unknown)}", path=path
        )
    prefix = prefix_of(tensors) or ""
    gpt = f"{prefix}{_GPT_NORM}" in tensors
    buffers = frozenset(name for name, _ in model.named_buffers())
    weights = {weight.name: weight for weight in _weights(model, config)}
    parameters = NamedWeights(weights=weights, sources={}, buffers=buffers)
    problems: list[str] = []
    for name, weight in weights.items():
        for part in weight.parts:
            source = _source(_choices(part.name, config, prefix, gpt=gpt), tensors)
            problems += _problems(source, part.shape, tensors, name)
            parameters.sources[part.name] = source
    used = {source.tensor for source in parameters.sources.values()}
    problems += [
        f"{name} is extra"
        for name in tensors
        if not name.startswith(OPTIMIZER) and name not in used
    ]
    if problems:
        raise CheckpointError(
            "does not fit the model: " + "; ".join(first_of(problems, 10)),
            path=path,
            cure="give the flags of its model after the options of convert",
        )
    return parameters


def first_of(texts: list[str], most: int) -> list[str]:
    """Return the first texts, and the number of the others as a text."""
    omitted = [f"{len(texts) - most} more"] if len(texts) > most else []
    return texts[:most] + omitted


def new_weights(config: ModelConfig, dtype: torch.dtype) -> list[tuple[Weight, dict[str, str]]]:
    """Return every parameter, with the name in a new hybrid checkpoint of each of its parts."""

    return [
        (
            weight,
            {
                part.name: _choices(part.name, config, "", gpt=False)[0].tensor
                for part in weight.parts
            },
        )
        for weight in _weights(model_on_meta(config, dtype), config)
    ]


def _weights(model: HybridModel, config: ModelConfig) -> Iterator[Weight]:
    """Yield every parameter of the model, with the parts that Megatron stores."""
    for name, parameter in stored_tensors(model).items():
        shape = tuple(parameter.shape)
        parts = tuple(
            HuggingFaceTensor(ours, their_shape(name, shape, part.rows, 1), part.moves)
            for ours, part in _parts(name, shape, config)
        )
        yield Weight(name=name, shape=shape, dtype=parameter.dtype, parts=parts)


def _parts(name: str, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a parameter, as its name with the name of the section, and their rows."""
    kind = config.layer_types[int(name.split(".")[1])] if name.startswith("layers.") else ""
    names = MIXERS[kind].megatron if kind else None
    chosen: tuple[str, ...] = ()
    sections = {} if names is None or names.sections is None else names.sections(config)
    if names is not None and ".mixer.in_proj." in name:
        chosen = tuple(sections)
    elif names is not None and ".mixer.conv1d." in name:
        chosen = names.convolved
    if not chosen:
        yield name, interleaved(1, [rows_without_padding(name, shape, config)])[0]
        return
    parts = interleaved(1, [sections[section] for section in chosen])
    for section, part in zip(chosen, parts, strict=True):
        yield f"{name}.{section}", part


def unknown_layers(config: ModelConfig) -> list[str]:
    """Return words for the kinds of layers that Megatron does not have."""
    kinds = kinds_of(config.layer_types)
    return [
        f"{mixer.kind.layer}s ({mixer.kind.symbol})" for mixer in kinds if mixer.megatron is None
    ]


def _choices(ours: str, config: ModelConfig, prefix: str, *, gpt: bool) -> list[Source]:
    """Return the possible places of a part of a parameter."""
    if ours.startswith("mtp."):
        their = f"{prefix}mtp.layers.{ours.removeprefix('mtp.')}"
        return [Source(their.replace(".final_norm.", ".final_layernorm."), None)]
    if not ours.startswith("layers."):
        return [Source(prefix + their, None) for their in _OUTSIDE[ours]]
    _, number, inside = ours.split(".", 2)
    layer = int(number)
    names = MIXERS[config.layer_types[layer]].megatron
    assert names is not None, "`unknown_layers` refuses such models"
    depth, place = config.depth_of_layer(layer), config.number_in_part(layer)
    beginnings = [hybrid_layer_name(config, layer)]
    if gpt:
        block = f"mtp.layers.{depth - 1}"
        main = [f"decoder.layers.{place // 2}"]
        beginnings = [f"{block}.{folder}" for folder in _GPT_DEPTH] if depth else main
    sources = []
    for tensor in names.possible(inside):
        sources += [Source(f"{prefix}{folder}.{tensor}", None) for folder in beginnings]
        if gpt and not depth:
            sources.append(Source(f"{prefix}decoder.layers.{tensor}", place // 2))
    return sources


def _source(choices: list[Source], tensors: Mapping[str, StoredTensor]) -> Source:
    return next((choice for choice in choices if choice.tensor in tensors), choices[0])


def _problems(
    source: Source, expected: Shape, tensors: Mapping[str, StoredTensor], name: str
) -> Iterator[str]:
    stored = tensors.get(source.tensor)
    if stored is None:
        yield f"{source.tensor} is missing"
        return
    shape = stored.shape if source.layer is None else stored.shape[1:]
    if source.layer is not None and not 0 <= source.layer < (stored.shape or (0,))[0]:
        yield f"{source.tensor} has no layer {source.layer}"
    padded = name in (TABLE, OUTPUT) and len(shape) == 2 and shape[0] >= expected[0]
    if (shape[1:] != expected[1:]) if padded else (shape != expected):
        yield f"{source.tensor} has the shape {list(shape)}, but the model needs {list(expected)}"
    if not stored.dtype.is_floating_point:
        yield f"{source.tensor} has the data type {stored.dtype}"
