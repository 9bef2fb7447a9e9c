"""Sums of bf16 tensors over ranks that are added in float32 and rounded once.

[Note: sums that are rounded once]
A reduce-scatter of bf16 tensors rounds after each addition, and the order of the additions depends on
the algorithm that the library chooses. Here each rank sends the share of rank r to rank r (one
all-to-all, which moves as many bytes as a reduce-scatter). Each rank then adds the parts of all ranks
in float32, in the order of the ranks, and rounds the sum to bf16. So the result has the same bits
whatever arrives first. If every rank needs the whole sum, an all-gather of the shares follows. The
parts need a second buffer of the same size until they are added.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.distributed.collectives import (
    Started,
    all_gather_in_place,
    exchanges,
    own_rows,
    start_exchange,
    wait_for,
)

MOST_UNDER_WAY = 2
"""Number of these sums that overlap with the backward pass and may have a second buffer."""


class RoundedOnceSum:
    """Sum of ``flat`` ``(T,)`` over a group that is under way.

    Args:
        flat: bf16 tensor, which `wait` overwrites.
        group: ranks of the sum.
        own_share: write only this rank's ``T / size`` elements; the others are then undefined. T must
            be a multiple of the group's size.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, *, own_share: bool) -> None:
        self._flat = flat
        self._group = group
        self._own_share = own_share
        missing = -flat.numel() % group.size()
        self._sent = pad(flat, (0, missing)) if missing else flat
        self._received, self._started = start_exchange(self._sent, group)
        self._done = False

    def wait(self) -> None:
        """Make the current stream wait for the parts, and add them; later calls do nothing."""
        if self._done:
            return
        self._done = True
        wait_for(self._started)
        parts_RS = self._received.view(self._group.size(), -1)
        own_rows(self._sent, self._group).copy_(parts_RS.sum(0, dtype=torch.float32))
        if not self._own_share:
            all_gather_in_place(self._sent, self._group)
            if self._sent is not self._flat:
                self._flat.copy_(self._sent[: self._flat.numel()])
        del self._received, self._sent


def start_rounded_once(
    flat: Tensor, group: dist.ProcessGroup | None, *, own_share: bool
) -> Started | None:
    """Start a `RoundedOnceSum`; ``wait_for`` its result before ``flat`` is read or written again."""
    if not exchanges(group, "all_to_all", flat, overlaps=True):
        return None
    return Started(RoundedOnceSum(flat, group, own_share=own_share), "all_to_all_single", group)
