"""Construction of the model of a run on its device, from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import forced_buffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.context_parallel import communication_of
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.tensor_overlap import overlap_of

if TYPE_CHECKING:
    from megatron_packed.memory.activation_offload import Offload


def device_of(config: RunConfig) -> torch.device:
    """Return the device type of ``--device``; 'auto' takes a GPU if torch sees one.

    Raises:
        ValueError: ``--device cuda`` was given, but torch sees no GPU.
    """
    name, has_gpu = config.training.device, torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError(
            f"{flags.DEVICE} cuda: torch sees no GPU here; leave it out, or make a GPU visible (CUDA_VISIBLE_DEVICES)."
        )
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    return torch.device(name)


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of weights and activations."""
    return torch.bfloat16 if config.training.bf16 else torch.float32


def backends_of(config: RunConfig) -> dict[str, str | bool]:
    """Return the requested layers and kernels, and whether kernels must be deterministic."""
    return {**config.training.backends, "deterministic": config.training.deterministic_mode}


def offload_of(config: RunConfig, device: torch.device | str) -> Offload | None:
    """Return the object that offloads activations to the host; None without offload."""
    if not config.memory.offloads:
        return None
    from megatron_packed.memory.activation_offload import Offload

    return Offload.from_config(config.memory, device, forced_buffers(os.environ, []))


def build_model(
    config: RunConfig,
    vocab_size: int,
    device: torch.device | str,
    groups: ParallelGroups | None = None,
    *,
    dtype: torch.dtype | None = None,
    backends: Mapping[str, str | bool] | None = None,
) -> HybridModel:
    """Build the model with initial weights, which depend only on the seed.

    Args:
        config: configuration of the run.
        vocab_size: entries of the vocabulary.
        device: device of the weights.
        groups: process groups; None for a single process.
        dtype: dtype of the weights; by default that of ``--bf16``.
        backends: backends of ops that no option names.
    """
    factor = config.expert_rank_capacity_factor
    model = HybridModel(
        replace(config.model, moe_expert_rank_capacity_factor=factor),
        vocab_size=vocab_size,
        max_positions=config.max_positions,
        groups=groups,
        **communication_of(config.parallel),
        tp_overlap=overlap_of(config),
        device=device,
        dtype=dtype or dtype_of(config),
        seed=config.training.seed,
        backends={**backends_of(config), **(backends or {})},
        memory=config.memory,
        offload=offload_of(config, device),
    )
    packing = config.packing
    model.expert_room.even = model.even_expert_rows(packing.tokens_per_pack)
    # PackTables finds the samples itself if they are the documents.
    per_sample = config.model.moe_router_load_balancing_type == "seq_aux_loss"
    if per_sample and packing.micro_batch_size > 1:
        model.pack_tables.sample_shape = (packing.micro_batch_size, packing.seq_length)
    return model


def trained_elements(model: HybridModel) -> int:
    """Return the number of elements of the whole model's trained parameters.

    Replicas count once. Padding of the vocabulary that only this layout needs does not count.
    """
    return sum(
        sharded.stored_shape.numel()
        for sharded in model.sharded_parameters().values()
        if sharded.parameter.requires_grad
    )
