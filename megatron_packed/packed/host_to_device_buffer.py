"""Several tensors in one byte buffer, so that they travel to the device in one copy.

A layout is fixed by shapes alone, so the views of two buffers with equal layouts lie at equal
offsets: copying the bytes of one over the other refreshes every tensor at its address (what a CUDA
graph replay needs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Every section starts at a multiple of it, for vectorised loads."""


@dataclass(frozen=True, kw_only=True)
class BufferSection:
    """One tensor of a buffer."""

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
    """Places of tensors in a byte buffer of ``num_bytes``."""

    sections: tuple[BufferSection, ...]
    num_bytes: int

    @classmethod
    def of(cls, fields: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> BufferLayout:
        """Lay ``(name, dtype, shape)`` out one after the other."""
        sections: list[BufferSection] = []
        end = 0
        for name, dtype, shape in fields:
            section = BufferSection(name=name, dtype=dtype, shape=shape, start=end)
            sections.append(section)
            end = _round_up(end + section.num_bytes)
        return cls(sections=tuple(sections), num_bytes=end)

    def allocate(self) -> Tensor:
        """A zeroed buffer on the host, ``(num_bytes,)`` uint8. Zeroed so that the gaps between
        sections are the same in every process and buffers can be compared byte by byte.
        """
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of ``buffer``.

        Raises:
            ValueError: ``buffer`` is not ``(num_bytes,)`` uint8.
        """
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (self.num_bytes,):
            raise ValueError(
                f"a buffer of this layout is uint8 of shape ({self.num_bytes},), got {buffer.dtype} of shape "
                f"{tuple(buffer.shape)}; it was made for another total_tokens or capacity."
            )
        views: dict[str, Tensor] = {}
        for section in self.sections:
            raw = buffer[section.start : section.start + section.num_bytes]
            views[section.name] = raw.view(section.dtype).view(section.shape)
        return views


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
