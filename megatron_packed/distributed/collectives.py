"""Collectives; each is the identity for a group of one rank (``None``).

Those of tensors queue on the current stream; ``differentiable.py`` builds what autograd passes
through on them. The JSON ones are for start-up and checkpoints (they wait for the host); they carry
text, never pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups

T = TypeVar("T")

# torch 2.13 has renamed these two and warns about the old names, which are the only ones of 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def all_gather_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather ``(T / size, ...)`` of every rank, equally many rows each, as ``(T, ...)`` in the order
    of ranks.
    """
    if group is None:
        return x
    rows, *rest = x.shape
    # Not a list of tensors: NCCL writes every rank's rows straight to their place, without a copy.
    whole = x.new_empty(rows * dist.get_world_size(group), *rest)
    _all_gather(whole, x.contiguous(), group=group)
    return whole


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's ``(T / size, ...)`` rows of the sum of every rank's ``x`` ``(T, ...)``.

    Raises:
        ValueError: the rows do not divide among the ranks.
    """
    if group is None:
        return x
    mine = torch.empty_like(own_rows(x, group), memory_format=torch.contiguous_format)
    _reduce_scatter(mine, x.contiguous(), group=group)
    return mine


def reduce_scatter_in_place(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum ``(T,)`` over ``group``: rank r's own ``T / size`` elements hold the sum afterwards, the
    others no promise.

    Raises:
        ValueError: the elements do not divide among the ranks.
    """
    if group is not None:
        _reduce_scatter(own_rows(flat, group), flat, group=group)


def all_gather_in_place(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill ``(T,)`` with every rank's own ``T / size`` elements.

    Raises:
        ValueError: the elements do not divide among the ranks.
    """
    if group is not None:
        _all_gather(flat, own_rows(flat, group), group=group)


class Started(NamedTuple):
    """A collective that is under way beside what the current stream does."""

    work: dist.Work
    name: str
    group: dist.ProcessGroup


def start_sum(flat: Tensor, group: dist.ProcessGroup | None, *, own_share: bool) -> Started | None:
    """Begin to sum ``(T,)`` over ``group`` in place; ``wait_for`` it before ``flat`` is touched
    again.

    Args:
        own_share: only this rank's own ``T / size`` elements need hold the sum
            (``reduce_scatter_in_place``).
    """
    if group is None:
        return None
    if own_share:
        # The output is a view of the input: NCCL reduces in place and needs no second buffer.
        work = _reduce_scatter(own_rows(flat, group), flat, group=group, async_op=True)
        return Started(work, "reduce_scatter", group)
    return Started(
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group, async_op=True), "all_reduce", group
    )


def start_all_gather(flat: Tensor, group: dist.ProcessGroup | None) -> Started | None:
    """Begin ``all_gather_in_place``; ``wait_for`` it before ``flat`` is read."""
    if group is None:
        return None
    return Started(
        _all_gather(flat, own_rows(flat, group), group=group, async_op=True), "all_gather", group
    )


def wait_for(started: Started | None) -> None:
    """Let later work on the current stream see the result; on CUDA the host does not wait."""
    # `last_operation.py` finds this function by its name in the stack of a rank that hangs.
    if started is not None:
        started.work.wait()


def pass_to_next(x: Tensor, group: dist.ProcessGroup | None, *, back: bool = False) -> Tensor:
    """Ranks in a ring: send ``x`` to the next and return what the previous one sent; ``back`` turns
    the ring round.
    """
    if group is None:
        return x
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    if back:
        after, before = before, after
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    # One batch: a send and a receive that are posted one after the other could deadlock a ring.
    exchange = [
        dist.P2POp(dist.isend, x, after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return received


def own_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's ``(T / size, ...)`` of ``x`` ``(T, ...)``, a view; no communication.

    Raises:
        ValueError: the rows do not divide among the ranks.
    """
    return _own(x, group, 0, "rows")


def all_gather_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``(..., D / size)`` of every rank, equally many columns each, as ``(..., D)`` in the order of
    ranks.
    """
    if group is None:
        return x
    by_rank = all_gather_rows(x.unsqueeze(0), group)  # (size, ..., D / size)
    return by_rank.movedim(0, -2).flatten(-2)


def own_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's ``(..., D / size)`` of ``x`` ``(..., D)``, a view; no communication.

    Raises:
        ValueError: the columns do not divide among the ranks.
    """
    return _own(x, group, -1, "columns")


def _own(x: Tensor, group: dist.ProcessGroup | None, dim: int, noun: str) -> Tensor:
    if group is None:
        return x
    size, length = dist.get_world_size(group), x.shape[dim]
    if length % size:
        raise ValueError(
            f"{length} {noun} do not divide among the {size} ranks of the group {group.group_desc!r}."
        )
    return x.narrow(dim, dist.get_rank(group) * (length // size), length // size)


def barrier(groups: ParallelGroups) -> None:
    """Return once every rank has called it."""
    if groups.world_size > 1:
        # Through a host tensor: torch's own barrier would wait for the device.
        dist.all_reduce(torch.zeros(1, device=groups.control_device))


def in_turns(groups: ParallelGroups, action: Callable[[], T]) -> T:
    """``action()`` on rank 0 first, then on the first rank of each other machine, then on all
    others.

    For work that leaves its result on disk (compiled kernels and their tuned tiles): one rank does
    it and the others find it, whether the machines share a disk or not. On a shared disk all ranks
    find the same. Ranks whose forward passes wait for each other take the earliest turn among them
    together.
    """
    own_turn = min(groups.local_rank, 1) + 1
    if groups.rank == 0:
        own_turn = 0
    turns = all_gather_json(own_turn, groups)
    first = groups.rank // groups.ranks_of_pass * groups.ranks_of_pass
    # Ranks of one pass call collectives inside `action`: in different turns they would deadlock.
    turn = min(turns[first : first + groups.ranks_of_pass])
    for _ in range(turn):
        barrier(groups)
    result = action()
    for _ in range(turn, 2):
        barrier(groups)
    return result


def all_gather_json(value: Any, groups: ParallelGroups) -> list[Any]:
    """``value`` of every rank, in the order of ranks, on every rank."""
    if groups.world_size == 1:
        return [value]
    device = groups.control_device
    payload = _encode(value).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(groups.world_size)]
    dist.all_gather(lengths, torch.tensor([payload.numel()], dtype=torch.int64, device=device))
    # Collectives need equal sizes: lengths travel first, and texts are padded to the longest.
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
