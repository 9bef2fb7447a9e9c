"""Detection of loss spikes on the device: a loss or gradient norm far above its running median.

[Note: spikes]
The detector stores the loss and the gradient norm of the last ``window`` steps, oldest first, at
fixed addresses. A step is compared with the medians of previous steps, before its own values enter
the window. The comparison starts when half of the window is filled. The host reads nothing, so the
comparison can be part of a captured ``finish``.

Values of a spike enter the window, too, even if the step is skipped. One spike hardly moves a
median. A lasting new level becomes the median after at most half a window of steps, so ``skip``
cannot stop the training for ever. Steps that are skipped for another reason (non-finite, held,
without targets) do not enter the window.

All ranks must take the same decision. Data-parallel ranks hold the same bits of one sum.
Tensor-parallel ranks sum the same numbers in different groups, possibly in another order. A maximum
over ``group`` makes their values equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_reduce_max

if TYPE_CHECKING:
    from megatron_packed.config.sections.training import TrainingConfig

WATCHED = ("loss", "grad_norm")
"""Names of the watched values, in their order in every tensor of this module."""


class SpikeDetector:
    """Detector of loss spikes, with running medians of loss and gradient norm.

    See [Note: spikes].

    Args:
        window: number of steps over which medians are computed.
        factors: a value above its median times its factor is a spike; for loss and gradient norm.
        skip: do not apply a step that is a spike.
        device: device of the window.
        group: ranks whose values may differ in the last bits, but must take the same decision; None
            if there are none.
    """

    def __init__(
        self,
        *,
        window: int,
        factors: Sequence[float],
        skip: bool,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.skip = skip
        self._group = group
        self._needed = -(-window // 2)
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self.recent = torch.full(
            (len(WATCHED), window), math.inf, dtype=torch.float32, device=device
        )
        """``(2, window)``: recent values, oldest first; infinite for slots without a value."""
        self.medians = torch.zeros(len(WATCHED), dtype=torch.float32, device=device)
        """Medians that the last step's spikes exceeded; 0 for a value that was no spike."""

    @classmethod
    def from_config(
        cls, config: TrainingConfig, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> SpikeDetector | None:
        """Return the detector of ``--loss-spike-policy``; None if the policy is off."""
        if config.loss_spike_policy == "off":
            return None
        skip = config.loss_spike_policy == "skip"
        return cls(
            window=config.loss_spike_window,
            factors=(config.loss_spike_factor, config.grad_norm_spike_factor),
            skip=skip,
            device=device,
            group=group if skip else None,  # without skip, only rank 0 uses the result, to warn
        )

    @torch.no_grad()
    def observe(self, loss: Tensor, grad_norm: Tensor, skip: Tensor) -> Tensor:
        """Compare a step with previous steps and add its values to the window, without a host sync.

        Args:
            loss, grad_norm: values of the step, one element each.
            skip: 0-d float32; above 0 for a step that is skipped for another reason. Its values do
                not enter the window.
        Returns:
            0-d float32: ``skip``, or 1 for a spike under the policy ``skip``.
        """
        values = torch.cat([loss.reshape(1), grad_norm.reshape(1)]).to(torch.float32)
        if self._group is not None:
            values = all_reduce_max(values, self._group)
        observed = skip == 0
        num_recent = (self.recent[0] < math.inf).sum()
        middle = ((num_recent - 1) // 2).clamp(min=0)
        medians = self.recent.sort(dim=1).values.index_select(1, middle.view(1)).view(-1)
        spikes = (
            (values > self._factors * medians)
            & (medians > 0)
            & (num_recent >= self._needed)
            & observed
        )
        self.medians.copy_(medians.masked_fill(~spikes, 0.0))
        entered = torch.cat([self.recent[:, 1:], values.view(-1, 1)], dim=1)
        self.recent.copy_(torch.where(observed, entered, self.recent))
        return skip.maximum(spikes.any().to(torch.float32)) if self.skip else skip

    def state(self) -> dict[str, list[float]]:
        """Return name -> values in the window, oldest first; the call waits for the device."""
        return {
            name: [value for value in row if value < math.inf]
            for name, row in zip(WATCHED, self.recent.tolist())
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Fill the window with the newest values of ``state``, as many as it holds."""
        size = self.recent.shape[1]
        rows = [list(state[name])[-size:] for name in WATCHED]
        self.recent.copy_(torch.tensor([[math.inf] * (size - len(row)) + row for row in rows]))
