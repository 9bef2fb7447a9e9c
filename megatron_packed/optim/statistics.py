"""Optional statistics of a step: number of zero gradients, and norm of the parameters.

They are computed on the device at the end of the step: sums of this rank, then one all-reduce of one
number per requested statistic. As in Megatron-LM, gradients are taken after the sum over ranks, and
parameters after the update. For bf16 weights, the float32 masters are used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.optim.clipping import ZEROS_UNIT, Counted, nonzeros, share, square


class Statistics:
    """Statistics of each step, at fixed addresses; only requested statistics are computed.

    Args:
        gradients, masters: tensors that this rank owns.
        elements: number of gradient elements of the whole model; None does not count zeros. Padding
            of a buffer is zero, but is no element.
        params_norm: compute the norm of the parameters.
        group: ranks that together hold all gradients and masters.
        device: device of the results.
    """

    def __init__(
        self,
        gradients: Counted,
        masters: Counted,
        *,
        elements: int | None,
        params_norm: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._gradients = gradients
        self._masters = masters
        self._group = group
        self._elements = elements
        self._of_params = params_norm
        self._shares: list[Tensor] = []
        self.params_norm = torch.zeros((), dtype=torch.float32, device=device)
        """L2 norm of all parameters after the step."""
        self.grad_zeros = torch.zeros(2, dtype=torch.float32, device=device)
        """Number of gradient elements that are exactly zero: multiples of `ZEROS_UNIT`, remainder."""

    def before_update(self) -> None:
        """Count zeros in this rank's gradients, before the update, which may change gradients."""
        self._shares = [] if self._elements is None else [share(nonzeros, self._gradients)]

    def after_update(self) -> None:
        """Sum over ranks, and write the results to `params_norm` and `grad_zeros`."""
        if self._of_params:
            self._shares.append(share(square, self._masters))
        if not self._shares:
            return
        sums = list(all_reduce_sum(torch.stack(self._shares), self._group).unbind())
        if self._of_params:
            self.params_norm.copy_(sums.pop().sqrt())
        if self._elements is not None:
            zeros = self._elements - sums.pop().round()
            units = (zeros / ZEROS_UNIT).floor()
            self.grad_zeros.copy_(torch.stack([units, zeros - units * ZEROS_UNIT]))
        self._shares = []
