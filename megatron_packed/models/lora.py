"""Adapters of a model: which matrices have one, and what each rank holds of it.

A weight may hold the rows of several matrices of the Hugging Face model (`layers.lora`). The family
that can hold the model decides which rows they are. A model that fits no family has a matrix for
each of q, k and v, for gate and up, and one for every other weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import Shard, set_shard, shard_of
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from megatron_packed.layers.lora import Lora, LoraScale
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.row_maps import Part, gated_qkv, interleaved, qkv
from megatron_packed.models.convert.trained_config import family_for
from megatron_packed.models.convert.weight_rows import parts_of
from megatron_packed.models.lora_targets import (
    adapted_matrices,
    names_of,
    projection_of,
    whole_parameters,
)


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

    Args:
        name: name of the weight, such as ``layers.0.mixer.qkv.weight``.
        shape: shape of the unsplit weight.
        family: family that can hold the model; None if there is none.
    """
    if family is not None:
        config = replace(config, vocab_size=config.vocab_size or shape[0])
        return [
            Matrix(tensor.name.removesuffix(".weight"), Part(tensor.shape[0], tensor.moves))
            for tensor in parts_of(name, shape, family, config)
        ]
    stem = name.removesuffix(".weight")
    record = projection_of(stem, config)
    names = record.matrices if record is not None else ()
    rows: tuple[Part, ...] = interleaved(1, [shape[0]])
    if stem.endswith(".qkv"):
        rows = (gated_qkv if config.attention_output_gate else qkv)(config)
    elif stem.endswith(".fc1") and config.swiglu:
        rows = interleaved(1, [shape[0] // 2] * 2)
    names = names[-len(rows) :] or (stem.rpartition(".")[2],)
    place = stem.rpartition(".")[0]
    return [Matrix(f"{place}.{which}", part) for which, part in zip(names, rows, strict=True)]


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
    parameters = dict(model.named_parameters())
    linears = {
        name: linear for name, linear in adapted_linears(model) if f"{name}.weight" in parameters
    }
    matrices, chosen = _chosen_matrices(config, parameters, list(linears), build.tp.size)
    train_whole(config, parameters, {f"{name}.weight" for name in chosen if any(chosen[name])})
    adapters: dict[int, Lora] = {}
    for name, linear in linears.items():
        if any(chosen[name]):
            add_adapter(linear, matrices[name], chosen[name], shared, build)
            adapters[id(linear.weight)] = cast(Lora, linear.lora)
    for _, linear in adapted_linears(model):
        linear.lora = adapters.get(id(linear.weight))


def _chosen_matrices(
    config: ModelConfig, parameters: Mapping[str, nn.Parameter], projections: list[str], size: int
) -> tuple[dict[str, list[Matrix]], dict[str, list[bool]]]:
    """Return the matrices of each projection, and which of them have an adapter."""
    family = family_of(config)
    matrices: dict[str, list[Matrix]] = {}
    others: dict[str, list[Matrix]] = {}
    for name, parameter in parameters.items():
        stem = name.removesuffix(".weight")
        if parameter.dim() > 1:
            held = matrices_of(name, whole_shape(parameter, size), config, family)
            (matrices if stem in projections else others)[stem] = held
    names = [
        {stem: names_of(stem, [each.name for each in held], config) for stem, held in group.items()}
        for group in (matrices, others)
    ]
    return matrices, adapted_matrices(config, *names)


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


def add_adapter(
    linear: Linear, matrices: list[Matrix], adapted: list[bool], shared: LoraScale, build: Build
) -> None:
    """Add an adapter to a projection, split over ranks as its weight is.

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


def _replicate(factor: nn.Parameter, size: int, *, own_gradients: bool) -> None:
    set_shard(factor, Shard.replicated(factor.shape[0], size, own_gradients=own_gradients))
