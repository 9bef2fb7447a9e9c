"""Tensors of a model without memory, and the Hugging Face tensors that each of them consists of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.weight_rows import Shape, Weight, parts_of
from megatron_packed.models.hybrid_model import HybridModel


def model_on_meta(config: ModelConfig, dtype: torch.dtype) -> HybridModel:
    """Return the model without memory for its tensors.

    Args:
        config: the model; its ``vocab_size`` must be set.
        dtype: dtype of the model; parameters that training keeps in float32 are float32 anyway.
    """
    assert config.vocab_size is not None
    return HybridModel(
        config, vocab_size=config.vocab_size, max_positions=2, device="meta", dtype=dtype
    )


def stored_tensors(model: HybridModel) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of ``model`` by name.

    A tensor that depths of multi-token prediction share has the name of the first depth.
    """
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def weights_of(
    family: Family, config: ModelConfig, dtype: torch.dtype, files: Mapping[str, Shape] = {}
) -> dict[str, Weight]:
    """Return every model tensor by name, in the order of the model; allocates no tensor memory.

    Args:
        config, dtype: see `model_on_meta`.
        files: shape of each Hugging Face tensor by name. It decides between the names that a family
            has for one parameter; without files the family's first names are used.
    """
    weights = {}
    for name, tensor in stored_tensors(model_on_meta(config, dtype)).items():
        parts = parts_of(name, tuple(tensor.shape), family, config, files)
        weights[name] = Weight(
            name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=parts
        )
    return weights
