"""Names and forms of adapters in vLLM, which maps them as it maps those of the weights' files.

Sources: the modules ``lora.lora_model`` (``from_local_checkpoint``) and ``lora.utils``
(``parse_fine_tuned_lora_name``) of vLLM, and its classes of models (``hf_to_vllm_mapper``,
``get_expert_mapping``, ``is_3d_moe_weight``), read in 2026. No adapter was ever loaded in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.adapters.factors import Factors
from megatron_packed.models.convert.adapters.matrices import AdaptableWeight
from megatron_packed.models.convert.adapters.peft_names import (
    A_WEIGHT,
    B_WEIGHT,
    PREFIX,
    flat,
    stems,
)
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.weight_rows import parts_of

_STACKED = ("qwen3_5_moe",)
"""Families whose experts have PEFT's form (``is_3d_moe_weight``). The others have one name for each
matrix of each expert."""


def vllm_tensors(
    weights: Sequence[AdaptableWeight],
    split: Mapping[str, Factors],
    config: ModelConfig,
    family: Family,
) -> dict[str, Tensor]:
    """Return the tensors of adapter_model.safetensors by name.

    Args:
        weights: the weights of the model that may have adapters.
        split: factors by the path of their matrix.
    Raises:
        CheckpointError: vLLM has no form for adapters of the family's experts.
    """
    found: dict[str, Factors] = {}
    for weight in weights:
        if not weight.stacked:
            found |= {m.file: split[m.path] for m in weight.matrices if m.path in split}
    experts = [weight for weight in weights if weight.stacked]
    adapted = [weight for weight in experts if weight.matrices[0].path in split]
    if adapted and family.model_type in _STACKED:
        names = stems((), [weight.matrices[0].file for weight in adapted])
        for weight in adapted:
            stem = names[weight.matrices[0].file].removeprefix(PREFIX)
            found[stem] = flat(split[weight.matrices[0].path])
    elif adapted:
        layers = {weight.name.rpartition(".")[0] for weight in adapted}
        for weight in experts:
            if weight.name.rpartition(".")[0] in layers:
                found |= _by_expert(weight, split, config, family)
    return {
        f"{PREFIX}{name}{end}": value.contiguous()
        for name, factors in found.items()
        for end, value in zip((A_WEIGHT, B_WEIGHT), factors, strict=True)
    }


def _by_expert(
    weight: AdaptableWeight, split: Mapping[str, Factors], config: ModelConfig, family: Family
) -> Iterator[tuple[str, Factors]]:
    """Yield the factors of each matrix of each expert.

    vLLM needs those of all matrices of an expert: they are zeros where there is no adapter.
    """
    parts = parts_of(weight.name, weight.shape, family, config)
    experts, outputs, inputs = weight.shape
    if len(parts) < experts:
        raise CheckpointError(
            f"vLLM has no adapters of the experts of {family.model_type}",
            cure=f"merge the adapters, or leave {flags.ADAPTER_FOR} out",
        )
    some = next(iter(split.values()))
    rank = some.B.shape[-1]
    zeros = Factors(
        some.A.new_zeros(experts, rank, inputs), some.B.new_zeros(experts, outputs, rank)
    )
    factors = split.get(weight.matrices[0].path, zeros)
    each = len(parts) // experts
    for number, part in enumerate(parts):
        expert, which = divmod(number, each)
        rows = torch.chunk(factors.B[expert], each)[which]
        yield part.name.removesuffix(".weight"), Factors(factors.A[expert], rows)
