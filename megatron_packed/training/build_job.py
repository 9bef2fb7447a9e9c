"""Construction of the model, its buffers, optimizer and training step from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import BufferPart, Ownership
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.metrics_layout import MetricsLayout
from megatron_packed.models.run_model import build_model, trained_elements
from megatron_packed.models.tensor_overlap import connect_overlap, unfused_lines
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.spikes import SpikeDetector
from megatron_packed.optim.state_precision import StatePrecision
from megatron_packed.training.train_step import TrainStep


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
        if name in starts and not piece.owned
        for begin, _ in piece.runs()
    ]


def ranks_of_norm(
    groups: ParallelGroups, buffers: FlatBuffers
) -> tuple[dist.ProcessGroup | None, dict[BufferPart, int]]:
    """Return the smallest group of ranks that together hold every gradient, and copies within it.

    Returns:
        The group; part of the buffers -> number of ranks of the group that own the same elements.
    """
    ownership = buffers.ownership
    if ownership.size == 1 and ownership.experts is None:
        return groups.tp.group, {}
    holders = {
        part: groups.expert_dp.size if part.expert else groups.dp_cp.size
        for part in buffers.layout.parts
    }
    return groups.world_group, {
        part: count // buffers.owners(part).size for part, count in holders.items()
    }


def build_job(config: RunConfig, groups: ParallelGroups, vocab_size: int) -> Job:
    """Build the model, flat buffers, optimizer and training step on this rank's device."""
    model = build_model(config, vocab_size, groups.device, groups).train()
    # Graphs contain the address of the symmetric memory, so it exists before the first capture.
    if groups.world_size > 1:
        from megatron_packed.models.equal_exchanges import connect_exchanges

        connect_overlap(model, config, groups)
        connect_exchanges(model, config, groups)
    return job_of_model(model, config, groups)


def job_of_model(model: HybridModel, config: RunConfig, groups: ParallelGroups) -> Job:
    """Build flat buffers, optimizer and training step for a model."""
    metrics = MetricsLayout.from_model(model, groups)
    buffers = FlatBuffers(
        model,
        extras=metrics.extras,
        counters=metrics.counters,
        ownership=(
            Ownership.over if config.parallel.use_distributed_optimizer else Ownership.undivided
        )(groups),
        bucket_elements=config.parallel.ddp_bucket_size,
        precision=GradientPrecision.from_config(config.parallel),
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
        count_zeros_of=trained_elements(model) if config.logging.log_num_zeros_in_grad else None,
        spikes=SpikeDetector.from_config(
            config.training, groups.device, groups.world_group if groups.tp.size > 1 else None
        ),
        precision=StatePrecision.from_config(config),
    )
    # The weights of a stage are gathered while the previous stages compute.
    if config.gathers_during_next_step:
        from megatron_packed.distributed.overlapped_collectives import OverlappedGather

        buffers.gather = OverlappedGather(buffers, model.stages)
    step = TrainStep(model, buffers, optimizer, groups, overlap=config.parallel.overlap_grad_reduce)
    return Job(model=model, buffers=buffers, optimizer=optimizer, step=step)
