"""Stand-in for symmetric memory on CPUs: gathers, scatters and their products through shared files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed import symmetric_rows
from megatron_packed.distributed.collectives import PendingRows
from megatron_packed.distributed.symmetric_rows import SymmetricRows, buffer_bytes
from support.shared_files import SharedFiles, StreamAtOnce


class SharedFileRows(SymmetricRows):
    """`SymmetricRows` whose operations run at once; counts exchanges and barriers.

    After its first exchange it behaves as in one long capture, so it has one barrier for each exchange
    where the protocol needs no more.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        super().__init__(group, torch.device("cpu"), nbytes)

    def _connect(self) -> None:
        self.calls: Counter[str] = Counter()
        self._buffer = SharedFiles(self.group, buffer_bytes(self.size, self.nbytes))  # type: ignore[assignment]
        self._copying, self._beside = StreamAtOnce(), StreamAtOnce()  # type: ignore[assignment]
        self._caller = StreamAtOnce()

    def all_gather_matmul(
        self, own_TI: Tensor, matrix_IO: Tensor, *, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        self.calls["all_gather_matmul"] += 1
        return super().all_gather_matmul(own_TI, matrix_IO, keep=keep)

    def matmul_reduce_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
        self.calls["matmul_reduce_scatter"] += 1
        return super().matmul_reduce_scatter(x_TI, matrix_IO)

    def start_gather(self, own_TI: Tensor) -> PendingRows:
        self.calls["start_gather"] += 1
        return super().start_gather(own_TI)

    def start_scatter(self, x_TI: Tensor) -> PendingRows:
        self.calls["start_scatter"] += 1
        return super().start_scatter(x_TI)

    def _current(self) -> Any:
        return self._caller

    def _is_capturing(self, stream: Any) -> bool:
        return stream is self._caller or self._last is not None

    def _barrier(self, stream: Any) -> None:
        self.calls["barriers"] += 1
        super()._barrier(stream)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous()
        target.copy_(source)

    def _multiply(self, stream: Any, x_TI: Tensor, matrix_IO: Tensor, y_TO: Tensor) -> None:
        with torch.no_grad():
            torch.mm(x_TI, matrix_IO, out=y_TO)

    def _sum(self, stream: Any, terms_cTO: Tensor, sum_TO: Tensor) -> None:
        torch.sum(terms_cTO, dim=0, out=sum_TO)


@contextmanager
def stand_in_memory() -> Iterator[None]:
    """Let models exchange rows through the stand-in, in this process."""

    def connect(group: dist.ProcessGroup, groups: Any, dtype: Any, nbytes: int) -> SharedFileRows:
        return SharedFileRows(group, nbytes)

    with mock.patch.object(symmetric_rows, "connect", connect):
        yield
