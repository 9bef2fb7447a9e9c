"""Stand-in for symmetric memory on CPUs: staging buffers in files that processes map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed import symmetric_exchange
from megatron_packed.distributed.symmetric_exchange import PIECE_SLOTS, SymmetricExchange, UsedBytes

PIECE_BYTES = 1024
"""Small pieces, so that the messages of a tiny model have more pieces than slots."""


class SharedFileExchange(SymmetricExchange):
    """`SymmetricExchange` whose operations run at once; counts the exchanges."""

    def _connect(self) -> None:
        self.calls = 0
        stream = SimpleNamespace(
            wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: None
        )
        self._staging = self._pulling = stream  # type: ignore[assignment]
        self._buffer = None
        shape = (PIECE_SLOTS, max(self.size - 1, 1), self.piece_bytes)
        named = [f"{self.group.group_name}-{dist.get_process_group_ranks(self.group)[0]}"]
        dist.broadcast_object_list(named, group=self.group, group_src=0)
        paths = [Path(gettempdir()) / f"exchange-{named[0]}-{rank}" for rank in range(self.size)]
        size = PIECE_SLOTS * shape[1] * self.piece_bytes
        self._slots = [
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(shape)
            for path in paths
        ]
        self._barrier(stream)
        paths[self.rank].unlink()

    def _queue(self, sent: Tensor, received: Tensor, used: UsedBytes | None) -> None:
        self.calls += 1
        received.fill_(255)  # NaN in every dtype: a read of undefined bytes would show
        super()._queue(sent, received, used)

    def _current(self) -> Any:
        return self._staging

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _barrier(self, stream: Any) -> None:
        dist.barrier(self.group)


@contextmanager
def stand_in_exchanges() -> Iterator[None]:
    """Let models exchange equal parts through the stand-in, in this process."""

    def connect(group: dist.ProcessGroup, groups: Any) -> SymmetricExchange:
        return SharedFileExchange(group, groups.device, PIECE_BYTES)

    with mock.patch.object(symmetric_exchange, "connect_exchange", connect):
        yield
