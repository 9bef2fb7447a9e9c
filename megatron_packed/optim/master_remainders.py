"""Float32 masters stored as the bf16 weight and a 16-bit remainder.

The weight is the master rounded half up: the upper 16 bits of ``bits + 0x8000``, with the float32
read as an integer. The remainder is the difference, a signed 16-bit number, so weight and remainder
together hold all 32 bits. Of all ways to round to nearest only half up leaves 16 bits for the rest:
ties to even would need one more bit to tell on which side of a tie the master lies.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
