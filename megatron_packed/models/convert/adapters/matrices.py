"""Matrices of a model that may have adapters, with their names in models of transformers.

A file names matrices as transformers does in memory. These names differ from those of the weights'
files where transformers spells them otherwise or holds all experts in one parameter.

Letters: E experts, O output width, I input width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.lora import ALL_LINEAR
from megatron_packed.layers.moe.layer import GroupedExperts
from megatron_packed.models.convert.families.family import MTP, Family
from megatron_packed.models.convert.families.qwen_hybrid import JOINED_PROJECTIONS
from megatron_packed.models.convert.model_weights import model_on_meta, weights_of
from megatron_packed.models.convert.row_maps import Part, interleaved
from megatron_packed.models.convert.weight_rows import Shape, layer_prefix, loaded_path, parts_of
from megatron_packed.models.lora import adapted_linears, chosen_matrices, matrix_of_row


class PeftMatrix(NamedTuple):
    """PeftMatrix of transformers' model, or a parameter with one matrix for each expert."""

    path: str
    """Path of the module, or of the parameter of experts."""
    part: Part
    """Its rows in the weight, or in the weight of one expert."""
    file: str = ""
    """Its name in the weights' files, without ``.weight``."""

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
    matrices: tuple[PeftMatrix, ...]

    @property
    def stacked(self) -> bool:
        """True for the weights of routed experts."""
        return len(self.shape) > 2

    def factor(self, which: str) -> str:
        """Return the name of the parameter ``A`` or ``B`` of its adapter."""
        return factor_name(self.name, which)


def factor_name(weight: str, which: str) -> str:
    """Return the name of the parameter ``A`` or ``B`` of the adapter of a weight."""
    if weight.endswith(".weight"):
        return f"{weight.removesuffix('.weight')}.lora.{which}"
    return f"{weight}_lora.{which}"


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
                PeftMatrix(
                    loaded_path(part.name, family),
                    Part(part.shape[0], part.moves),
                    part.name.removesuffix(".weight"),
                )
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
        prefix = layer_prefix(weight, family, config)
        if not prefix.startswith(MTP):
            file = f"{prefix}{family.stacked[f'mixer.experts.{which}']}"
            (part,) = interleaved(1, [shape[1]])
            matrix = PeftMatrix(loaded_path(file, family), part, file)
            yield AdaptableWeight(weight, shape, (matrix,))


def trained_rows(config: ModelConfig) -> dict[str, Tensor]:
    """Return the number of the adapter of each row, by the name of the weight.

    Weights without adapters are left out. Each value is ``(O,)`` int64, with -1 for rows without an
    adapter.

    Raises:
        ConfigError: a word of ``--lora-target-modules`` names nothing.
    """
    model = model_on_meta(replace(config, lora_rank=None), torch.float32)
    weights = dict(model.named_parameters())
    matrices, chosen = chosen_matrices(config, model, weights, 1)
    return {
        name: matrix_of_row(matrices[name], weights[name].shape[-2], adapted)
        for name, adapted in chosen.items()
        if any(adapted)
    }


def target_words(
    config: ModelConfig, weights: Sequence[AdaptableWeight], paths: Collection[str]
) -> tuple[str, ...]:
    """Return the words of ``--lora-target-modules`` that name exactly the matrices with ``paths``.

    Raises:
        CheckpointError: a training has one adapter for two matrices, of which one has none.
    """
    model = model_on_meta(replace(config, lora_rank=None), torch.float32)
    parameters = dict(model.named_parameters())
    last_names = {
        matrix.path.rpartition(".")[2] for weight in weights for matrix in weight.matrices
    }
    # Names of joined matrices choose the family that has them; see `models.lora.family_of`.
    joined = tuple(name for name in JOINED_PROJECTIONS if name in last_names)
    named = replace(config, lora_rank=1, lora_target_modules=(ALL_LINEAR, *joined))
    matrices, _ = chosen_matrices(named, model, parameters, 1)
    wanted: dict[str, Tensor] = {}
    names = []
    for weight in weights:
        has = torch.zeros(weight.shape[-2], dtype=torch.bool)
        for matrix in weight.matrices:
            has[matrix.rows()] = matrix.path in paths
        adapted = []
        for trained in matrices[weight.name]:
            part = has[PeftMatrix(trained.name, trained.part).rows()]
            if part.any() and not part.all():
                others = ", ".join(matrix.path for matrix in weight.matrices)
                raise CheckpointError(f"{others}: a training has one adapter for several of these")
            adapted.append(bool(part.all()))
            if adapted[-1]:
                names.append(trained.name)
        if any(adapted):
            wanted[weight.name] = matrix_of_row(matrices[weight.name], len(has), adapted)
    short = sorted({name.rpartition(".")[2] for name in names})
    for words in ((ALL_LINEAR,), (ALL_LINEAR, *joined), tuple(short), tuple(names)):
        with contextlib.suppress(ConfigError):  # a short name may name nothing
            rows = trained_rows(replace(config, lora_rank=1, lora_target_modules=words))
            if rows.keys() == wanted.keys() and all(
                torch.equal(rows[name], wanted[name]) for name in rows
            ):
                return words
    raise AssertionError(f"no words name the matrices {names}")


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
