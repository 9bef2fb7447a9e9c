"""Adapters of a model: which matrices have one, and what each rank holds of it.

A weight may hold the rows of several matrices of the Hugging Face model (`layers.lora`). The family
that can hold the model decides which rows they are. A model that fits no family has a matrix for
each of q, k and v, for gate and up, and one for every other weight.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem
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
from megatron_packed.models.convert.families.qwen_hybrid import (
    JOINED_PROJECTIONS,
    QWEN3_5_MOE_TEXT,
    QWEN3_NEXT,
)
from megatron_packed.models.convert.row_maps import Part, gated_qkv, interleaved, qkv
from megatron_packed.models.convert.trained_config import family_for
from megatron_packed.models.convert.weight_rows import layer_prefix, loaded_path, parts_of
from megatron_packed.models.lora_targets import (
    TABLES,
    Weights,
    adapted_matrices,
    names_of,
    projection_of,
    whole_parameters,
)

Made = TypeVar("Made", Lora, ExpertLora)


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
        # Only tables have the rows of the vocabulary; a gate has one row, which is no vocabulary.
        if not config.vocab_size:
            config = _with_vocabulary(config, max(shape[0], 2))
        return [
            Matrix(tensor.name.removesuffix(".weight"), Part(tensor.shape[0], tensor.moves))
            for tensor in parts_of(name, shape, family, config)
        ]
    stem = name.removesuffix(".weight")
    record = projection_of(stem, config)
    names = record.matrices if record is not None else ()
    parts: tuple[Part, ...] = interleaved(1, [rows])
    if stem.endswith(".qkv"):
        parts = (gated_qkv if config.attention_output_gate else qkv)(config)
    elif stem.endswith(".fc1") and config.swiglu:
        parts = interleaved(1, [rows // 2] * 2)
    place, _, last = stem.rpartition(".")
    names = names[-len(parts) :] or (TABLES.get(stem, last),)
    return [
        Matrix(f"{place}.{which}".removeprefix("."), part)
        for which, part in zip(names, parts, strict=True)
    ]


@lru_cache(maxsize=64)  # a new configuration is checked, which takes 2 ms for each weight
def _with_vocabulary(config: ModelConfig, size: int) -> ModelConfig:
    return replace(config, vocab_size=size)


def family_of(config: ModelConfig) -> Family | None:
    """Return the family that can hold the model; None if there is none.

    If two families can hold it, and ``--lora-target-modules`` names a matrix of the one with joined
    matrices, this one is returned. Otherwise it is the one whose files have more matrices: their
    adapters can be written for joined matrices, too, with the sum of their ranks.
    """
    try:
        family = family_for(config)[0]
        names_joined = any(
            part in word for part in JOINED_PROJECTIONS for word in config.lora_target_modules
        )
        if family is QWEN3_NEXT and not names_joined:
            with contextlib.suppress(CheckpointError):
                return family_for(config, QWEN3_5_MOE_TEXT.model_type)[0]
        return family
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
    """Add the adapters of ``--lora-target-modules`` to a model, and freeze everything else.

    Weights of ``--lora-modules-to-save`` are not frozen. Depths of multi-token prediction that share
    a weight share its adapter.

    Raises:
        ConfigError: a word or a pattern names nothing, or a weight has an adapter and is saved.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    assert config.lora_rank is not None
    shared = LoraScale(config.lora_rank, config.lora_scale, config.lora_dropout)
    weights: dict[str, nn.Parameter] = dict(model.named_parameters())
    matrices, chosen = chosen_matrices(config, model, weights, build.tp.size)
    train_whole(config, weights, {name for name in chosen if any(chosen[name])})
    # Depths may share a weight, and then its adapter.
    adapters: dict[int, nn.Module] = {}

    def adapter(name: str, weight: nn.Parameter, make: Callable[..., Made]) -> Made | None:
        if id(weight) not in adapters and any(chosen.get(name, ())):
            adapters[id(weight)] = make(matrices[name], chosen[name], shared, build)
        return cast("Made | None", adapters.get(id(weight)))

    for name, linear in adapted_linears(model):
        linear.lora = adapter(f"{name}.weight", linear.weight, partial(linear_adapter, linear))
    for name, experts in adapted_experts(model):
        which = name.rpartition(".")[2]
        weight = getattr(experts, which)
        setattr(experts, f"{which}_lora", adapter(name, weight, partial(expert_adapters, weight)))


def chosen_matrices(
    config: ModelConfig, model: nn.Module, weights: Mapping[str, nn.Parameter], size: int
) -> tuple[dict[str, list[Matrix]], dict[str, list[bool]]]:
    """Return the matrices of each weight that may have adapters, and which of them have one."""
    family = family_of(config)
    adaptable = {f"{name}.weight" for name, _ in adapted_linears(model)}
    adaptable |= {name for name, _ in adapted_experts(model)}
    matrices: dict[str, list[Matrix]] = {}
    named: Weights = {}
    others: Weights = {}
    for name, weight in weights.items():
        if weight.dim() > 1:
            shape = whole_shape(weight, size)
            matrices[name] = matrices_of(name, shape, config, family)
            theirs: list[tuple[str, ...]] = [(matrix.name,) for matrix in matrices[name]]
            if family is not None:
                theirs = [(own, loaded_path(own, family)) for (own,) in theirs]
                if weight.dim() > 2:
                    theirs = [expert_names(name, shape, config, family)]
            names = names_of(name.removesuffix(".weight"), theirs, config)
            (named if name in adaptable else others)[name] = names
    return matrices, adapted_matrices(config, named, others)


def expert_names(
    name: str, shape: tuple[int, ...], config: ModelConfig, family: Family
) -> tuple[str, ...]:
    """Return the Hugging Face names of a weight of routed experts, in files and in models.

    Names in files are without numbers of experts.

    Example:
        ``("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.gate_up_proj")``.
    """
    tensors = (part.name.removesuffix(".weight") for part in parts_of(name, shape, family, config))
    names = dict.fromkeys(re.sub(r"(\.experts)\.\d+\.", r"\1.", each) for each in tensors)
    inside = name.split(".", 2)[2]
    if inside in family.stacked:
        names[f"{layer_prefix(name, family, config)}{family.stacked[inside]}"] = None
    return tuple(names)


def train_whole(
    config: ModelConfig, parameters: Mapping[str, nn.Parameter], adapted: set[str]
) -> None:
    """Freeze all parameters but those of ``--lora-modules-to-save``.

    Args:
        parameters: the parameters of the model by name, without adapters.
        adapted: names of the weights that get adapters.
    """
    whole = whole_parameters(parameters, config.lora_modules_to_save)
    if both := sorted(whole & adapted):
        rule = f"trains {both[0]} whole, which also has an adapter"
        cure = f"leave it out of {flags.LORA_TARGET_MODULES} or of this option"
        saved = " ".join(config.lora_modules_to_save)
        raise ConfigError([Problem(flags.LORA_MODULES_TO_SAVE, saved, rule, cure)])
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in whole)


def linear_adapter(
    linear: Linear, matrices: list[Matrix], adapted: list[bool], shared: LoraScale, build: Build
) -> Lora:
    """Return the adapter of a projection, split over ranks as its weight is.

    Args:
        matrices: matrices among the rows of the weight.
        adapted: for each matrix, whether it has an adapter.
    """
    size = build.tp.size
    shard = shard_of(linear.weight, size)
    numbers_O = matrix_of_row(matrices, whole_shape(linear.weight, size)[0], adapted)
    if isinstance(linear, ColumnParallelLinear):
        numbers_O = shard.take(numbers_O)
    lora = Lora(numbers_O, sum(adapted), linear.weight.shape[1], shared, build)
    if size == 1:
        return lora
    draws_own_numbers = build.tp.sequence_parallel
    if draws_own_numbers and linear.has_whole_input:
        lora.mask_group = build.tp.group
    # A weight that is split has one factor that is split in the same way. The other factor is on all
    # ranks, each of which computes a term of its gradient.
    if isinstance(linear, ColumnParallelLinear):
        set_shard(lora.B, shard)
        build.tp.use_inside(lora.A)
    elif isinstance(linear, RowParallelLinear):
        lora.columns = None if draws_own_numbers else shard
        set_shard(lora.A, shard)
        build.tp.use_inside(lora.B)
    else:
        for factor in (lora.A, lora.B):
            _replicate(factor, size, own_gradients=shard.own_gradients)
    return lora


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
