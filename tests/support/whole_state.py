"""Weights and optimizer state of all ranks of a job, assembled to complete tensors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_packed.checkpoint.tensor_shard import Extent
from megatron_packed.resume.held_state import held_state
from megatron_packed.training.build_job import Job

Shards = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def everything(job: Job) -> Shards:
    """Return this rank's state as ranges of the tensors of a checkpoint."""
    shards = [held.shard for held in held_state(job.model, job.optimizer)]
    return [
        (shard.name, shard.global_shape, tuple(shard.extent), shard.tensor.clone())
        for shard in shards
    ]


def assembled(ranks: list[Shards]) -> dict[str, Tensor]:
    """Return complete tensors; check that no range is missing and that copies are equal."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for shards in ranks:
        for name, shape, extent, part in shards:
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=part.dtype)
                seen[name] = torch.zeros(whole[name].numel(), dtype=torch.bool)
            flat, known = whole[name].view(-1), seen[name]
            place = elements(extent)
            agree = torch.where(known[place], flat[place], part)
            assert same_bits(agree, part), f"copies of {name} differ"
            flat[place], known[place] = part, True
    incomplete = [name for name, known in seen.items() if not known.all()]
    assert not incomplete, f"no rank has all of {incomplete[0]}"
    return whole


@cache
def elements(extent: tuple[int, ...]) -> Tensor:
    """Return the numbers of the elements of an extent."""
    return torch.cat([torch.arange(row.start, row.end) for row in Extent(*extent).each_row()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []
