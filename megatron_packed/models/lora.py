"""Adapters of a model: which matrices have one, and what each rank holds of it.

A weight may hold the rows of several matrices of the Hugging Face model (`layers.lora`). Which rows
they are follows from the family that can hold the model. A model that fits no family has a matrix for
each of q, k and v, for gate and up, and one for every other weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import (
    Shard,
    set_expert_shard,
    set_shard,
    shard_of,
)
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from megatron_packed.layers.lora import Lora, LoraScale
from megatron_packed.layers.moe.layer import GroupedExperts
from megatron_packed.layers.moe.lora import ExpertLora
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.row_maps import Part, gated_qkv, interleaved, qkv
from megatron_packed.models.convert.trained_config import family_for
from megatron_packed.models.convert.weight_rows import parts_of


class Matrix(NamedTuple):
    """Matrix of the Hugging Face model among the rows of a weight."""

    name: str
    """Its name in the family, without ``.weight``, such as ``model.layers.0.self_attn.q_proj``."""
    part: Part
    """Its rows in the weight."""


def matrices_of(
    name: str, shape: tuple[int, ...], config: ModelConfig, family: Family | None
) -> list[Matrix]:
    """Return the matrices whose rows a weight holds.

    For a weight of routed experts these are the matrices of each expert. The families' models hold
    gate and up of an expert as one matrix, also if their files do not.

    Args:
        name: name of the weight, such as ``layers.0.mixer.qkv.weight``.
        shape: shape of the unsplit weight, ``(O, I)`` or ``(E, O, I)``.
        family: family that can hold the model; None if there is none.
    """
    rows = shape[-2]
    if family is not None and len(shape) > 2:
        return [Matrix(name, part) for part in interleaved(1, [rows])]
    if family is not None:
        return [
            Matrix(tensor.name.removesuffix(".weight"), Part(tensor.shape[0], tensor.moves))
            for tensor in parts_of(name, shape, family, config)
        ]
    stem = name.removesuffix(".weight")
    kind = stem.rpartition(".")[2]
    if kind == "qkv":
        parts = (gated_qkv if config.attention_output_gate else qkv)(config)
        return [Matrix(f"{stem}.{which}", part) for which, part in zip("qkv", parts, strict=True)]
    if kind == "fc1" and config.swiglu:
        halves = interleaved(1, [rows // 2] * 2)
        return [
            Matrix(f"{stem}.{which}", part)
            for which, part in zip(("gate", "up"), halves, strict=True)
        ]
    return [Matrix(stem, part) for part in interleaved(1, [rows])]


def family_of(config: ModelConfig) -> Family | None:
    """Return the family that can hold the model; None if there is none."""
    try:
        return family_for(config)[0]
    except CheckpointError:
        return None


def matrix_of_row(matrices: list[Matrix], rows: int, adapted: list[bool]) -> Tensor:
    """Return ``(rows,)`` int64: number of each row's matrix among the adapted ones, else -1."""
    numbers = torch.full((rows, 1), -1)
    number = 0
    for matrix, has_adapter in zip(matrices, adapted, strict=True):
        if has_adapter:
            for move in matrix.part.moves:
                move.ours.view(numbers).fill_(number)
            number += 1
    return numbers.view(-1)


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the projections of the layers that may have an adapter, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not name.endswith(("router", "shared_expert_gate")):
            yield name, module


def whole_shape(weight: nn.Parameter, tp_size: int) -> tuple[int, ...]:
    """Return the shape of a weight before it is split."""
    return tuple(shard_of(weight, tp_size).global_shape(weight.shape))


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, GroupedExperts]]:
    """Yield the names of weights of routed experts that may have adapters, with their modules."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            for weight in ("fc1", "fc2"):
                yield f"{name}.{weight}", module


def add_adapters(model: nn.Module, build: Build) -> None:
    """Add the adapters of ``--lora-target-modules`` to a model, and freeze everything else."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    family = family_of(config)
    assert config.lora_rank is not None
    shared = LoraScale(config.lora_rank, config.lora_scale, config.lora_dropout)
    model.requires_grad_(False)
    for name, linear in adapted_linears(model):
        add_adapter(f"{name}.weight", linear, config, family, shared, build)
    of_weight: dict[int, ExpertLora] = {}  # depths may share a weight, and then its adapters
    for name, experts in adapted_experts(model):
        which = name.rpartition(".")[2]
        weight = getattr(experts, which)
        if id(weight) not in of_weight:
            matrices = matrices_of(name, whole_shape(weight, build.tp.size), config, family)
            adapted = [True] * len(matrices)
            of_weight[id(weight)] = expert_adapters(weight, matrices, adapted, shared, build)
        setattr(experts, f"{which}_lora", of_weight[id(weight)])


def add_adapter(
    name: str,
    linear: Linear,
    config: ModelConfig,
    family: Family | None,
    shared: LoraScale,
    build: Build,
) -> None:
    """Add an adapter to a projection, split over ranks as its weight is."""
    size = build.tp.size
    shard = shard_of(linear.weight, size)
    shape = tuple(shard.global_shape(linear.weight.shape))
    matrices = matrices_of(name, shape, config, family)
    adapted = [True] * len(matrices)
    numbers_O = matrix_of_row(matrices, shape[0], adapted)
    if isinstance(linear, ColumnParallelLinear):
        numbers_O = shard.take(numbers_O)
    lora = Lora(numbers_O, sum(adapted), linear.weight.shape[1], shared, build)
    linear.lora = lora
    if size == 1:
        return
    # A weight that is split has one factor that is split in the same way. The other factor is on all
    # ranks, each of which computes a term of its gradient.
    if isinstance(linear, ColumnParallelLinear):
        set_shard(lora.B, shard)
        build.tp.use_inside(lora.A)
    elif isinstance(linear, RowParallelLinear):
        set_shard(lora.A, shard)
        build.tp.use_inside(lora.B)
    else:
        for factor in (lora.A, lora.B):
            _replicate(factor, size, own_gradients=shard.own_gradients)


def expert_adapters(
    weight: nn.Parameter,
    matrices: list[Matrix],
    adapted: list[bool],
    shared: LoraScale,
    build: Build,
) -> ExpertLora:
    """Return adapters of a weight of experts, one for each expert, split over ranks as the weight is.

    Args:
        weight: ``(E, O, I)``, ``fc1`` or ``fc2`` of `GroupedExperts`.
        matrices: matrices among the rows of each expert.
        adapted: for each matrix, whether it has an adapter.
    """
    shard = shard_of(weight, build.tp.size)
    shape = whole_shape(weight, build.tp.size)
    numbers_EO = matrix_of_row(matrices, shape[1], adapted).expand(shape[:2])
    if shard.dim < 2:
        numbers_EO = shard.take(numbers_EO)
    lora = ExpertLora(numbers_EO[0], sum(adapted), weight.shape, shared, build)
    of_A = of_B = shard
    if shard.first is not None:
        # Ranks that share the matrices of experts also share the factor that is not split. Each of
        # them computes a term of its gradient.
        ranks = (build.ep or ExpertParallel(tp=build.tp)).split.size
        whole = lora.A.shape[1] if shard.dim == 1 else lora.B.shape[1]
        both = Shard.replicated(whole, ranks, own_gradients=True)
        both = replace(both, dim=1, first=shard.first)
        of_A, of_B = (both, shard) if shard.dim == 1 else (shard, both)
    set_expert_shard(lora.A, of_A)
    set_expert_shard(lora.B, of_B)
    return lora


def _replicate(factor: nn.Parameter, size: int, *, own_gradients: bool) -> None:
    set_shard(factor, Shard.replicated(factor.shape[0], size, own_gradients=own_gradients))
