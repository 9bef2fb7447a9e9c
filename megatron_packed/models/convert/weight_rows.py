"""Which rows of which of their tensors a tensor of ours consists of.

A tensor is a matrix here: its last dimension is the width W, all before it are rows (vectors have
width 1). Ours is theirs one below the other, in each of ``groups`` equal slices: one slice, but for
``qkv``, where for each key-value head its query heads, its key and its value follow each other.
Rows beyond theirs pad the vocabulary; they are zeros.
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
    """A tensor of theirs."""

    name: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor of ours and the tensors of theirs that it consists of."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[HuggingFaceTensor, ...]
    groups: int = 1

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Ours, from theirs one after another: memory for ours and one of theirs. Converts to our
        dtype.
        """
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part, place in zip(self.parts, self._places(whole)):
            place.copy_(read(part.name).reshape(place.shape))
        self._matrix(whole)[self._rows :].zero_()
        return whole

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """Theirs by name, contiguous, in our dtype; the opposite of `join`."""
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
        """Views of ours, ``(groups, rows / groups, W)``, one for each of theirs."""
        rows = [math.prod(part.shape) // self._width // self.groups for part in self.parts]
        return (
            self._matrix(whole)[: self._rows].view(self.groups, -1, self._width).split(rows, dim=1)
        )


def weights_of(family: Family, config: ModelConfig, dtype: torch.dtype) -> dict[str, Weight]:
    """Every tensor of ours by name, in the model's order; no memory is taken.

    Args:
        config: with a ``vocab_size``.
        dtype: of the model; what training keeps in float32 is float32 anyway.
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
    """Shapes of ``count`` tensors that ours of this shape consists of, and in how many slices they
    lie.
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
    """Every tensor of theirs and its shape."""
    return {part.name: part.shape for weight in weights.values() for part in weight.parts}
