"""Mapping of rows between the project's parameters and the tensors of a Hugging Face model.

A model tensor is a parameter of `HybridModel`; a Hugging Face tensor is one of the original files.
Every tensor is treated as a matrix here: its last dimension is the width W, and all dimensions
before it are rows. Vectors have width 1.

A model tensor consists of ``groups`` equal slices. In each slice, rows of its Hugging Face tensors
follow each other. There is one slice, except for ``qkv``: it has one slice for each key-value head,
with the rows of the query heads, of the key and of the value. The remaining rows of a model tensor
pad the vocabulary; they are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.huggingface_names import Family
from megatron_packed.models.hybrid_model import HybridModel

Shape = tuple[int, ...]


class HuggingFaceTensor(NamedTuple):
    """Tensor of a Hugging Face model."""

    name: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Model tensor and the Hugging Face tensors that it consists of."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[HuggingFaceTensor, ...]
    groups: int = 1

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Build the model tensor from its Hugging Face tensors, converted to its dtype.

        Reads one Hugging Face tensor at a time, so memory holds the model tensor and one other.
        """
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part, place in zip(self.parts, self._places(whole)):
            place.copy_(read(part.name).reshape(place.shape))
        self._matrix(whole)[self._rows :].zero_()
        return whole

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the contiguous Hugging Face tensors of ``whole`` by name; inverts `join`."""
        places = zip(self.parts, self._places(whole))
        return {part.name: place.reshape(part.shape).contiguous() for part, place in places}

    @property
    def _rows(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts) // self._width

    @property
    def _width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    def _matrix(self, whole: Tensor) -> Tensor:
        return whole.view(-1, self._width)

    def _places(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return views ``(groups, rows / groups, W)`` of ``whole``, one for each part."""
        rows = [math.prod(part.shape) // self._width // self.groups for part in self.parts]
        return (
            self._matrix(whole)[: self._rows].view(self.groups, -1, self._width).split(rows, dim=1)
        )


def weights_of(family: Family, config: ModelConfig, dtype: torch.dtype) -> dict[str, Weight]:
    """Return every model tensor by name, in the order of the model; allocates no tensor memory.

    Args:
        config: the model; its ``vocab_size`` must be set.
        dtype: dtype of the model; parameters that training keeps in float32 are float32 anyway.
    """
    assert config.vocab_size is not None
    model = HybridModel(
        config, vocab_size=config.vocab_size, max_positions=2, device="meta", dtype=dtype
    )
    return {
        name: _weight(name, tensor, family, config) for name, tensor in model.state_dict().items()
    }


def _weight(name: str, tensor: Tensor, family: Family, config: ModelConfig) -> Weight:
    names = _their_names(name, family, config)
    shapes, groups = _their_shapes(name, tuple(tensor.shape), len(names), config)
    parts = tuple(HuggingFaceTensor(*part) for part in zip(names, shapes))
    return Weight(
        name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=parts, groups=groups
    )


def _their_names(name: str, family: Family, config: ModelConfig) -> list[str]:
    if not name.startswith("layers."):
        return [family.outside[name]]
    _, number, inside = name.split(".", 2)
    found = family.names[config.layer_types[int(number)]][inside]
    names = [found] if isinstance(found, str) else list(found)
    if any("{e}" in name for name in names):
        names = [
            name.format(e=expert) for expert in range(config.num_experts or 0) for name in names
        ]
    prefix = family.layer.format(n=int(number) // family.symbols_per_layer)
    return [prefix + name for name in names]


def _their_shapes(
    name: str, shape: Shape, count: int, config: ModelConfig
) -> tuple[list[Shape], int]:
    """Return the shapes of the Hugging Face tensors of one model tensor, and its number of slices.

    Args:
        name: name of the model tensor.
        shape: shape of the model tensor.
        count: number of Hugging Face tensors that it consists of.
    """
    kind = ".".join(name.split(".")[-2:])
    if kind in ("embedding.weight", "output.weight"):
        assert config.vocab_size is not None
        return [(config.vocab_size, shape[1])], 1
    if kind == "conv1d.weight":
        return [(shape[0], 1, shape[1])], 1
    if kind == "qkv.weight":
        heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
        return [(number * config.head_dim, shape[1]) for number in heads], config.num_query_groups
    if len(shape) == 1:
        return [shape], 1
    return [(math.prod(shape[:-1]) // count, shape[-1])] * count, 1


def their_shapes(weights: Mapping[str, Weight]) -> dict[str, Shape]:
    """Return the shape of every Hugging Face tensor by name."""
    return {part.name: part.shape for weight in weights.values() for part in weight.parts}
