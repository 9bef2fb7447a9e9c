"""All-to-all exchanges: context-parallel to head-parallel layout and back, and rows by count.

Legend: T tokens of the pack before it is split, N heads (or groups of heads), c ranks, W channels, P
channels of a head.
A letter names the same dimension before and after the split.

[Note: exchange of heads]
Under context parallelism each rank holds all heads of its slice of the tokens. A mixer over the
sequence needs all tokens of some heads. One all-to-all changes the first layout (context-parallel,
``cp``) to the second (head-parallel, ``hp``) for all tensors of a layer together. The parts of all
tensors for rank r are concatenated into one message ``(T/c, W)``. So a layer needs one collective
in each direction, however many tensors it has. The messages arrive in the order of ranks and each
rank has a contiguous slice of tokens. So the received tokens are in sequence order without sorting.

[Note: exchange in parts]
Heads are independent, so the heads of a rank can travel and be computed in parts:

    messages      1 2 3 1'  2'  3'
    computation     1   2   3

The messages of all parts start at once. A part is computed as soon as it has arrived, and its
result travels back while the next part is computed. Only the first message and the last result have
nothing to hide under.

By default there is one part. On two H200, four parts leave 17 ms of the exchange exposed instead of
39 ms. But kernels of fewer heads are less efficient, so a step in graphs takes 197 ms instead of
187 ms (2026-11-24).

In autograd's graph an exchange is two nodes: `_Send` starts a collective, `_Receive` waits for it.
The backward of `_Receive` starts the collective in the opposite direction, and the backward of
`_Send` waits for it. Autograd runs the most recently created of the nodes that are ready. All
results are received after the last part was computed. So the backward pass mirrors the order: the
gradients of all results start to travel, then the last part is computed first. Rows for experts travel
in the same way, see [Note: experts in parts] in ``layers/moe/layer.py``.

All ranks start the messages in the same order, and a process group sends them in this order. On
CUDA the current stream waits, and never the host. A CUDA graph captures the messages as a branch
that leaves the current stream at the start and joins it at the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from megatron_packed.distributed.collectives import (
    Started,
    exchange_parts,
    exchanges,
    start_exchange,
    wait_for,
)
from megatron_packed.distributed.differentiable import Group, linear_map
from megatron_packed.distributed.groups import Axis
from megatron_packed.memory_purpose import Purpose, counted_as

if TYPE_CHECKING:
    from megatron_packed.distributed.symmetric_exchange import SymmetricExchange, UsedBytes


class EqualExchange:
    """All-to-all of equal parts in a group: by its collective, or through symmetric memory.

    Both ways give the same bits.

    Args:
        group: process group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.memory: SymmetricExchange | None = None
        """Symmetric memory through which the parts travel; None for the collective."""
        self.reason = "no symmetric memory was requested"
        """Reason why there is no symmetric memory."""

    @property
    def size(self) -> int:
        return self.group.size()

    def exchange(self, x: Tensor, used: UsedBytes | None = None) -> Tensor:
        """Send part r of ``x`` ``(c, ...)`` to rank r; return part s from each rank s.

        Args:
            x: ``(c, ...)``.
            used: used bytes of the parts; the others are undefined in the result. None if all
                bytes are used.
        """
        # NCCL and gloo send memory in address order, so elements of a transposed view would be
        # misplaced.
        x = x.contiguous()
        if self.memory is not None:
            return self.memory.exchange(x, used)
        return exchange_parts(x, self.group)

    def start(self, x: Tensor, used: UsedBytes | None = None) -> tuple[Tensor, Started]:
        """Start ``exchange`` of a contiguous ``x``.

        Call ``wait_for`` before the result is read, or ``x`` or ``used`` is freed.
        """
        if self.memory is not None:
            return self.memory.start(x, used)
        return start_exchange(x, self.group)

    def close(self) -> None:
        """Free the symmetric memory. Call it after all graphs were released."""
        if self.memory is not None:
            self.memory.close()
        self.memory = None


@dataclass(frozen=True, kw_only=True)
class ExchangingAxis(Axis):
    """Axis whose ranks exchange parts of equal size."""

    exchange: EqualExchange | None = None
    """Exchange among the ranks of the group; None for one rank."""

    def __post_init__(self) -> None:
        if self.exchange is None and self.group is not None:
            object.__setattr__(self, "exchange", EqualExchange(self.group))


def rows_to_columns(tensors: Sequence[Tensor], exchange: EqualExchange | None) -> Tensor:
    """Convert tensors from the context-parallel to the head-parallel layout, in one tensor.

    A rank gives all heads of its own tokens and receives all tokens of its own heads. There is one
    all-to-all forward and one backward.

    Args:
        tensors: ``(T/c, N_i, ...)`` each, of one dtype. ``N_i`` is a multiple or a divisor of c. If
            ``N_i`` is less than c, neighbouring ranks get copies of a head: rank r gets head
            ``r * N_i // c``. The gradient of that head is the sum of the gradients of the copies.
        exchange: exchange of the ranks; ``None`` stands for one rank.
    Returns:
        ``(T, W)``: the channels of this rank's heads, concatenated in the order of ``tensors``.
    Raises:
        ValueError: rows or dtypes differ, or ``N_i`` is neither a multiple nor a divisor of c.
    Example:
        c = 2: x ``(4, 6, 64)``, B ``(4, 1, 128)`` -> ``(8, 3 * 64 + 128)``. Both ranks hold the
        same B.
    """
    # See [Note: exchange of heads].
    if exchange is None:
        return torch.cat([x.flatten(1) for x in tensors], dim=1)
    (x_cTW,) = messages_of_heads(tensors, exchange.size, 1)
    return exchange_equal_parts(x_cTW, exchange).flatten(0, 1)


def messages_of_heads(tensors: Sequence[Tensor], ranks: int, parts: int) -> Iterator[Tensor]:
    """Yield a message ``(c, T/c, W)`` for each part of the heads of every rank.

    Args:
        tensors: as for `rows_to_columns`. With several parts, ``ranks * parts`` divides each N_i.
        ranks: c.
        parts: number of parts.
    """
    tensors = [_shared_heads(x, ranks) for x in tensors]
    rows = _common_rows(tensors)
    assert all(x.shape[1] % (ranks * parts) == 0 for x in tensors), (ranks, parts)
    # (T/c, N, ...) -> (T/c, c, parts, W_i) -> parts of (T/c, c, W_i)
    pieces = [x.reshape(rows, ranks, parts, -1).unbind(2) for x in tensors]
    for part in zip(*pieces):
        # (T/c, c, W_i) -> (c, T/c, W_i), concatenated over i to (c, T/c, W)
        yield torch.cat([x.transpose(0, 1) for x in part], dim=2)


def heads_to_rows(tensors: Sequence[Tensor], exchange: EqualExchange | None) -> tuple[Tensor, ...]:
    """Convert tensors from the head-parallel back to the context-parallel layout.

    A rank gives all tokens of its own heads and receives all heads of its own tokens. There is one
    all-to-all forward and one backward.

    Args:
        tensors: ``(T, N_i/c, ...)`` each, of one dtype.
        exchange: exchange of the ranks; ``None`` returns the tensors unchanged.
    Returns:
        ``(T/c, N_i, ...)`` each.
    Raises:
        ValueError: rows or dtypes differ, or the number of rows is not a multiple of the group
            size.
    """
    # See [Note: exchange of heads].
    if exchange is None:
        return tuple(tensors)
    ranks, group = exchange.size, exchange.group
    rows = _common_rows(tensors)
    if rows % ranks:
        raise ValueError(
            f"{rows} tokens cannot be split evenly among the {ranks} ranks of the group {group.group_desc!r}."
        )
    # (T, N/c, ...) -> (c, T/c, W_i), concatenated over i to (c, T/c, W)
    # Send one message for all tensors, because latency, not bandwidth, dominates an all-to-all of
    # small tensors.
    x_cTW = torch.cat([x.reshape(ranks, rows // ranks, -1) for x in tensors], dim=2)
    x_cTW = exchange_equal_parts(x_cTW, exchange)
    return tuple(
        # (c, T/c, W_i) -> (T/c, c, W_i) -> (T/c, N, ...)
        part.transpose(0, 1).reshape(rows // ranks, ranks * x.shape[1], *x.shape[2:])
        for part, x in zip(torch.split(x_cTW, [x[0].numel() for x in tensors], dim=2), tensors)
    )


def compute_by_heads(
    tensors: Sequence[Tensor],
    compute: Callable[[int, Tensor], Tensor],
    exchange: EqualExchange,
    parts: int,
) -> Tensor:
    """Exchange rows for heads, compute with the heads of this rank, and exchange back.

    See [Note: exchange of heads] and [Note: exchange in parts].

    Args:
        tensors: ``(T/c, N_i, ...)`` each, as for `rows_to_columns`.
        compute: maps the number of a part and the columns ``(T, W)`` of its heads to their outputs
            ``(T, N/(c parts), P)``.
        exchange: exchange of the ranks.
        parts: number of parts. With 1, every collective completes before the next operation.
    Returns:
        ``(T/c, N, P)``.
    """
    ranks, overlaps = exchange.size, Overlaps(parts > 1, parts > 1)
    arriving = [
        parts_in_motion(exchange, overlaps=overlaps).send(x_cTW)
        for x_cTW in messages_of_heads(tensors, ranks, parts)
    ]
    returning = []
    for number, part in enumerate(arriving):
        y_TNP = compute(number, part.receive().flatten(0, 1))
        returning.append(
            parts_in_motion(exchange, overlaps=overlaps).send(
                y_TNP.reshape(ranks, -1, *y_TNP.shape[1:])
            )
        )
    # (c, T/c, N/(c parts), P) -> (T/c, c, parts, N/(c parts), P) -> (T/c, N, P)
    results = [part.receive().transpose(0, 1) for part in returning]
    return torch.stack(results, dim=2).flatten(1, 3)


Start = Callable[[Tensor], tuple[Tensor, Started | None]]
"""Starts an exchange of a contiguous tensor: memory of the result, and the collective that writes it.
None stands for a collective after which the current stream continues.
"""


class Overlaps(NamedTuple):
    """Passes in which an exchange runs beside other operations."""

    forward: bool
    backward: bool


class InMotion:
    """Tensor on its way to other ranks, in the forward or in the backward pass.

    Args:
        there: starts the exchange.
        back: starts its adjoint, an exchange in the opposite direction.
    """

    def __init__(self, there: Start, back: Start) -> None:
        self.there = there
        self.back = back
        self._sent: Tensor | None = None
        self._started: Started | None = None
        self._arriving: Tensor | None = None
        self._edge: Tensor | None = None

    def send(self, x: Tensor) -> InMotion:
        """Start to exchange ``x``, with autograd support."""
        self._edge = _Send.apply(x, self)  # type: ignore[no-untyped-call]
        return self

    def receive(self) -> Tensor:
        """Return the exchanged tensor, with autograd support."""
        edge = self._edge
        self._edge = None
        return cast(Tensor, _Receive.apply(edge, self))  # type: ignore[no-untyped-call]

    def start(self, x: Tensor, exchange: Start) -> Tensor:
        """Start an exchange, and return an empty tensor, which connects the two nodes.

        The exchanged tensor would not do: its gradient may have the size of ``x`` instead.
        """
        # Keep the memory of `x`, which may be a copy, until the collective has read it. NCCL and gloo
        # send memory in address order, so elements of a transposed view would be misplaced.
        self._sent = x = x.contiguous()
        self._arriving, self._started = exchange(x)
        return x.new_empty(0)

    def wait(self) -> Tensor:
        """Make the current stream wait for the exchange, and return the exchanged tensor."""
        wait_for(self._started)
        arrived = self._arriving
        assert arrived is not None, "an exchange is received once"
        self._started = self._sent = self._arriving = None
        return arrived


def parts_in_motion(
    exchange: EqualExchange, used: UsedBytes | None = None, *, overlaps: Overlaps
) -> InMotion:
    """Return a tensor ``(c, ...)`` in motion: part r goes to rank r. The map is its own adjoint.

    Args:
        exchange: exchange of the ranks.
        used: as for `EqualExchange.exchange`.
        overlaps: whether the exchange runs beside other operations.
    """

    def start(
        x: Tensor, used: UsedBytes | None, *, overlaps: bool
    ) -> tuple[Tensor, Started | None]:
        if not overlaps:
            return exchange.exchange(x, used), None
        with record_function("exchange::start"):
            return exchange.start(x, used)

    back = None if used is None else used.reversed
    return InMotion(
        partial(start, used=used, overlaps=overlaps.forward),
        partial(start, used=back, overlaps=overlaps.backward),
    )


def rows_in_motion(
    sent: Sequence[int], received: Sequence[int], group: Group, *, overlaps: Overlaps
) -> InMotion:
    """Return rows in motion: ``sent[r]`` consecutive rows go to each rank r.

    The backward pass sends the gradients of the rows in the opposite direction.

    Args:
        sent: host integers, one per rank. ``sent[r]`` must equal rank r's ``received`` for this
            rank.
        received: host integers, one per rank.
        group: process group.
        overlaps: whether the exchange runs beside other operations.
    """
    # The sizes are host integers known before the call, so the host never waits for the device.
    start = partial(_start_rows, group=group)
    there, back = list(sent), list(received)
    return InMotion(
        partial(start, sent=there, received=back, overlaps=overlaps.forward),
        partial(start, sent=back, received=there, overlaps=overlaps.backward),
    )


def _start_rows(
    x: Tensor, *, sent: list[int], received: list[int], group: Group, overlaps: bool
) -> tuple[Tensor, Started | None]:
    with counted_as(Purpose.COMMUNICATION):
        result = x.new_empty(sum(received), *x.shape[1:])
    work = None
    if exchanges(group, "all_to_all", x, overlaps=overlaps):
        work = dist.all_to_all_single(result, x, received, sent, group=group, async_op=overlaps)
    return result, None if work is None else Started(work, "all_to_all_single", group)


class _Send(torch.autograd.Function):
    """Start of an exchange; the backward pass waits for the gradient's exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moving: InMotion) -> Tensor:
        ctx.moving = moving
        return moving.start(x, moving.there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, edge: Tensor) -> tuple[Tensor, None]:
        return ctx.moving.wait(), None


class _Receive(torch.autograd.Function):
    """End of an exchange; the backward pass starts the gradient's exchange."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, moving: InMotion) -> Tensor:
        ctx.moving = moving
        return moving.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.moving.start(dy, ctx.moving.back), None


def exchange_equal_parts(x: Tensor, exchange: EqualExchange | None) -> Tensor:
    """Exchange the parts of ``x`` ``(c, ...)``: send part r to rank r, receive part s from rank s.

    This linear map is its own adjoint, so the backward pass runs the same exchange. For ``exchange``
    None the result is ``x``.
    """
    if exchange is None:
        return x

    def apply(parts: Tensor, group: Group) -> Tensor:
        return exchange.exchange(parts)

    return linear_map(x, exchange.group, apply, apply)


def _shared_heads(x: Tensor, ranks: int) -> Tensor:
    """Return ``x`` with each head repeated, if there are fewer heads than ranks.

    Each rank that shares a head then gets a copy of that head.
    """
    heads = x.shape[1]
    if heads % ranks == 0:
        return x
    if ranks % heads:
        raise ValueError(
            f"{heads} heads cannot be distributed over {ranks} ranks: the number of heads must be a multiple or a "
            "divisor of the number of ranks."
        )
    # The backward of `expand` sums over the copies: that sum is the gradient of a shared head.
    return x.unsqueeze(2).expand(-1, -1, ranks // heads, *x.shape[2:]).flatten(1, 2)


def _common_rows(tensors: Sequence[Tensor]) -> int:
    rows, dtypes = {x.shape[0] for x in tensors}, {x.dtype for x in tensors}
    if len(rows) != 1 or len(dtypes) != 1:
        kinds = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise ValueError(
            "tensors of one all-to-all must have the same number of rows and the same dtype; found "
            f"{kinds or 'none at all'}."
        )
    return rows.pop()
