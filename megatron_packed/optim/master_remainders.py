"""Float32 masters stored as the bf16 weight and a 16-bit remainder.

The weight is the master rounded half up: the upper 16 bits of ``bits + 0x8000``, with the float32
read as an integer. The remainder is the difference, a signed 16-bit number, so weight and remainder
together hold all 32 bits. Rounding ties to even would need one more bit: without it, the pair does
not tell on which side of the weight a tie is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 24
"""Most masters that exist in float32 at a time when they are read: 64 MiB."""


def split_masters(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 weights and the int16 remainders of finite float32 masters of any shape."""
    bits = masters.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    weights = upper.to(torch.int16).view(torch.bfloat16)
    return weights, (bits - (upper << 16)).to(torch.int16)


def join_masters(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 masters of bf16 weights and their int16 remainders."""
    upper = weights.view(torch.int16).to(torch.int32)
    return ((upper << 16) + remainders).view(torch.float32)


class MasterPair(NamedTuple):
    """Masters of bf16 weights: 1-D tensors of equal lengths that share no memory."""

    weights: Tensor
    remainders: Tensor

    def numel(self) -> int:
        return self.weights.numel()

    def part(self, start: int, end: int) -> MasterPair:
        """Return masters ``[start, end)``, in the same memory."""
        return MasterPair(self.weights[start:end], self.remainders[start:end])

    def values(self, start: int = 0, end: int | None = None) -> Tensor:
        """Return masters ``[start, end)`` as a new float32 tensor."""
        return join_masters(*self.part(start, self.numel() if end is None else end))

    def set(self, masters: Tensor) -> None:
        """Write float32 masters, and with them the weights."""
        for start in range(0, self.numel(), BLOCK_ELEMENTS):
            end = start + BLOCK_ELEMENTS
            for target, half in zip(self.part(start, end), split_masters(masters[start:end])):
                target.copy_(half)


Masters = Tensor | MasterPair
"""Masters of a range of elements: float32 or float64 values, or bf16 weights with remainders."""


def blocks(masters: Masters) -> Iterator[Tensor]:
    """Yield masters as tensors, in order; those of a pair in blocks, so that they need little memory."""
    if isinstance(masters, Tensor):
        yield masters
        return
    for start in range(0, masters.numel(), BLOCK_ELEMENTS):
        yield masters.values(start, min(start + BLOCK_ELEMENTS, masters.numel()))
