"""Construction of the model, its buffers, optimizer and training step from a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import forced_buffers
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_collectives import OverlappedGather
from megatron_packed.distributed.zero1_layout import BufferPart, Ownership
from megatron_packed.layers.context_parallel import communication_of
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.spikes import SpikeDetector
from megatron_packed.training.equal_exchanges import connect_exchanges
from megatron_packed.training.metrics_layout import MetricsLayout
from megatron_packed.training.tensor_overlap import connect_overlap, overlap_of, unfused_lines
from megatron_packed.training.train_step import TrainStep


def device_of(config: RunConfig) -> torch.device:
    """Return the device type of ``--device``; 'auto' takes a GPU if torch sees one.

    Raises:
        ValueError: ``--device cuda`` was given, but torch sees no GPU.
    """
    name, has_gpu = config.training.device, torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError(
            "--device cuda: torch sees no GPU here; leave it out, or make a GPU visible (CUDA_VISIBLE_DEVICES)."
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model with everything that is needed to train it."""

    model: HybridModel
    buffers: FlatBuffers
    optimizer: Optimizer
    step: TrainStep

    @property
    def unfused(self) -> list[str]:
        """Lines about products that were to be fused with a collective and were not."""
        return unfused_lines(self.model)

    def close(self) -> None:
        """Free memory that graphs use; call it after the graphs were released."""
        if self.model.offload is not None:
            self.model.offload.close()
        self.model.tp.close()
        for exchange in (self.model.cp.exchange, self.model.ep.exchange):
            if exchange is not None:
                exchange.close()


def counted_elsewhere(model: HybridModel, buffers: FlatBuffers) -> list[tuple[int, int]]:
    """Return ranges ``[start, end)`` of the gradient buffer that a lower tensor-parallel rank holds too."""
    starts = {slot.name: slot.start for slot in buffers.layout.slots}
    return [
        (starts[name] + begin, starts[name] + begin + piece.length)
        for name, sharded in model.sharded_parameters().items()
        for piece in sharded.stored_pieces()
        if not piece.owned
        for begin, _ in piece.runs()
    ]


def elements_of(model: HybridModel) -> int:
    """Return the number of parameter elements of the whole model.

    Replicas count once. Padding of the vocabulary that only this layout needs does not count.
    """
    return sum(sharded.stored_shape.numel() for sharded in model.sharded_parameters().values())


def ranks_of_norm(
    groups: ParallelGroups, buffers: FlatBuffers
) -> tuple[dist.ProcessGroup | None, dict[BufferPart, int]]:
    """Return the smallest group of ranks that together hold every gradient, and copies within it.

    Returns:
        The group; part of the buffers -> number of ranks of the group that own the same elements.
    """
    ownership = buffers.ownership
    if ownership.size == 1 and ownership.experts is None:
        return groups.tp_group, {}
    holders = {
        part: groups.expert_dp_size if part.expert else groups.dp_cp_size
        for part in buffers.layout.parts
    }
    return groups.world_group, {
        part: count // buffers.owners(part).size for part, count in holders.items()
    }


def build_job(config: RunConfig, groups: ParallelGroups, vocab_size: int) -> Job:
    """Build the model, flat buffers, optimizer and training step on this rank's device."""
    model = build_model(config, vocab_size, groups.device, groups).train()
    # Graphs contain the address of the symmetric memory, so it exists before the first capture.
    connect_overlap(model, config, groups)
    connect_exchanges(model, config, groups)
    return job_of_model(model, config, groups)


def job_of_model(model: HybridModel, config: RunConfig, groups: ParallelGroups) -> Job:
    """Build flat buffers, optimizer and training step for a model."""
    metrics = MetricsLayout.of(groups, model)
    buffers = FlatBuffers(
        model,
        extras=metrics.extras,
        counters=metrics.counters,
        ownership=(
            Ownership.over if config.parallel.use_distributed_optimizer else Ownership.undivided
        )(groups),
        bucket_elements=config.parallel.ddp_bucket_size,
    )
    # The norm counts every gradient once, even if several ranks hold it.
    norm_group, copies = ranks_of_norm(groups, buffers)
    optimizer = Optimizer.from_config(
        buffers,
        config.optim,
        norm_group=norm_group,
        copies=copies,
        counted_elsewhere=counted_elsewhere(model, buffers),
        params_norm=config.logging.log_params_norm,
        count_zeros_of=elements_of(model) if config.logging.log_num_zeros_in_grad else None,
        spikes=SpikeDetector.from_config(
            config.training, groups.device, groups.world_group if groups.tp_size > 1 else None
        ),
    )
    # The weights of a stage are gathered while the previous stages compute.
    if config.gathers_during_next_step:
        buffers.gather = OverlappedGather(buffers, model.stages)
    step = TrainStep(model, buffers, optimizer, groups, overlap=config.parallel.overlap_grad_reduce)
    return Job(model=model, buffers=buffers, optimizer=optimizer, step=step)
