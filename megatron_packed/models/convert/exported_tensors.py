"""Tensors of an exported model, made one at a time from the tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_packed.models.convert.huggingface_files import ModelFiles
from megatron_packed.models.convert.import_huggingface import OnProgress
from megatron_packed.models.convert.stored_weights import WeightSource
from megatron_packed.models.convert.weight_rows import Shape, Weight


@dataclass
class ExportedTensors:
    """Source of the Hugging Face tensors of a checkpoint.

    One model tensor contains several Hugging Face tensors. The model tensor that was read last
    stays in memory until a Hugging Face tensor of another one is requested.
    """

    source: WeightSource
    weights: Mapping[str, Weight]
    on_progress: OnProgress
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of Hugging Face tensors that differ from those of the checkpoint."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face tensors that are written a second time, and the name of the copy."""
    zeros: Collection[str] = ()
    """Model tensors that the checkpoint lacks, and whose values are zeros."""
    original: ModelFiles | None = None
    """Files of the original, whose tensors outside the text model are copied."""

    def __post_init__(self) -> None:
        self.aside = self.original.aside if self.original else {}
        self.owner = {
            part.name: weight for weight in self.weights.values() for part in weight.parts
        }
        self.rounded: list[str] = []
        self.total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.listed())
        self.copied_from = {copy: name for name, copy in self.copies.items()}
        self.done = 0
        self.current = ""
        self.parts: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        if self.original is not None and name in self.aside:
            return self._count(self.original.read(name))
        name = self.copied_from.get(name, name)
        weight = self.owner[name]
        if self.current != weight.name:
            self.parts.clear()  # frees the previous tensor before another is read
            parameter = self._read(weight)
            self.current = weight.name
            self.parts = weight.split(parameter)
        stored = self.parts[name]
        converted = stored.to(self.dtypes.get(name, stored.dtype))
        if converted.dtype != stored.dtype and not torch.equal(converted.to(stored.dtype), stored):
            self.rounded.append(name)
        return self._count(converted)

    def _count(self, tensor: Tensor) -> Tensor:
        self.done += tensor.nbytes
        self.on_progress(self.done, self.total)
        return tensor

    def _read(self, weight: Weight) -> Tensor:
        if weight.name in self.zeros:
            return torch.zeros(weight.shape, dtype=weight.dtype)
        return self.source.read(f"model/{weight.name}")

    def listed(self) -> list[tuple[str, torch.dtype, Shape]]:
        """Return name, dtype and shape of each Hugging Face tensor, in the order of the files."""
        listed = [
            (name, self.dtypes.get(part.name, weight.dtype), part.shape)
            for weight in self.weights.values()
            for part in weight.parts
            for name in (part.name, self.copies.get(part.name))
            if name is not None
        ]
        aside = [(name, place.entry.dtype, place.entry.shape) for name, place in self.aside.items()]
        return listed + aside
