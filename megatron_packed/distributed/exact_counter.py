"""Integer counters that survive a float32 all-reduce exactly."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMB_BITS = 10
_LIMB_MASK = (1 << _LIMB_BITS) - 1
LIMBS = 2


class ExactCounter:
    """Counts of a step, held as two float32 limbs each in the gradient buffer's extra slots.

    float32 counts without gaps only up to 2**24 = 16.8 M, which a large global batch passes. A
    count c is kept as ``1024 * high + low`` with ``0 <= low < 1024``. Sums of limbs over ranks stay
    below 2**24, so the result is exact in any order of summation, for up to 2**14 = 16,384 ranks
    and totals up to 2**34 = 17.2 G per counter.

    Args:
        limbs: ``(2 * size,)`` float32 view: all high limbs, then all low limbs.
    """

    def __init__(self, limbs: Tensor) -> None:
        # `chunk` of an empty tensor returns one part, not two.
        self._high, self._low = limbs.chunk(LIMBS) if limbs.numel() else (limbs, limbs)

    def add_(self, counts: Tensor) -> None:
        """Add ``(size,)`` counts (any dtype holding integers). Device work only; call before the
        all-reduce.
        """
        # Carried over right away, so that low limbs of 16,384 ranks still sum below 2**24.
        total = self.value() + counts.reshape(-1).to(torch.int64)
        self._high.copy_(total >> _LIMB_BITS)
        self._low.copy_(total & _LIMB_MASK)

    def value(self) -> Tensor:
        """``(size,)`` int64 on the device: this rank's counts, after the all-reduce those of all
        ranks.
        """
        return (self._high.to(torch.int64) << _LIMB_BITS) + self._low.to(torch.int64)
