"""Statistics that a step reports on request: zeros in the gradients, norm of the parameters.

Computed on the device, at the end of the step: sums of this rank, and one all-reduce of as many
numbers as are asked for. As in Megatron-LM, gradients are those after the sum over ranks, and
parameters those after the update: the float32 masters where weights are bf16.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.optim.clipping import Counted, nonzeros, share, square

ZEROS_UNIT = 1 << 24
"""float32 counts without gaps up to here; more zeros are counted in these and single ones."""


class Statistics:
    """Statistics of each step, at fixed addresses; nothing is computed that is not asked for.

    Args:
        gradients, masters: what this rank owns.
        elements: of all gradients of the model, each once; None: zeros are not counted. What pads a
            buffer is zero, and no element.
        params_norm: whether the norm of the parameters is wanted.
        group: ranks that together hold all of both.
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
        """Gradients that are exactly zero: how many times `ZEROS_UNIT`, and how many more."""

    def before_update(self) -> None:
        """Counts in the gradients of this rank, which the update may change."""
        self._shares = [] if self._elements is None else [share(nonzeros, self._gradients)]

    def after_update(self) -> None:
        """Sums over ranks, into `params_norm` and `grad_zeros`."""
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
