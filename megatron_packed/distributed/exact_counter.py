"""Integer counters that remain exact in a float32 all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMB_BITS = 10
_LIMB_MASK = (1 << _LIMB_BITS) - 1
LIMBS = 2


class ExactCounter:
    """Counters of a step, each stored as two float32 limbs in the gradient buffer's extra slots.

    float32 represents every integer only up to 2**24 = 16.8 M, and counts of a large global batch
    are larger. So a count c is stored as ``1024 * high + low`` with ``0 <= low < 1024``. Sums of
    limbs over ranks stay below 2**24, so they are exact in any order of summation. This holds for
    up to 2**14 = 16,384 ranks and totals up to 2**34 = 17.2 G per counter.

    Args:
        limbs: ``(2 * size,)`` float32 view: all high limbs, then all low limbs.
    """

    def __init__(self, limbs: Tensor) -> None:
        # `chunk` of an empty tensor returns one chunk, not two.
        self._high, self._low = limbs.chunk(LIMBS) if limbs.numel() else (limbs, limbs)

    def add_(self, counts: Tensor) -> None:
        """Add ``(size,)`` counts, which are integers of any dtype; call before the all-reduce.

        The call queues device work only.
        """
        self._set(self.value() + counts.reshape(-1).to(torch.int64))

    def maximum_(self, counts: Tensor) -> None:
        """Raise the counts to ``(size,)`` others where those are larger; see `add_`."""
        self._set(torch.maximum(self.value(), counts.reshape(-1).to(torch.int64)))

    def value(self) -> Tensor:
        """Return the counts as a ``(size,)`` int64 tensor on the device.

        Before the all-reduce these are the counts of this rank, afterwards the sums over all ranks.
        """
        return (self._high.to(torch.int64) << _LIMB_BITS) + self._low.to(torch.int64)

    def _set(self, total: Tensor) -> None:
        # Move the carry to the high limb now: the low limbs of 16,384 ranks then sum to below 2**24.
        self._high.copy_(total >> _LIMB_BITS)
        self._low.copy_(total & _LIMB_MASK)
