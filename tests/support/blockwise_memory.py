"""Stand-in for symmetric memory: the fused products in blocks, as torch computes them, over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed import symmetric_memory
from megatron_packed.distributed.collectives import all_gather_rows, own_rows


class BlockwiseMemory:
    """Stand-in for `SymmetricMemory`; counts the fused products."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self.group = group
        self.nbytes = nbytes
        self.calls: Counter[str] = Counter()
        self.closed = False

    def holds(self, nbytes: int) -> bool:
        return nbytes <= self.nbytes

    def all_gather_matmul(
        self, own_TI: Tensor, matrix_IO: Tensor, *, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        self.calls["all_gather_matmul"] += 1
        x_TI = all_gather_rows(own_TI, self.group)
        blocks = x_TI.chunk(dist.get_world_size(self.group))
        return x_TI if keep else None, torch.cat([block @ matrix_IO for block in blocks])

    def matmul_reduce_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
        self.calls["matmul_reduce_scatter"] += 1
        blocks = x_TI.chunk(dist.get_world_size(self.group))
        term_TO = torch.cat([block @ matrix_IO for block in blocks])
        terms = all_gather_rows(term_TO[None], self.group)
        return own_rows(terms.sum(dim=0), self.group).clone()

    def close(self) -> None:
        self.closed = True


@contextmanager
def stand_in_memory() -> Iterator[None]:
    """Let models with fused products use the stand-in, in this process."""

    def connect(group: dist.ProcessGroup, groups: Any, dtype: Any, nbytes: int) -> BlockwiseMemory:
        return BlockwiseMemory(group, nbytes)

    with mock.patch.object(symmetric_memory, "connect", connect):
        yield
