"""Matrices of a model that may have adapters, with their names in models of transformers.

A file names matrices as transformers does in memory. These names differ from those of the weights'
files where transformers spells them otherwise or holds all experts in one parameter.

Letters: E experts, O output width, I input width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.moe.layer import GroupedExperts
from megatron_packed.models.convert.families.family import MTP, Family
from megatron_packed.models.convert.model_weights import model_on_meta, weights_of
from megatron_packed.models.convert.row_maps import Part, interleaved
from megatron_packed.models.convert.weight_rows import Shape, loaded_path, parts_of, prefix_of
from megatron_packed.models.lora import adapted_linears, family_of, matrices_of, matrix_of_row


class Matrix(NamedTuple):
    """Matrix of transformers' model, or a parameter with one matrix for each expert."""

    path: str
    """Path of the module, or of the parameter of experts."""
    part: Part
    """Its rows in the weight, or in the weight of one expert."""

    def rows(self) -> Tensor:
        """Return the number of each row's row in the weight, ``(rows,)`` int64."""
        ends = [move.ours.begin + move.ours.rows for move in self.part.moves]
        steps = [(move.ours.groups - 1) * move.ours.stride for move in self.part.moves]
        ours = torch.arange(max(map(sum, zip(ends, steps, strict=True)))).view(-1, 1)
        theirs = ours.new_empty(self.part.rows, 1)
        for move in self.part.moves:
            move.theirs.view(theirs).copy_(move.ours.view(ours))
        return theirs.view(-1)


class AdaptableWeight(NamedTuple):
    """Weight that may have adapters: ``(O, I)``, or ``(E, O, I)`` for routed experts."""

    name: str
    shape: Shape
    matrices: tuple[Matrix, ...]

    @property
    def stacked(self) -> bool:
        """True for the weights of routed experts."""
        return len(self.shape) > 2

    def factor(self, which: str) -> str:
        """Return the name of the parameter ``A`` or ``B`` of its adapter."""
        return f"{self.name.removesuffix('.weight')}{'_' if self.stacked else '.'}lora.{which}"


def adaptable_weights(config: ModelConfig, family: Family) -> list[AdaptableWeight]:
    """Return the weights of the layers that may have adapters; allocates no tensor memory.

    Weights of multi-token prediction are left out, since transformers has no modules for them.
    """
    weights = []
    model = model_on_meta(replace(config, lora_rank=None), torch.float32)
    linears = dict(adapted_linears(model))
    for name, module in model.named_modules():
        if name in linears:
            shape = tuple(linears[name].weight.shape)
            parts = parts_of(f"{name}.weight", shape, family, config)
            matrices = tuple(
                Matrix(loaded_path(part.name, family), Part(part.shape[0], part.moves))
                for part in parts
            )
            if not matrices[0].path.startswith(MTP):
                weights.append(AdaptableWeight(f"{name}.weight", shape, matrices))
        elif isinstance(module, GroupedExperts):
            weights += _experts(name, module, config, family)
    return weights


def _experts(
    name: str, module: GroupedExperts, config: ModelConfig, family: Family
) -> Iterable[AdaptableWeight]:
    for which, parameter in (("fc1", module.fc1), ("fc2", module.fc2)):
        weight, shape = f"{name}.{which}", tuple(parameter.shape)
        prefix = prefix_of(weight, family, config)
        if not prefix.startswith(MTP):
            path = loaded_path(f"{prefix}{family.stacked[f'mixer.experts.{which}']}", family)
            yield AdaptableWeight(weight, shape, (Matrix(path, *interleaved(1, [shape[1]])),))


def trained_rows(weight: AdaptableWeight, config: ModelConfig) -> Tensor:
    """Return ``(O,)`` int64: number of the adapter that a training gives each row; -1 for none."""
    matrices = matrices_of(weight.name, weight.shape, config, family_of(config))
    return matrix_of_row(matrices, weight.shape[-2], [True] * len(matrices))


def module_paths(config: ModelConfig, family: Family) -> set[str]:
    """Return the paths of all modules with a weight, of a model of transformers."""
    plain = replace(config, lora_rank=None)
    names = [
        part.name
        for weight in weights_of(family, plain, torch.float32).values()
        for part in weight.parts
        if weight.name.endswith(".weight")
    ]
    return {loaded_path(name, family) for name in names if not name.startswith(MTP)}


def shortened(paths: Collection[str], others: Iterable[str], components: int = 1) -> list[str]:
    """Return the last components of paths, or complete paths if ``others`` end in the same way."""
    ends = {".".join(path.split(".")[-components:]) for path in paths}
    if any(".".join(other.split(".")[-components:]) in ends for other in others):
        return sorted(paths)
    return sorted(ends)
