"""Records of offloaded tensors: their shapes, their place in a block of host memory, and the copies
that are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.memory.saved_tensors import WRITTEN_TO, versions_of

_BLOCK_ALIGNMENT = 512
"""Bytes: every tensor in a block begins at a multiple, whatever its dtype."""
_DEVICE_ALIGNMENT = 256
"""Bytes: kernels, and heuristics that choose among them, may test a tensor's address for alignment
to at most this many.
"""


class HostLayout(NamedTuple):
    """Place of one tensor in a block of host memory, and how to view it when it is back."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    span: int
    """Elements from the first to the last in memory."""
    begin: int
    """Offset in the block, in bytes."""
    lead: int
    """Elements in front of the tensor when it is back, so that its address is aligned as before."""

    @property
    def num_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def part_of(self, block: Tensor) -> Tensor:
        return block.narrow(0, self.begin, self.num_bytes).view(self.dtype)


@dataclass(eq=False)
class OffloadedGroup:
    """Tensors that are offloaded together: one host block, one copy each way.

    Exactly one of three states holds. ``sources`` is set: the copy to the host was queued and the
    device memory still exists. ``prefetched`` is set: a copy back was queued. Neither: the values
    are on the host alone. See [Note: offload stream protocol].
    """

    number: int
    """Position in the order of the forward pass."""
    layouts: list[HostLayout]
    block: Tensor
    """Pinned host memory, allocated from the pool until the group is restored or dropped."""
    num_bytes: int
    copied: Any
    """Event after the copy to the host."""
    sources: list[Tensor] | None
    """Reference that keeps the device memory alive until a stream wait for ``copied`` is queued."""
    prefetched: list[Tensor] | None = None
    """Device buffers that the values are copied back into."""
    arrived: Any = None
    """Event after the last copy from the host; kept after the wait, as the pool needs it. None before
    that copy, and after `Offload.graph_boundary` or `Offload.abandon`.
    """
    versions: list[int] = field(init=False)
    modified: bool = False
    """True if the sources were written to in place while they were held."""

    def __post_init__(self) -> None:
        assert self.sources is not None
        # An in-place write before the copy ran would reach the host; later ones cannot. Autograd's
        # version counts are compared when the sources are released, which costs no device work.
        self.versions = versions_of(self.sources)

    @property
    def last_copy(self) -> Any:
        """Event after the last copy that uses the block, which the pool keeps with it.

        A copy back comes after the copy to the host, so its event stands for both.
        """
        return self.arrived or self.copied


class OffloadHandle:
    """Reference to an offloaded group; dropping the reference drops the group."""

    def __init__(
        self, restore: Callable[[], Sequence[Tensor]], stayed: list[Tensor | None]
    ) -> None:
        self._restore = restore
        self._stayed = stayed
        """Tensors that stayed on the device; None in the place of one that was offloaded."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return versions_of(tensor for tensor in self._stayed if tensor is not None)

    def restore(self) -> Sequence[Tensor]:
        restored = iter(self._restore())
        # Those that stayed are plain references, which autograd does not guard.
        if self._versions_now() != self._versions:
            raise RuntimeError(WRITTEN_TO)
        return [next(restored) if tensor is None else tensor for tensor in self._stayed]


def layouts_of(tensors: Sequence[Tensor]) -> tuple[list[HostLayout], int]:
    """Return the layout of each tensor in one block, and the bytes that the block needs."""
    layouts, begin = [], 0
    for tensor in tensors:
        # Views keep their strides, gaps included: what reads the tensor in the backward pass sees
        # the memory layout that it was compiled or tuned for.
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        lead = int(tensor.storage_offset()) % (_DEVICE_ALIGNMENT // tensor.itemsize)
        layouts.append(HostLayout(tensor.shape, tensor.stride(), tensor.dtype, span, begin, lead))
        begin += -(-layouts[-1].num_bytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
    return layouts, begin
