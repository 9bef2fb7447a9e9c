"""Small collectives; each is the identity in a world of one process.

The JSON ones are for start-up and checkpoints (they wait for the host); they carry text, never pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups

T = TypeVar("T")


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``tensor`` over ``group`` in place and return it; ``group`` None is the identity."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Largest value over ``group``, in place; ``group`` None is the identity."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def barrier(groups: ParallelGroups) -> None:
    """Return once every rank has called it."""
    if groups.world_size > 1:
        # Through a host tensor: torch's own barrier would wait for the device.
        dist.all_reduce(torch.zeros(1, device=groups.control_device))


def in_turns(groups: ParallelGroups, action: Callable[[], T]) -> T:
    """``action()`` on rank 0 first, then on the first rank of each other machine, then on all others.

    For work that leaves its result on disk (compiled kernels and their tuned tiles): one rank does it and the others
    find it, whether the machines share a disk or not. On a shared disk all ranks find the same.
    """
    turn = 0 if groups.rank == 0 else 1 if groups.local_rank == 0 else 2
    for _ in range(turn):
        barrier(groups)
    result = action()
    for _ in range(turn, 2):
        barrier(groups)
    return result


def broadcast_json(value: Any, groups: ParallelGroups, *, source: int = 0) -> Any:
    """``value`` of rank ``source``, on every rank (what the other ranks pass is ignored).

    Example:
        rank 0 decides which checkpoint to load: ``step = broadcast_json(step if rank == 0 else None, groups)``.
    """
    if groups.world_size == 1:
        return value
    payload = _encode(value) if groups.rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=groups.control_device)
    dist.broadcast(length, src=source)
    received = torch.zeros(int(length), dtype=torch.uint8, device=groups.control_device)
    if groups.rank == source:
        received.copy_(payload)
    dist.broadcast(received, src=source)
    return _decode(received)


def all_gather_json(value: Any, groups: ParallelGroups) -> list[Any]:
    """``value`` of every rank, in the order of ranks, on every rank."""
    if groups.world_size == 1:
        return [value]
    device = groups.control_device
    payload = _encode(value).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(groups.world_size)]
    dist.all_gather(lengths, torch.tensor([payload.numel()], dtype=torch.int64, device=device))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload
    received = [torch.empty_like(padded) for _ in range(groups.world_size)]
    dist.all_gather(received, padded)
    return [_decode(text[: int(length)]) for text, length in zip(received, lengths)]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(payload: Tensor) -> Any:
    return json.loads(payload.cpu().numpy().tobytes())
