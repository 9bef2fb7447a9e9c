"""Records of offloaded tensors: shapes, position in a block of host memory, state of their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.memory.saved_tensors import WRITTEN_TO, span_of, versions_of

_BLOCK_ALIGNMENT = 512
"""Alignment of tensors in a host block, in bytes, for every dtype."""
_DEVICE_ALIGNMENT = 256
"""Largest alignment of a tensor's address, in bytes, that kernels or kernel heuristics depend on."""


class HostLayout(NamedTuple):
    """Position of one tensor in a block of host memory, and its view after the copy back."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    span: int
    """See `span_of`."""
    begin: int
    """Offset in the block, in bytes."""
    lead: int
    """Number of unused elements before the restored tensor, which preserve its address alignment."""

    @property
    def num_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def part_of(self, block: Tensor) -> Tensor:
        return block.narrow(0, self.begin, self.num_bytes).view(self.dtype)


@dataclass(eq=False)
class OffloadedGroup:
    """Tensors that are offloaded together, in one host block.

    A group is in one of three states:

    - ``sources`` is set: the copy to the host was queued, and the device memory still exists.
    - ``prefetched`` is set: a copy from the host was queued.
    - Neither is set: the values are only on the host.

    See [Note: offload stream protocol].
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
    """References that keep the device memory alive until a stream wait for ``copied`` is queued."""
    prefetched: list[Tensor] | None = None
    """Device buffers to which the values are copied back."""
    arrived: Any = None
    """Event after the last copy from the host. The event is kept after the wait, because the pool
    needs it. The field is None before that copy, and after `Offload.graph_boundary` or
    `Offload.abandon`.
    """
    versions: list[int] = field(init=False)
    modified: bool = False
    """True if the sources were written to in place before they were released."""

    def __post_init__(self) -> None:
        assert self.sources is not None
        # An in-place write before the copy runs would change the values on the host. So autograd's
        # version counters are compared when the sources are released, which needs no device work.
        self.versions = versions_of(self.sources)

    @property
    def last_copy(self) -> Any:
        """Event after the last copy that uses the host block; the pool stores it with the block.

        If there was a copy from the host, its event also follows the copy to the host.
        """
        return self.arrived or self.copied


class OffloadHandle:
    """Reference to an offloaded group. When the handle is freed, the group is dropped."""

    def __init__(
        self, restore: Callable[[], Sequence[Tensor]], stayed: list[Tensor | None]
    ) -> None:
        self._restore = restore
        self._stayed = stayed
        """Tensors that stayed on the device, with None at the positions of offloaded tensors."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return versions_of(tensor for tensor in self._stayed if tensor is not None)

    def restore(self) -> Sequence[Tensor]:
        restored = iter(self._restore())
        # Autograd does not check plain references for in-place writes, so compare versions here.
        if self._versions_now() != self._versions:
            raise RuntimeError(WRITTEN_TO)
        return [next(restored) if tensor is None else tensor for tensor in self._stayed]


def layouts_of(tensors: Sequence[Tensor]) -> tuple[list[HostLayout], int]:
    """Return the layout of each tensor in one block, and the bytes that the block needs."""
    layouts, begin = [], 0
    for tensor in tensors:
        # Copy views with their strides, including gaps. Kernels of the backward pass then read the
        # memory layout for which they were compiled or tuned.
        span = span_of(tensor)
        lead = int(tensor.storage_offset()) % (_DEVICE_ALIGNMENT // tensor.itemsize)
        layouts.append(HostLayout(tensor.shape, tensor.stride(), tensor.dtype, span, begin, lead))
        begin += -(-layouts[-1].num_bytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
    return layouts, begin
