"""Adapters of the model in the form of PEFT's adapter_model.safetensors, and back, in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.models.convert.adapters.factors import (
    Factors,
    join_factors,
    split_factors,
)
from megatron_packed.models.convert.adapters.matrices import AdaptableWeight
from megatron_packed.models.convert.adapters.peft_config import PeftConfig
from megatron_packed.models.convert.adapters.peft_names import (
    A_WEIGHT,
    B_WEIGHT,
    flat,
    stems,
    unflat,
)
from megatron_packed.models.convert.weight_rows import Shape

Rows = Mapping[str, Tensor]
"""Number of the adapter of each row, by the name of the weight; see `trained_rows`."""


def to_peft(
    adapters: Mapping[str, Tensor], weights: Sequence[AdaptableWeight], rows: Rows
) -> dict[str, Tensor]:
    """Return the tensors of adapter_model.safetensors by name.

    Args:
        adapters: tensors of adapters by their names in the model.
        weights: the weights of the model that may have adapters.
    """
    return peft_tensors(weights, factors_of(adapters, weights, rows))


def factors_of(
    adapters: Mapping[str, Tensor], weights: Sequence[AdaptableWeight], rows: Rows
) -> dict[str, Factors]:
    """Return the factors of each adapter by the path of its matrix; arguments are those of `to_peft`."""
    split: dict[str, Factors] = {}
    for weight in weights:
        if weight.name in rows:
            stacked = Factors(*(adapters[weight.factor(which)] for which in "AB"))
            split |= split_factors(weight, stacked, rows[weight.name])
    return split


def from_peft(
    tensors: Mapping[str, Tensor],
    config: PeftConfig,
    weights: Sequence[AdaptableWeight],
    rows: Rows,
) -> dict[str, Tensor]:
    """Return the tensors of adapters by their names in the model; inverts `to_peft`.

    Raises:
        CheckpointError: see `recognised`, or matrices with one adapter in the model have several.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stem_of = recognised(shapes, config, weights).stems
    adapters: dict[str, Tensor] = {}
    for weight in weights:
        split = {
            matrix.path: _factors(tensors, matrix.path, stem_of[matrix.path], weight, config)
            for matrix in weight.matrices
            if matrix.path in stem_of
        }
        if split:
            joined = join_factors(weight, split, rows[weight.name])
            adapters |= {weight.factor(which): getattr(joined, which) for which in "AB"}
    return adapters


def peft_tensors(
    weights: Sequence[AdaptableWeight], split: Mapping[str, Factors]
) -> dict[str, Tensor]:
    """Return the tensors of adapter_model.safetensors by name.

    Args:
        weights: the weights of the model that may have adapters.
        split: factors by the path of their matrix.
    """
    names = stems(*_paths(weights, split))
    stacked = {weight.matrices[0].path for weight in weights if weight.stacked}
    tensors = {}
    for path, stem in names.items():
        factors = flat(split[path]) if path in stacked else split[path]
        tensors[stem + A_WEIGHT] = factors.A.contiguous()
        tensors[stem + B_WEIGHT] = factors.B.contiguous()
    return tensors


def _paths(
    weights: Iterable[AdaptableWeight], adapted: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the paths of modules and of parameters with adapters, in the order of the model."""
    modules: list[str] = []
    parameters: list[str] = []
    for weight in weights:
        for matrix in weight.matrices:
            if matrix.path in adapted:
                (parameters if weight.stacked else modules).append(matrix.path)
    return modules, parameters


class PeftShapes(NamedTuple):
    """Tensors of a file that belong to adapters, and those of whole modules."""

    stems: Mapping[str, str]
    """Name before ``.lora_A.weight`` by the path of each matrix with an adapter."""
    whole: tuple[str, ...]
    """Names of the other tensors."""


def recognised(
    shapes: Mapping[str, Shape], config: PeftConfig, weights: Sequence[AdaptableWeight]
) -> PeftShapes:
    """Find the matrix of each tensor of adapter_model.safetensors.

    Args:
        shapes: shape of each tensor by name.
        weights: the weights of the model that may have adapters.
    Raises:
        CheckpointError: a tensor belongs to no matrix or has another shape, a factor is missing, or
            ranks differ.
    """
    known = {matrix.path: weight for weight in weights for matrix in weight.matrices}
    parameters = [p for p, weight in known.items() if weight.stacked and config.targets(p)]
    modules = [path for path, weight in known.items() if not weight.stacked]
    names = {stem: path for path, stem in stems(modules, parameters).items()}
    found, whole, problems = {}, [], []
    for name in shapes:
        stem = name.removesuffix(A_WEIGHT).removesuffix(B_WEIGHT)
        if stem == name:
            whole.append(name)
        elif stem in names:
            found[names[stem]] = stem
        else:
            problems.append(_unknown(name, names))
    ordered = {path: found[path] for path in known if path in found}
    for path, stem in ordered.items():
        problems += _shape_problems(stem, path, known[path], shapes, config)
    if problems:
        raise CheckpointError("; ".join(problems[:20]), cure="take an adapter of this base")
    return PeftShapes(ordered, tuple(whole))


def _unknown(name: str, names: Collection[str]) -> str:
    stem, end = name.rsplit(".lora_", 1)
    near = [f"{other}.lora_{end}" for other in nearest(stem, names, 1)]
    return f"{name} belongs to no matrix of the base ({did_you_mean(near, 'none is near')})"


def _shape_problems(
    stem: str,
    path: str,
    weight: AdaptableWeight,
    shapes: Mapping[str, Shape],
    config: PeftConfig,
) -> list[str]:
    rank, experts = config.rank(path), weight.shape[0] if weight.stacked else 1
    (rows,) = (matrix.part.rows for matrix in weight.matrices if matrix.path == path)
    expected = {
        stem + A_WEIGHT: (experts * rank, weight.shape[-1]),
        stem + B_WEIGHT: (rows, rank * experts),
    }
    problems = []
    if rank != config.r:
        problems.append(f"{path} has rank {rank} and others have {config.r}, but one is supported")
    for name, shape in expected.items():
        if name not in shapes:
            problems.append(f"{name} is missing")
        elif tuple(shapes[name]) != shape:
            problems.append(
                f"{name} is {list(shapes[name])}, but rank {rank} and the base need {list(shape)}"
            )
    return problems


def _factors(
    tensors: Mapping[str, Tensor], path: str, stem: str, weight: AdaptableWeight, config: PeftConfig
) -> Factors:
    """Return the factors of one matrix; a scale of its own is multiplied into B."""
    factors = Factors(tensors[stem + A_WEIGHT], tensors[stem + B_WEIGHT])
    alpha = config.alpha(path)
    if alpha != config.lora_alpha:
        factors = Factors(factors.A, factors.B * (alpha / config.lora_alpha))
    return unflat(factors, weight.shape[0]) if weight.stacked else factors
