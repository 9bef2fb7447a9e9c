"""Collectives over process groups; a collective over the group ``None`` (one rank) is the identity.

Collectives of tensors are queued on the current stream. They have no autograd support;
``differentiable.py`` adds it. Collectives of JSON values serve start-up and checkpoints and block
the host. They transfer text, never pickles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups, Unjoined, global_ranks
from megatron_packed.memory_purpose import Purpose, counted_as

T = TypeVar("T")

_RECEIVED = counted_as(Purpose.COMMUNICATION)

# torch 2.13 renamed these two functions and warns about the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PlannedExchange(NamedTuple):
    """Collective that a rank of an inspected layout would run."""

    kind: str
    bytes: int
    """Bytes of the complete message: of all ranks' rows, or of all parts that this rank sends."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    overlaps: bool
    """True if the current stream continues with other work."""


_planned: Counter[PlannedExchange] | None = None


@contextmanager
def planned_exchanges() -> Iterator[Counter[PlannedExchange]]:
    """Yield the collectives over groups of an inspected layout so far -> number of calls."""
    global _planned
    outer, _planned = _planned, Counter()
    try:
        yield _planned
    finally:
        _planned = outer


def exchanges(
    group: dist.ProcessGroup | None, kind: str, message: Tensor, *, overlaps: bool = False
) -> TypeGuard[dist.ProcessGroup]:
    """Return whether a collective over the group exchanges data.

    It does not for one rank, nor for the groups of a layout that is inspected and never run; their
    collectives are counted in `planned_exchanges`.

    Args:
        group: process group.
        kind: name of the collective.
        message: tensor as large as the message; see `PlannedExchange.bytes`.
        overlaps: True if the current stream continues with other work.
    """
    if isinstance(group, Unjoined):
        if _planned is not None:
            _planned[PlannedExchange(kind, message.nbytes, group.ranks, overlaps)] += 1
        return False
    return group is not None


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``tensor`` over ``group`` in place and return it; ``group`` None is the identity."""
    if exchanges(group, "all_reduce", tensor):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replace ``tensor`` by its element-wise maximum over ``group`` and return it.

    The operation is in place, and the identity for ``group`` None.
    """
    if exchanges(group, "all_reduce", tensor):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def broadcast_from_first(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replace ``tensor`` by that of the first rank of ``group`` and return it.

    The operation is in place, and the identity for ``group`` None.
    """
    if exchanges(group, "broadcast", tensor):
        dist.broadcast(tensor, src=global_ranks(group)[0], group=group)
    return tensor


def all_gather_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the ``(T / size, ...)`` rows of every rank into ``(T, ...)``, in the order of ranks.

    Every rank must have the same number of rows.
    """
    if group is None:
        return x
    rows, *row_shape = x.shape
    # Pass one output tensor, not a list, so that NCCL writes each rank's rows to their final place
    # without a copy.
    with _RECEIVED:
        gathered = x.new_empty(rows * group.size(), *row_shape)
    if exchanges(group, "all_gather", gathered):
        _all_gather(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's ``(T / size, ...)`` rows of the sum of every rank's ``x`` ``(T, ...)``.

    Raises:
        ValueError: the number of rows is not a multiple of the group size.
    """
    if group is None:
        return x
    mine = torch.empty_like(own_rows(x, group), memory_format=torch.contiguous_format)
    if exchanges(group, "reduce_scatter", x):
        _reduce_scatter(mine, x.contiguous(), group=group)
    return mine


def all_gather_in_place(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """All-gather ``flat`` ``(T,)`` in place: the r-th ``T / size`` elements come from rank r.

    Raises:
        ValueError: T is not a multiple of the group size.
    """
    if group is not None:
        _all_gather(flat, own_rows(flat, group), group=group)


class Waitable(Protocol):
    """Operation in progress, for which the current stream can wait."""

    def wait(self) -> Any: ...


class Done:
    """Operation that has nothing to wait for."""

    def wait(self) -> None:
        pass


DONE: Waitable = Done()


class Started(NamedTuple):
    """Asynchronous collective in progress; the current stream continues with other work."""

    work: Waitable
    name: str
    group: dist.ProcessGroup


def start_sum(flat: Tensor, group: dist.ProcessGroup | None, *, own_share: bool) -> Started | None:
    """Start to sum ``flat`` ``(T,)`` over ``group`` in place.

    Call ``wait_for`` with the result before ``flat`` is read or written again.

    Args:
        flat: ``(T,)`` tensor.
        group: process group; ``None`` is the identity.
        own_share: if True, run a reduce-scatter in place: only this rank's own ``T / size`` elements
            hold the sum, and the others are undefined. If False, run an all-reduce.
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
    """Start ``all_gather_in_place``; call ``wait_for`` with the result before reading ``flat``."""
    if group is None:
        return None
    return Started(
        _all_gather(flat, own_rows(flat, group), group=group, async_op=True), "all_gather", group
    )


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part r of a contiguous ``x`` ``(c, ...)`` to rank r; receive part s from rank s."""
    with _RECEIVED:
        received = torch.empty_like(x)
    if exchanges(group, "all_to_all", x):
        dist.all_to_all_single(received, x, group=group)
    return received


def start_exchange(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Started]:
    """Start ``exchange_parts``; call ``wait_for`` before the result is read or ``x`` is freed."""
    work = DONE
    with _RECEIVED:
        received = torch.empty_like(x)
    if exchanges(group, "all_to_all", x, overlaps=True):
        work = dist.all_to_all_single(received, x, group=group, async_op=True)
    return received, Started(work, "all_to_all_single", group)


class PendingRows(NamedTuple):
    """Rows that a started collective will write."""

    started: Started | None
    rows: Tensor

    def wait(self) -> Tensor:
        """Make the current stream wait for the collective, and return the rows."""
        wait_for(self.started)
        return self.rows


def start_gather_rows(x: Tensor, group: dist.ProcessGroup | None) -> PendingRows:
    """Start ``all_gather_rows``; the current stream continues with other work."""
    if group is None:
        return PendingRows(None, x)
    rows, *row_shape = x.shape
    work = DONE
    with _RECEIVED:
        gathered = x.new_empty(rows * group.size(), *row_shape)
    if exchanges(group, "all_gather", gathered, overlaps=True):
        work = _all_gather(gathered, x.contiguous(), group=group, async_op=True)
    return PendingRows(Started(work, "all_gather", group), gathered)


def start_scatter_rows(x: Tensor, group: dist.ProcessGroup | None) -> PendingRows:
    """Start ``reduce_scatter_rows``; the current stream continues with other work.

    Raises:
        ValueError: the number of rows is not a multiple of the group size.
    """
    if group is None:
        return PendingRows(None, x)
    mine = torch.empty_like(own_rows(x, group), memory_format=torch.contiguous_format)
    work = DONE
    if exchanges(group, "reduce_scatter", x, overlaps=True):
        work = _reduce_scatter(mine, x.contiguous(), group=group, async_op=True)
    return PendingRows(Started(work, "reduce_scatter", group), mine)


class _Messages(NamedTuple):
    """Messages in progress."""

    works: list[dist.Work]
    sent: Tensor
    """Memory that is read until the messages have arrived."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def start_row_from_others(
    x: Tensor, group: dist.ProcessGroup, *, back: bool = False
) -> PendingRows:
    """Start to send ``x`` ``(1, ...)`` to all later ranks, and to receive the rows of all earlier ranks.

    With ``back`` earlier and later ranks change places. A rank at the end of the group only sends, so
    it has nothing to wait for until ``x`` is freed.

    Returns:
        the received rows in the order of ranks.
    """
    ranks, me = global_ranks(group), group.rank()
    earlier, later = ranks[:me], ranks[me + 1 :]
    senders, receivers = (later, earlier) if back else (earlier, later)
    x, rows = x.contiguous(), x.new_empty(len(senders), *x.shape[1:])
    if not exchanges(group, "send", x, overlaps=True):
        return PendingRows(None, rows)
    exchange = [dist.P2POp(dist.isend, x, rank, group) for rank in receivers]
    exchange += [dist.P2POp(dist.irecv, row, rank, group) for row, rank in zip(rows, senders)]
    works = _Messages(dist.batch_isend_irecv(exchange), x)
    return PendingRows(Started(works, "start_row_from_others", group), rows)


def wait_for(started: Started | None) -> None:
    """Make the current stream wait for a started collective; on CUDA the host does not wait."""
    # `last_operation.py` finds this function by its name in the stack of a rank that hangs.
    if started is not None:
        started.work.wait()


def pass_to_next(x: Tensor, group: dist.ProcessGroup | None, *, back: bool = False) -> Tensor:
    """Send ``x`` to the next rank of a ring and return the tensor that the previous rank sent.

    With ``back`` the ring runs in the opposite direction.
    """
    if group is None:
        return x
    ranks, me = global_ranks(group), group.rank()
    next_rank, previous_rank = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    if back:
        next_rank, previous_rank = previous_rank, next_rank
    with _RECEIVED:
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if not exchanges(group, "send", x):
        return received
    # Post the send and the receive in one batch. If each rank posted its send first,
    # the sends of all ranks could deadlock the ring.
    exchange = [
        dist.P2POp(dist.isend, x, next_rank, group),
        dist.P2POp(dist.irecv, received, previous_rank, group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return received


def own_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's ``(T / size, ...)`` rows of ``x`` ``(T, ...)`` as a view.

    There is no communication.

    Raises:
        ValueError: the number of rows is not a multiple of the group size.
    """
    return _own(x, group, 0, "rows")


def all_gather_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the ``(..., D / size)`` columns of every rank into ``(..., D)``, in the order of
    ranks.

    Every rank must have the same number of columns.
    """
    if group is None:
        return x
    by_rank = all_gather_rows(x.unsqueeze(0), group)  # (size, ..., D / size)
    return by_rank.movedim(0, -2).flatten(-2)


def own_last(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's ``(..., D / size)`` columns of ``x`` ``(..., D)`` as a view.

    There is no communication.

    Raises:
        ValueError: the number of columns is not a multiple of the group size.
    """
    return _own(x, group, -1, "columns")


def _own(x: Tensor, group: dist.ProcessGroup | None, dim: int, noun: str) -> Tensor:
    if group is None:
        return x
    size, length = group.size(), x.shape[dim]
    if length % size:
        raise ValueError(
            f"{length} {noun} cannot be split evenly among the {size} ranks of the group {group.group_desc!r}."
        )
    return x.narrow(dim, group.rank() * (length // size), length // size)


def barrier(groups: ParallelGroups) -> None:
    """Block until every rank has called this function."""
    if groups.world_size > 1:
        # Use an all-reduce of a CPU tensor, because torch's own barrier would wait for the device.
        dist.all_reduce(torch.zeros(1, device=groups.control_device))


def in_turns(groups: ParallelGroups, action: Callable[[], T]) -> T:
    """Run ``action()`` on rank 0, then on the first rank of each other machine, then on the others.

    This serves work that stores its result on disk, e.g. compiled kernels and their tuned tiles.
    One rank does the work and the other ranks read the result, with or without a disk that the
    machines share. On a shared disk all ranks read the same result. Ranks whose forward passes wait
    for each other run ``action`` at the same time, in the earliest turn of any of them.
    """
    own_turn = min(groups.local_rank, 1) + 1
    if groups.rank == 0:
        own_turn = 0
    turns = all_gather_json(own_turn, groups)
    first = groups.rank // groups.ranks_of_pass * groups.ranks_of_pass
    # Ranks of one forward pass call collectives with each other inside `action`, so they must run
    # it in the same turn, or they would deadlock.
    turn = min(turns[first : first + groups.ranks_of_pass])
    for _ in range(turn):
        barrier(groups)
    result = action()
    for _ in range(turn, 2):
        barrier(groups)
    return result


def all_gather_json(value: Any, groups: ParallelGroups) -> list[Any]:
    """Gather a JSON value from every rank and return the list, in the order of ranks."""
    if groups.world_size == 1:
        return [value]
    device = groups.control_device
    payload = _encode(value).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(groups.world_size)]
    dist.all_gather(lengths, torch.tensor([payload.numel()], dtype=torch.int64, device=device))
    # `all_gather` needs equal sizes, so the lengths are gathered first and each text is padded.
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
