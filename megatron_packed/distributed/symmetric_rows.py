"""All-gather and reduce-scatter of rows over symmetric memory, and the matrix products that hide them.

Letters: T tokens of all ranks, I input width, O output width, c ranks.

[Note: fused products]
A fused product computes one block of rows for each rank. While it computes a block, copy engines
transfer another block over NVLink. No kernel of NCCL runs, so the product keeps all SMs.

Each rank has a buffer that the other ranks of the group map. It has three slots, see `_Slot`.

**Gather.** The current stream copies the rows of this rank to its slot, and passes a barrier. Then the
copying stream copies the rows of the other ranks, each with an event. The product of this rank's rows
needs no event, so it runs first. The barrier also comes before that product, because the blocks of a
product may fill the GPU until its end, and would delay a barrier beside it. The other products alternate between
two streams, so that the last blocks of one run beside the first blocks of the next.

**Scatter.** A rank computes the terms for the next rank first and its own terms last. The copying stream
copies each term to the slot of its rank as soon as it is complete. After a barrier, a rank adds the terms
that it received, in float32 and in a fixed order. It rounds once.

**One barrier.** No earlier exchange may still use the slot of exchange k + 1. All ranks reach the barrier
of exchange k after the end of exchange k - 1. So that barrier suffices if exchange k uses another slot.
Layers use the slots in turn, so a product has one barrier. A second one comes first if an exchange uses
the slot of the previous exchange, or is the first of a CUDA graph. Eager exchanges always have two, because
graphs may have been replayed between them.

Compared with the product and the collective one after the other:

* Gathered rows have the same bits, because nothing is computed. Their product has the bits of one
  product over all rows if cuBLAS computes both with the same kernel.
* For two ranks, sums have the bits of NCCL's. For more ranks they round once, and NCCL rounds after each
  addition.

All streams leave the caller's stream and join it again, so a CUDA graph can capture them. The host never
waits. All ranks call the exchanges of a group in the same order. A barrier waits for a late rank without
a limit, as a kernel of NCCL does. The barriers of torch are system-wide releases and acquires, and a
kernel starts after the writes of its stream's earlier copies are complete.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import PendingRows, Started
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_memory import (
    MappedRanks,
    SharedBuffer,
    StreamEnd,
    aligned_bytes,
    connect_over,
)

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes in which fused products were compared with the collectives."""
_CHECKED_ROWS, _CHECKED_WIDTH = 32, 64
_CLOSE = 0.02
"""Largest allowed relative difference of the products that a start checks."""


class _Slot(Enum):
    """Part of the buffer; the value is its place, in units of the rows of one rank."""

    GATHERED = 0
    """``(T / c, I)``: rows of this rank, which the other ranks copy from here."""
    REGATHERED = 1
    """The same, for the rows of a weight gradient."""
    RECEIVED = 2
    """``(c, T / c, O)``: terms of this rank's rows, which the other ranks copy to here."""


class SymmetricRows(MappedRanks):
    """Buffer of a group, and exchanges of rows through it. See [Note: fused products].

    The constructor is a collective call of the group, and raises what torch raises.

    Args:
        group: the group; its ranks are on one host.
        device: device of this rank.
        nbytes: most bytes of the rows that a rank gives to a gather, or gets from a scatter.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        super().__init__(group, device)
        self.nbytes = nbytes
        self._last: _Slot | None = None
        """Slot of the previous exchange; only exchanges of the same capture read it."""
        self._connect()

    def _connect(self) -> None:
        self._buffer = SharedBuffer(self.group, self.device, buffer_bytes(self.size, self.nbytes))
        # A high priority starts the barriers, of one warp, before waiting blocks of large kernels.
        self._copying = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def holds(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Return whether a rank may exchange ``(rows, width)``."""
        return self._buffer is not None and 0 < rows * width * dtype.itemsize <= self.nbytes

    def all_gather_matmul(
        self, own_TI: Tensor, matrix_IO: Tensor, *, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the rows of all ranks (None without ``keep``), and their product with a matrix.

        Args:
            own_TI: ``(T / c, I)`` rows of this rank.
            matrix_IO: ``(I, O)``; a transposed view is allowed.
            keep: return the gathered rows ``(T, I)`` too.
        Returns:
            Gathered rows or None; ``(T, O)``.
        """
        # `last_operation.py` finds this function by its name.
        own_TI = own_TI.contiguous()
        rows, current = own_TI.shape[0], self._current()
        x_TI = own_TI.new_empty(rows * self.size, own_TI.shape[1])
        y_TO = own_TI.new_empty(rows * self.size, matrix_IO.shape[1])
        x_cTI, y_cTO = x_TI.chunk(self.size), y_TO.chunk(self.size)
        arrivals = self._start_gather(own_TI, x_cTI, _Slot.GATHERED, keep_own=keep)
        self._multiply(current, own_TI, matrix_IO, y_cTO[self.rank])
        for number, (peer, arrived) in enumerate(arrivals):
            stream = current if number % 2 else self._beside
            stream.wait_event(arrived)
            self._multiply(stream, x_cTI[peer], matrix_IO, y_cTO[peer])
        if self.size > 1:  # otherwise this stream was not forked, and a capture could not join it
            current.wait_stream(self._beside)
        current.wait_stream(self._copying)
        return x_TI if keep else None, y_TO

    def matmul_reduce_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' products: ``(T, I)`` -> ``(T / c, O)``.

        T must be a multiple of the group size.
        """
        # `last_operation.py` finds this function by its name.
        rows, width, current = x_TI.shape[0] // self.size, matrix_IO.shape[1], self._current()
        x_cTI = x_TI.chunk(self.size)
        term_cTO = x_TI.new_empty(self.size - 1, rows, width).unbind()
        sum_TO = x_TI.new_empty(rows, width)
        self._open(_Slot.RECEIVED)
        for peer, term_TO in zip(self._peers(), term_cTO):
            self._multiply(current, x_cTI[peer], matrix_IO, term_TO)
            self._copying.wait_stream(current)
            self._copy(self._copying, self._received(peer, sum_TO)[self.rank], term_TO)
        # The last product hides the last copy and the barrier.
        self._barrier(self._copying)
        received_cTO = self._received(self.rank, sum_TO)
        self._multiply(current, x_cTI[self.rank], matrix_IO, received_cTO[self.rank])
        current.wait_stream(self._copying)
        self._sum(current, received_cTO, sum_TO)
        return sum_TO

    def start_gather(self, own_TI: Tensor) -> PendingRows:
        """Start to gather the rows of all ranks: ``(T / c, I)`` -> ``(T, I)``.

        The current stream continues with other work after a barrier.
        """
        # `last_operation.py` finds this function by its name.
        own_TI = own_TI.contiguous()
        x_TI = own_TI.new_empty(own_TI.shape[0] * self.size, own_TI.shape[1])
        x_cTI = x_TI.chunk(self.size)
        self._start_gather(own_TI, x_cTI, _Slot.REGATHERED, keep_own=True)
        return PendingRows(Started(self._end(own_TI), "all_gather", self.group), x_TI)

    def start_scatter(self, x_TI: Tensor) -> PendingRows:
        """Start to sum ``(T, I)`` over the ranks; the result has this rank's ``(T / c, I)`` rows.

        The current stream continues with other work. T must be a multiple of the group size.
        """
        # `last_operation.py` finds this function by its name.
        x_TI = x_TI.contiguous()
        x_cTI = x_TI.chunk(self.size)
        sum_TI = torch.empty_like(x_cTI[self.rank])
        self._open(_Slot.RECEIVED)
        for peer in self._peers():
            self._copy(self._copying, self._received(peer, sum_TI)[self.rank], x_cTI[peer])
        self._barrier(self._copying)
        received_cTI = self._received(self.rank, sum_TI)
        self._copy(self._copying, received_cTI[self.rank], x_cTI[self.rank])
        self._sum(self._copying, received_cTI, sum_TI)
        return PendingRows(Started(self._end(x_TI), "reduce_scatter", self.group), sum_TI)

    def _start_gather(
        self, own_TI: Tensor, x_cTI: tuple[Tensor, ...], slot: _Slot, *, keep_own: bool
    ) -> list[tuple[int, torch.cuda.Event]]:
        """Queue the copies of the rows of all ranks.

        Returns:
            for each other rank, in the order of the copies: its number, and the event of its rows.
        """
        current, copying = self._current(), self._copying
        self._open(slot)
        self._copy(current, self._rows(self.rank, slot, own_TI), own_TI)
        self._barrier(current)
        copying.wait_stream(current)
        arrived = []
        for peer in self._peers():
            self._copy(copying, x_cTI[peer], self._rows(peer, slot, own_TI))
            arrived.append((peer, copying.record_event()))
        if keep_own:
            self._copy(copying, x_cTI[self.rank], own_TI)
        return arrived

    def _open(self, slot: _Slot) -> None:
        """Begin an exchange: make its slot free on all ranks, and fork the copying stream.

        Tensors of the exchange are allocated before, so that their memory is free in all streams.
        """
        current, copying = self._current(), self._copying
        captures = self._is_capturing(current)
        continues = captures and self._is_capturing(copying)
        if continues or not captures:
            # The previous exchange of this rank ends before the next barrier.
            current.wait_stream(copying)
        if not continues or slot == self._last:
            self._barrier(current)
        self._last = slot
        copying.wait_stream(current)

    def _rows(self, rank: int, slot: _Slot, like: Tensor, count: int = 1) -> Tensor:
        """Return the first rows of a slot in the buffer of a rank, in the shape of ``like``."""
        assert self._buffer is not None
        start = slot.value * aligned_bytes(self.nbytes)
        part = self._buffer.of_ranks[rank][start : start + count * like.nbytes]
        return part.view(like.dtype).view(count * like.shape[0], *like.shape[1:])

    def _received(self, rank: int, like: Tensor) -> Tensor:
        """Return ``(c, T / c, O)``: the terms that a rank receives, in the order of the senders."""
        return self._rows(rank, _Slot.RECEIVED, like, self.size).view(self.size, *like.shape)

    def _end(self, source: Tensor) -> StreamEnd:
        return StreamEnd(self._current, self._copying.record_event(), source)

    def _is_capturing(self, stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def _multiply(
        self, stream: torch.cuda.Stream, x_TI: Tensor, matrix_IO: Tensor, y_TO: Tensor
    ) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            torch.mm(x_TI, matrix_IO, out=y_TO)

    def _sum(self, stream: torch.cuda.Stream, terms_cTO: Tensor, sum_TO: Tensor) -> None:
        with torch.cuda.stream(stream):
            torch.sum(terms_cTO, dim=0, out=sum_TO)


def buffer_bytes(size: int, nbytes: int) -> int:
    """Return the bytes of the buffer of a rank in a group of ``size`` ranks.

    Args:
        nbytes: bytes of the rows of a rank.
    """
    return (_Slot.RECEIVED.value + size) * aligned_bytes(nbytes)


def row_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of ``(rows, width)``."""
    return math.prod((rows, width, dtype.itemsize))


def dtype_reasons(dtype: torch.dtype) -> list[str]:
    """Return why products in a dtype are not fused; empty if they may be."""
    if dtype in DTYPES:
        return []
    checked = " and ".join(str(each).removeprefix("torch.") for each in DTYPES)
    name = str(dtype).removeprefix("torch.")
    return [f"fused products are checked in {checked} only, but the dtype is {name}"]


def connect(
    group: dist.ProcessGroup, groups: ParallelGroups, dtype: torch.dtype, nbytes: int
) -> SymmetricRows | str:
    """Set up the exchange of rows of a group, and check it on small matrices.

    This is a collective call of all ranks of the run. They agree: all of them get symmetric memory,
    or none does.

    Args:
        group: group of this rank whose ranks exchange rows.
        groups: process groups of this rank.
        dtype: dtype of the products.
        nbytes: most bytes of the rows of a rank, equal on all ranks.
    Returns:
        The exchange, or the reason why it cannot be used.
    """
    reasons = [] if groups.device.type != "cuda" else dtype_reasons(dtype)
    nbytes = max(nbytes, row_bytes(_CHECKED_ROWS, _CHECKED_WIDTH, dtype))
    return connect_over(
        group,
        groups,
        lambda: SymmetricRows(group, groups.device, nbytes),
        lambda rows: _wrong_products(rows, dtype),
        reasons,
    )


def _wrong_products(memory: SymmetricRows, dtype: torch.dtype) -> list[str]:
    """Return the problems of exchanges of small matrices that every rank can compute."""
    generator = torch.Generator().manual_seed(0)
    size, rank = memory.size, memory.rank
    rows, width = _CHECKED_ROWS, _CHECKED_WIDTH

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(memory.device, dtype)

    x_TI = drawn(size * rows, width)
    matrices = [drawn(width, width) for _ in range(size)]
    own_rows = slice(rank * rows, (rank + 1) * rows)
    terms = [x_TI.float() @ matrix.float() for matrix in matrices]
    wanted_TO = torch.stack(terms).sum(dim=0)[own_rows]
    gathered_TI, y_TO = memory.all_gather_matmul(x_TI[own_rows], matrices[0], keep=True)
    assert gathered_TI is not None
    pairs = {
        "all_gather": (gathered_TI, x_TI),
        "all_gather_matmul": (y_TO, terms[0]),
        "matmul_reduce_scatter": (memory.matmul_reduce_scatter(x_TI, matrices[rank]), wanted_TO),
        "start_gather": (memory.start_gather(x_TI[own_rows]).wait(), x_TI),
        "start_scatter": (memory.start_scatter(x_TI @ matrices[rank]).wait(), wanted_TO),
    }
    return [
        f"{name} over symmetric memory gives wrong numbers"
        for name, (found, wanted) in pairs.items()
        if not (found.float() - wanted).norm() <= _CLOSE * wanted.float().norm()
    ]
