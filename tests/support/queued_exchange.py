"""Stand-in for exchanges through symmetric memory, over `queued_streams`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_packed.distributed.symmetric_exchange import (
    PIECE_SLOTS,
    SymmetricExchange,
    UsedBytes,
    piece_of_peer,
)
from support.queued_streams import Machine, Queue, queue_copy


class ExchangeMachine(Machine):
    """GPUs of one host that exchange parts through staging buffers."""

    def __init__(self, ranks: int, piece_bytes: int) -> None:
        super().__init__(ranks)
        piece = piece_of_peer(ranks, piece_bytes)
        shape = (PIECE_SLOTS, max(ranks - 1, 1), piece)
        self.slots = [torch.full(shape, 255, dtype=torch.uint8) for _ in range(ranks)]
        self.ranks = [QueuedExchange(self, rank, ranks, piece) for rank in range(ranks)]


class QueuedExchange(SymmetricExchange):
    """`SymmetricExchange` of one rank of an `ExchangeMachine`."""

    def __init__(self, machine: ExchangeMachine, rank: int, size: int, piece: int) -> None:
        self.machine = machine
        self.group = SimpleNamespace()  # type: ignore[assignment]
        self.rank = rank
        self.size = size
        self.piece_bytes = piece
        self._slots = machine.slots
        self._staging, self._pulling = Queue(machine), Queue(machine)  # type: ignore[assignment]
        self.caller = Queue(machine)
        """Stream from which exchanges are started."""

    def _current(self) -> Queue:  # type: ignore[override]
        return self.caller

    def _copy(self, stream: Queue, target: Tensor, source: Tensor) -> None:  # type: ignore[override]
        queue_copy(stream, target, source)

    def _copy_used(self, used: UsedBytes) -> Callable[..., None]:
        def copy(stream: Queue, target: Tensor, source: Tensor, *part: int, sent: bool) -> None:
            stream.add(lambda: used.copy(target, source, *part, sent=sent) is None)

        return copy

    def _barrier(self, stream: Queue) -> None:  # type: ignore[override]
        self.machine.barriers.add(self.rank, stream)
