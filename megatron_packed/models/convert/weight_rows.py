"""Parameters of the project's model and the Hugging Face tensors that they consist of.

A model tensor is a parameter of `HybridModel`; a Hugging Face tensor is one of the original files.
`row_maps.py` describes which rows of a model tensor belong to each Hugging Face tensor. The
remaining rows of a model tensor pad the vocabulary; they are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.family import (
    OUTPUT,
    TABLE,
    Entry,
    Family,
    Joined,
    OneOf,
    Tensors,
)
from megatron_packed.models.convert.row_maps import Move, Part, interleaved

Shape = tuple[int, ...]


class HuggingFaceTensor(NamedTuple):
    """Tensor of a Hugging Face model, and the positions of its rows in the model tensor."""

    name: str
    shape: Shape
    moves: tuple[Move, ...]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Model tensor and the Hugging Face tensors that it consists of."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[HuggingFaceTensor, ...]

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Build the model tensor from its Hugging Face tensors, converted to its dtype.

        Reads one Hugging Face tensor at a time, so memory holds the model tensor and one other.
        """
        parameter = torch.empty(self.shape, dtype=self.dtype)
        matrix = self._matrix(parameter)
        for part in self.parts:
            theirs = self._matrix(read(part.name).contiguous())
            for move in part.moves:
                move.ours.view(matrix).copy_(move.theirs.view(theirs))
        matrix[self._rows :].zero_()
        return parameter

    def split(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the contiguous Hugging Face tensors of ``whole`` by name; inverts `join`."""
        matrix, tensors = self._matrix(parameter.contiguous()), {}
        for part in self.parts:
            tensor = torch.empty(part.shape, dtype=parameter.dtype)
            for move in part.moves:
                move.theirs.view(self._matrix(tensor)).copy_(move.ours.view(matrix))
            tensors[part.name] = tensor
        return tensors

    @property
    def _rows(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts) // self._width

    @property
    def _width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1, self._width)


def parts_of(
    name: str,
    shape: Shape,
    family: Family,
    config: ModelConfig,
    files: Mapping[str, Shape] = {},
) -> tuple[HuggingFaceTensor, ...]:
    """Return the Hugging Face tensors of one model tensor.

    Args:
        shape: shape of the model tensor.
        config: the model; its ``vocab_size`` must be set.
        files: see `model_weights.weights_of`.
    """
    table = family.outside[TABLE]
    prefixes = [
        candidate for candidate in family.prefixes if table.replace("{model}", candidate) in files
    ]
    prefix = (prefixes or family.prefixes)[0]
    where, entry = _entry(name, family, config)
    return _parts(name, shape, entry, config, where.replace("{model}", prefix), files)


def layer_prefix(name: str, family: Family, config: ModelConfig) -> str:
    """Return the prefix that the first names of a family have for a tensor of a layer."""
    return _entry(name, family, config)[0].replace("{model}", family.prefixes[0])


def loaded_path(name: str, family: Family) -> str:
    """Return the path in a model of transformers of a tensor of its files."""
    path = name.removesuffix(".weight")
    for spelled, loaded in family.loaded.items():
        path = f"{path}.".replace(spelled, loaded).removesuffix(".")
    return path


def _entry(name: str, family: Family, config: ModelConfig) -> tuple[str, Entry]:
    """Return the prefix and the entry of the tables for one model tensor."""
    if name.startswith("mtp."):
        return "", _depth_name(name, family, config)
    if not name.startswith("layers."):
        outside = family.outside[name]
        prefix = "{model}" if "{model}" in outside else ""
        return prefix, outside.removeprefix(prefix)
    _, number, inside = name.split(".", 2)
    layer, width = int(number), family.symbols_per_layer
    depth, place = config.depth_of_layer(layer), config.number_in_part(layer)
    prefix, their = family.layer, place // width
    if depth:
        assert family.depths is not None
        prefix, their = family.depths.layer, _depth_layers(config, width)[depth - 1] + their
    symbol = config.layer_types[layer]
    pair = "".join(config.layer_types[layer - min(place, 1) : layer + 1])
    names = {**family.names[symbol], **family.names.get(pair, {})}
    return prefix.replace("{n}", str(their)), names[inside]


def _depth_layers(config: ModelConfig, symbols_per_layer: int) -> range:
    """Return the number of the first Hugging Face layer of each depth, and the end of the last."""
    length = len(config.mtp_layers) // symbols_per_layer
    return range(0, (config.mtp_depths + 1) * length, length)


def _depth_name(name: str, family: Family, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor of a depth that is in none of its layers."""
    assert family.depths is not None
    _, depth, inside = name.split(".", 2)
    layers = _depth_layers(config, family.symbols_per_layer)
    ends = {"{first}": layers[int(depth)], "{last}": layers[int(depth) + 1] - 1}
    their = family.depths.outside[inside]
    for mark, number in ends.items():
        their = their.replace(mark, str(number))
    return their


def _parts(
    name: str,
    shape: Shape,
    entry: Entry,
    config: ModelConfig,
    prefix: str,
    files: Mapping[str, Shape],
) -> tuple[HuggingFaceTensor, ...]:
    """Return the Hugging Face tensors of one model tensor.

    Args:
        entry: entry of the tables of names.
        prefix: prefix of the names in ``entry``.
        files: shape of each Hugging Face tensor by name.
    """
    choices = entry.choices if isinstance(entry, OneOf) else (entry,)
    possible = [_tensors(name, shape, choice, config, prefix) for choice in choices]
    for tensors in possible:
        if all(files.get(part.name) == part.shape for part in tensors):
            return tensors
    # No choice fits. The tensors of the nearest one are then reported as missing or misshapen.
    named = [tensors for tensors in possible if tensors[0].name in files]
    return (named or possible)[0]


def _tensors(
    name: str, shape: Shape, entry: Tensors, config: ModelConfig, prefix: str
) -> tuple[HuggingFaceTensor, ...]:
    names, parts = _names_and_rows(entry, rows_without_padding(name, shape, config), config)
    return tuple(
        HuggingFaceTensor(
            prefix + their, their_shape(name, shape, part.rows, len(names)), part.moves
        )
        for their, part in zip(names, parts, strict=True)
    )


def _names_and_rows(
    entry: Tensors, rows: int, config: ModelConfig
) -> tuple[list[str], tuple[Part, ...]]:
    """Return the Hugging Face names of one model tensor, and the rows of each.

    Args:
        rows: rows of the model tensor, without padding.
    """
    if isinstance(entry, Joined):
        return list(entry.names), entry.rows(config)
    names = [entry] if isinstance(entry, str) else list(entry)
    if any("{e}" in name for name in names):
        experts = range(config.num_experts or 0)
        names = [name.replace("{e}", str(expert)) for expert in experts for name in names]
    return names, interleaved(1, [rows // len(names)] * len(names))


def rows_without_padding(name: str, shape: Shape, config: ModelConfig) -> int:
    """Return the rows of a model tensor; those of a table without the rows that pad it."""
    if name in (TABLE, OUTPUT):
        assert config.vocab_size is not None
        return config.vocab_size
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def their_shape(name: str, shape: Shape, rows: int, count: int) -> Shape:
    """Return the shape of a Hugging Face tensor with ``rows`` rows of a model tensor.

    Args:
        name: name of the model tensor.
        shape: shape of the model tensor.
        count: number of Hugging Face tensors that it consists of.
    """
    if name.endswith("conv1d.weight"):
        return rows, 1, shape[-1]
    if count == 1 and len(shape) > 2:
        return shape
    return (rows, shape[-1]) if len(shape) > 1 else (rows,)
