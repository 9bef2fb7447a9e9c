"""Several tensors in one byte buffer, so that one copy moves all of them to the device.

A layout depends only on shapes and dtypes. So tensors have the same offsets in two buffers with
equal layouts. Copying the bytes of one buffer over the other updates every tensor at its address,
as replays of CUDA graphs need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of every section in bytes, for vectorised loads."""


@dataclass(frozen=True, kw_only=True)
class BufferSection:
    """Name, dtype, shape and position of one tensor in a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte offset, a multiple of `ALIGNMENT`."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Positions of tensors in a byte buffer of ``num_bytes``."""

    sections: tuple[BufferSection, ...]
    num_bytes: int

    @classmethod
    def from_fields(
        cls, fields: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> BufferLayout:
        """Build the layout of tensors ``(name, dtype, shape)``, one after the other."""
        sections: list[BufferSection] = []
        end = 0
        for name, dtype, shape in fields:
            section = BufferSection(name=name, dtype=dtype, shape=shape, start=end)
            sections.append(section)
            end = -(-(end + section.num_bytes) // ALIGNMENT) * ALIGNMENT
        return cls(sections=tuple(sections), num_bytes=end)

    def allocate(self) -> Tensor:
        """Allocate a zeroed buffer on the host, ``(num_bytes,)`` uint8.

        The gaps between sections are zero in every process, so that buffers can be compared byte by
        byte.
        """
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of ``buffer``, by name.

        Raises:
            ValueError: ``buffer`` is not ``(num_bytes,)`` uint8.
        """
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (self.num_bytes,):
            raise ValueError(
                f"this layout needs a uint8 buffer of shape ({self.num_bytes},), got {buffer.dtype} of shape "
                f"{tuple(buffer.shape)}; the buffer was made for another total_tokens or capacity."
            )
        views: dict[str, Tensor] = {}
        for section in self.sections:
            raw = buffer[section.start : section.start + section.num_bytes]
            views[section.name] = raw.view(section.dtype).view(section.shape)
        return views
