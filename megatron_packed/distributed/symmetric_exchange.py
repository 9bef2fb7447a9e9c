"""All-to-all of equal parts through symmetric memory, with copy engines in place of NCCL kernels.

Letters: c ranks.

[Note: exchange through symmetric memory]
Each rank has a staging buffer that the other ranks of the group map into their address spaces. A
rank copies the parts for its peers into its buffer. The peers copy their parts from there to their
results. Copy engines transfer these parts over NVLink, so the transfer takes no SM from kernels that
run beside it. The results have the bits of the collective, because nothing is computed.

Between two H200, parts of 132 MB take 422 us and parts of 8 MB 48 us. NCCL takes 481 us and 48 us
(2026-11-25). Beside matrix products either adds about as much time to them.

A part is transferred in pieces, and the buffer has `PIECE_SLOTS` slots for pieces. So a buffer of one size
serves messages of every size and all layers. Two streams run the steps of piece i:

    staging   copy piece i to slot i % PIECE_SLOTS, barrier i, copy the own part
    pulling                                              copy piece i from the peers' slots

Before barrier i, the staging stream waits for this rank's pull of piece ``i - (PIECE_SLOTS - 1)``. The
barrier completes after all ranks have reached it. This orders all accesses:

* Pull i runs after barrier i, so all ranks have staged piece i.
* Piece i is staged after barrier i - 1. There all ranks have pulled piece i - PIECE_SLOTS, the previous
  piece in this slot.
* A last barrier, after the last pull, lets the next exchange write to every slot.

Pull i - 1 and barrier i run at the same time, so the barriers add almost no time to long messages.

If only the first rows of a part are used, and only the device knows their number, copy engines copy
the bytes that are `certain`. Kernels copy the used bytes after these: they read the number, and most
of them end at once. Other bytes of the result are undefined.

One stream orders the barriers of all exchanges of a group, whichever streams call them. The ranks
call the exchanges of a group in the same order, as with NCCL. Both streams leave the caller's stream
and join it again, so a CUDA graph can capture them. The host never waits. A barrier waits for a late
rank without a limit, as a kernel of NCCL does. The barriers of torch are system-wide releases and
acquires, and a kernel starts after the writes of its stream's earlier copies are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import Started
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_memory import (
    ALIGNMENT,
    MappedRanks,
    SharedBuffer,
    StreamEnd,
    aligned_bytes,
    connect_over,
)

PIECE_SLOTS = 3
"""Number of pieces that the staging buffer holds for each peer."""
PIECE_BYTES = 16 * 2**20
"""Largest bytes of the pieces for all peers together."""
_CHECKED_BYTES = (1, 1000, 2**20)
"""Bytes of a part in the exchanges that a start checks."""


class UsedBytes(Protocol):
    """Used bytes of parts, whose number only the device knows."""

    @property
    def certain(self) -> int:
        """Bytes at the beginning of each part that are copied in any case."""

    @property
    def reversed(self) -> UsedBytes:
        """Used bytes of an exchange in the opposite direction."""

    def copy(self, target: Tensor, source: Tensor, rank: int, start: int, *, sent: bool) -> None:
        """Copy those bytes of a part that are used, on the current stream.

        Args:
            target: contiguous uint8.
            source: contiguous uint8 of the same size.
            rank: number of the rank that receives the part, or that sent it.
            start: position of these bytes in the part.
            sent: True for a part that this rank sends.
        """


class SymmetricExchange(MappedRanks):
    """Staging buffer of a group, and exchanges through it.

    See [Note: exchange through symmetric memory]. The constructor is a collective call of the group,
    and raises what torch raises.

    Args:
        group: the group; its ranks are on one host.
        device: device of this rank.
        piece_bytes: largest bytes of the pieces for all peers together.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        super().__init__(group, device)
        self.piece_bytes = piece_of_peer(self.size, piece_bytes)
        self._connect()

    def _connect(self) -> None:
        """Allocate the staging buffer, and map the buffers of the peers."""
        shape = (PIECE_SLOTS, max(self.size - 1, 1), self.piece_bytes)
        self._buffer = SharedBuffer(self.group, self.device, math.prod(shape))
        self._slots: Sequence[Tensor] = [rank.view(shape) for rank in self._buffer.of_ranks]
        # A high priority starts the barriers, of one warp, before waiting blocks of large kernels.
        self._staging, self._pulling = (
            torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def exchange(self, x: Tensor, used: UsedBytes | None = None) -> Tensor:
        """Send part r of a contiguous ``x`` ``(c, ...)`` to rank r; return part s from each rank s.

        Args:
            x: contiguous parts.
            used: used bytes of the parts; None if all bytes are used.
        """
        result, started = self.start(x, used)
        started.work.wait()
        return result

    def start(self, x: Tensor, used: UsedBytes | None = None) -> tuple[Tensor, Started]:
        """Start ``exchange``; call ``wait_for`` before the result is read or ``x`` is freed."""
        # `last_operation.py` finds this function by its name.
        group, result = self.group, torch.empty_like(x)
        self._staging.wait_stream(self._current())
        if x.numel():
            sent, received = (
                tensor.view(self.size, -1).view(torch.uint8) for tensor in (x, result)
            )
            self._queue(sent, received, used)
        end = StreamEnd(self._current, self._staging.record_event(), x)
        return result, Started(end, "exchange", group)

    def _queue(self, sent: Tensor, received: Tensor, used: UsedBytes | None) -> None:
        """Queue the steps of all pieces. See [Note: exchange through symmetric memory]."""
        staging, pulling, me = self._staging, self._pulling, self.rank
        pulled: list[torch.cuda.Event] = []
        certain = sent.shape[1] if used is None else used.certain
        pieces = pieces_of(sent.shape[1], self.piece_bytes, certain)
        for number, (start, end) in enumerate(pieces):
            slot, piece = number % PIECE_SLOTS, slice(start, end)
            copy = self._copy_all if start < certain or used is None else self._copy_used(used)
            for peer in self._peers():
                staged = self._staged(me, slot, peer, end - start)
                copy(staging, staged, sent[peer, piece], peer, start, sent=True)
            if number >= PIECE_SLOTS - 1:
                staging.wait_event(pulled[number - (PIECE_SLOTS - 1)])
            self._barrier(staging)
            pulling.wait_event(staging.record_event())
            for peer in self._peers():
                staged = self._staged(peer, slot, me, end - start)
                copy(pulling, received[peer, piece], staged, peer, start, sent=False)
            pulled.append(pulling.record_event())
            copy(staging, received[me, piece], sent[me, piece], me, start, sent=True)
        staging.wait_event(pulled[-1])
        self._barrier(staging)

    def _staged(self, sender: int, slot: int, receiver: int, nbytes: int) -> Tensor:
        """Return the memory of a piece in the buffer of ``sender`` for ``receiver``."""
        # A sender stages nothing for itself, so higher receivers move down by one place.
        place = receiver - (receiver > sender)
        return self._slots[sender][slot, place, :nbytes]

    def _copy_all(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, *_: int, sent: bool
    ) -> None:
        self._copy(stream, target, source)

    def _copy_used(self, used: UsedBytes) -> Callable[..., None]:
        def copy(
            stream: torch.cuda.Stream, target: Tensor, source: Tensor, *part: int, sent: bool
        ) -> None:
            with torch.cuda.stream(stream):
                used.copy(target, source, *part, sent=sent)

        return copy

    def close(self) -> None:
        self._slots = ()
        super().close()


def piece_of_peer(size: int, piece_bytes: int) -> int:
    """Return the largest bytes of one peer's piece: an aligned share of ``piece_bytes``."""
    return max(piece_bytes // max(size - 1, 1) // ALIGNMENT, 1) * ALIGNMENT


def pieces_of(nbytes: int, largest: int, certain: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and end of the pieces of a part.

    Args:
        nbytes: bytes of the part.
        largest: largest bytes of a piece, a multiple of the alignment.
        certain: a piece begins at this byte, rounded up to the alignment; None for no such piece.
    Example:
        1,300 bytes in pieces of at most 1,024: (0, 1024), (1024, 1300).
    """
    first = nbytes if certain is None else min(aligned_bytes(certain), nbytes)
    for begin, end in ((0, first), (first, nbytes)):
        count = -(-(end - begin) // largest)
        # Pieces of about equal size: a last short one would have the cost of a barrier, too.
        step = aligned_bytes(-(-(end - begin) // max(count, 1)))
        for start in range(begin, end, max(step, 1)):
            yield start, min(start + step, end)


def staging_bytes(size: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the bytes of the staging buffer of a rank in a group of ``size`` ranks."""
    return PIECE_SLOTS * max(size - 1, 1) * piece_of_peer(size, piece_bytes)


def connect_exchange(group: dist.ProcessGroup, groups: ParallelGroups) -> SymmetricExchange | str:
    """Set up the exchange of a group through symmetric memory, and check it.

    This is a collective call of all ranks of the run. They agree: all of them use symmetric memory,
    or none does.

    Args:
        group: group of this rank whose ranks exchange parts.
        groups: process groups of this rank.
    Returns:
        The exchange, or the reason why it cannot be used.
    """
    return connect_over(
        group, groups, lambda: SymmetricExchange(group, groups.device), _wrong_exchanges
    )


def _wrong_exchanges(exchange: SymmetricExchange) -> list[str]:
    """Return the problems of exchanges whose results every rank can compute."""

    def message(sender: int, nbytes: int) -> Tensor:
        generator = torch.Generator(exchange.device).manual_seed(sender)
        shape = (exchange.size, nbytes)
        return torch.randint(
            256, shape, dtype=torch.uint8, device=exchange.device, generator=generator
        )

    problems = []
    # Every rank runs all exchanges: their barriers would wait for a rank that returns early.
    for nbytes in _CHECKED_BYTES:
        received = exchange.exchange(message(exchange.rank, nbytes))
        senders = range(exchange.size)
        wanted = torch.stack([message(sender, nbytes)[exchange.rank] for sender in senders])
        if not torch.equal(received, wanted):
            problems.append(
                f"an exchange of {nbytes:,} bytes over symmetric memory gives wrong numbers"
            )
    return problems
