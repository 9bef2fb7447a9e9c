"""Stand-in for symmetric memory on CPUs: staging buffers in files that processes map."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed import symmetric_exchange
from megatron_packed.distributed.symmetric_exchange import PIECE_SLOTS, SymmetricExchange, UsedBytes
from support.shared_files import SharedFiles, StreamAtOnce

PIECE_BYTES = 1024
"""Small pieces, so that the messages of a tiny model have more pieces than slots."""


class SharedFileExchange(SymmetricExchange):
    """`SymmetricExchange` whose operations run at once; counts the exchanges."""

    def _connect(self) -> None:
        self.calls = 0
        self._staging = self._pulling = StreamAtOnce()  # type: ignore[assignment]
        shape = (PIECE_SLOTS, max(self.size - 1, 1), self.piece_bytes)
        self._buffer = SharedFiles(self.group, math.prod(shape))  # type: ignore[assignment]
        self._slots = [rank.view(shape) for rank in self._buffer.of_ranks]

    def _queue(self, sent: Tensor, received: Tensor, used: UsedBytes | None) -> None:
        self.calls += 1
        received.fill_(255)  # NaN in every dtype: a read of undefined bytes would show
        super()._queue(sent, received, used)

    def _current(self) -> Any:
        return self._staging

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


@contextmanager
def stand_in_exchanges() -> Iterator[None]:
    """Let models exchange equal parts through the stand-in, in this process."""

    def connect(group: dist.ProcessGroup, groups: Any) -> SymmetricExchange:
        return SharedFileExchange(group, groups.device, PIECE_BYTES)

    with mock.patch.object(symmetric_exchange, "connect_exchange", connect):
        yield
