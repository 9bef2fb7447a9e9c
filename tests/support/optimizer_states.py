"""Shards of parameters in a flat buffer with the numbers of their elements, and states of jobs."""

import dataclasses
import hashlib

import torch
from torch import Tensor, nn

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.tensor_parallel_shards import (
    ExpertRange,
    Shard,
    ShardedParameter,
    SplitSegment,
)
from megatron_packed.distributed.zero1_layout import BufferPart, ParamSlot, round_up
from megatron_packed.optim.stochastic_rounding import ElementNumbers
from megatron_packed.resume.held_state import held_state
from megatron_packed.training.build_job import Job
from support.layouts import Way, config_of
from support.whole_state import Shards


def sharded(name: str, shard: Shard, local: torch.Tensor) -> ShardedParameter:
    return ShardedParameter(
        name=name, parameter=nn.Parameter(local.float(), requires_grad=False), shard=shard, rank=0
    )


def replicated(name: str, length: int) -> ShardedParameter:
    return sharded(name, Shard.replicated(length, 1, own_gradients=True), torch.zeros(length))


def slots_of(parameters: list[ShardedParameter]) -> list[ParamSlot]:
    """Place parameters one after the other, each at a multiple of 64 elements."""
    slots, start = [], 0
    for item in parameters:
        slots.append(
            ParamSlot(
                name=item.name,
                shape=tuple(item.parameter.shape),
                part=BufferPart(torch.bfloat16),
                decay=True,
                start=start,
                end=start + item.parameter.numel(),
                bucket=0,
            )
        )
        start = round_up(slots[-1].end, 64)
    return slots


def numbers_of(
    parameters: list[ShardedParameter], start: int = 0, end: int | None = None, seed: int = 5
) -> ElementNumbers:
    """Number the elements ``[start, end)`` of parameters that lie one after the other."""
    slots = slots_of(parameters)
    if end is None:
        end = round_up(slots[-1].end, 64)
    by_name = {item.name: item for item in parameters}
    return ElementNumbers.in_slice(slots, by_name, start, end, seed, torch.device("cpu"))


def numbers_of_shards() -> ElementNumbers:
    """Number rank 1's shards of an input projection, of columns, and of experts on two axes."""
    projection = Shard.from_segments(
        [SplitSegment(noun="z", count=4, width=6), SplitSegment(noun="B", count=2, width=5)], 1, 2
    )
    columns = Shard.from_segments([SplitSegment(noun="channels", count=8, width=3)], 1, 2, dim=1)
    experts = Shard(
        dim=1, length=24, pieces=columns.pieces, first=ExpertRange(start=4, length=4, total=8)
    )
    return numbers_of(
        [
            sharded("in_proj", projection, torch.zeros(17, 70)),
            sharded("out_proj", columns, torch.zeros(11, 12)),
            sharded("experts", experts, torch.zeros(4, 12, 5)),
        ]
    )


def everything_computed(job: Job) -> Shards:
    """Return this rank's state as `whole_state.everything` does, with masters of pairs computed."""
    shards = [held.shard for held in held_state(job.model, job.optimizer)]
    return [
        (shard.name, shard.global_shape, tuple(shard.extent), torch.cat([*shard.values()]))
        for shard in shards
    ]


def low_state(way: Way) -> RunConfig:
    config = config_of(way, bf16=True)
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(
            config.optim,
            clip_grad=0.0,  # the sum of a norm has another order in each layout
            use_precision_aware_optimizer=True,
            exp_avg_dtype="bf16",
            exp_avg_sq_dtype="bf16",
        ),
    )


def update(job: Job, steps: range) -> None:
    """Update with gradients that depend on the step and on the element of the unsplit parameter."""
    for step in steps:
        job.buffers.zero_grad()
        for name, sharded in job.model.sharded_parameters().items():
            if not sharded.parameter.requires_grad:
                continue
            seed = int(hashlib.sha256(f"{name} {step}".encode()).hexdigest()[:12], 16)
            draw = torch.Generator().manual_seed(seed)
            whole = torch.randn(sharded.stored_shape, generator=draw)
            grads: Tensor = sharded.parameter.main_grad  # type: ignore[attr-defined]
            grads.copy_(sharded.shard.take(sharded.shard.pad(whole)))
        hold = torch.tensor(float(step % 3 == 1))
        job.optimizer.step(1e-2, loss=torch.zeros(1), hold=hold)
