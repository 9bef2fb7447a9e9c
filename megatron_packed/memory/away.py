"""What is known of tensors that wait in host memory: how they look, where they lie, and which
copies are under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.memory.recompute import versions_of

_ALIGNMENT = 512
"""Bytes: every tensor in a block begins at a multiple, whatever its dtype."""
_ALIGNED = 256
"""Bytes: kernels, and those who choose among them, may ask whether a tensor begins at a multiple of
up to so many.
"""


class Layout(NamedTuple):
    """Where a tensor lies in a block, and what it looks like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    span: int
    """Elements from the first to the last in memory."""
    begin: int
    """In bytes."""
    lead: int
    """Elements that lie in front of it when it is back, so that it is as well aligned as it was."""

    @property
    def num_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def part_of(self, block: Tensor) -> Tensor:
        return block.narrow(0, self.begin, self.num_bytes).view(self.dtype)


@dataclass(eq=False)
class Away:
    """A bundle that is not with its owner. [Note: offload stream protocol]"""

    number: int
    layouts: list[Layout]
    block: Tensor
    num_bytes: int
    copied: Any
    """The copy to the host."""
    sources: list[Tensor] | None
    """Held until the current stream has waited for that copy."""
    loaded: list[Tensor] | None = None
    arrival: Any = None
    """The copy from the host."""
    versions: list[int] = field(init=False)
    spoiled: bool = False
    """Whether somebody wrote to the sources while they were held."""

    def __post_init__(self) -> None:
        assert self.sources is not None
        self.versions = versions_of(self.sources)


def layouts_of(tensors: Sequence[Tensor]) -> tuple[list[Layout], int]:
    """Where tensors will lie in one block, and how many bytes it needs."""
    layouts, begin = [], 0
    for tensor in tensors:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        lead = int(tensor.storage_offset()) % (_ALIGNED // tensor.itemsize)
        layouts.append(Layout(tensor.shape, tensor.stride(), tensor.dtype, span, begin, lead))
        begin += -(-layouts[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return layouts, begin
