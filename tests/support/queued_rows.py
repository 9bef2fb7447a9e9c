"""Stand-in for gathers and scatters through symmetric memory, over `queued_streams`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_packed.distributed.symmetric_rows import SymmetricRows, buffer_bytes
from support.queued_streams import Machine, Queue, queue_copy


class RowsMachine(Machine):
    """GPUs of one host that exchange rows; all streams belong to one long capture, or to none."""

    def __init__(self, ranks: int, nbytes: int, *, captures: bool) -> None:
        super().__init__(ranks)
        self.captures = captures
        whole = buffer_bytes(ranks, nbytes)
        # NaN in every dtype: a read of bytes that were not written would show.
        self.buffers = [torch.full((whole,), 255, dtype=torch.uint8) for _ in range(ranks)]
        self.ranks = [QueuedRows(self, rank, ranks, nbytes) for rank in range(ranks)]


class QueuedRows(SymmetricRows):
    """`SymmetricRows` of one rank of a `RowsMachine`."""

    def __init__(self, machine: RowsMachine, rank: int, size: int, nbytes: int) -> None:
        self.machine = machine
        self.group = SimpleNamespace()  # type: ignore[assignment]
        self.rank = rank
        self.size = size
        self.nbytes = nbytes
        self._last = None
        self._buffer = SimpleNamespace(of_ranks=machine.buffers)  # type: ignore[assignment]
        self._copying, self._beside = Queue(machine), Queue(machine)  # type: ignore[assignment]
        self.caller = Queue(machine)
        """Stream from which exchanges are started."""

    def _current(self) -> Queue:  # type: ignore[override]
        return self.caller

    def _is_capturing(self, stream: Queue) -> bool:  # type: ignore[override]
        forked = stream is self.caller or self._last is not None
        return self.machine.captures and forked

    def _barrier(self, stream: Queue) -> None:  # type: ignore[override]
        self.machine.barriers.add(self.rank, stream)

    def _copy(self, stream: Queue, target: Tensor, source: Tensor) -> None:  # type: ignore[override]
        queue_copy(stream, target, source)

    def _multiply(  # type: ignore[override]
        self, stream: Queue, x_TI: Tensor, matrix_IO: Tensor, y_TO: Tensor
    ) -> None:
        stream.add(lambda: y_TO.copy_(x_TI @ matrix_IO) is not None)

    def _sum(self, stream: Queue, terms_cTO: Tensor, sum_TO: Tensor) -> None:  # type: ignore[override]
        stream.add(lambda: sum_TO.copy_(terms_cTO.sum(dim=0)) is not None)
