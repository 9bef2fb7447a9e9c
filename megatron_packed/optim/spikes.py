"""Loss spikes: a loss or gradient norm far above its running median, found on the device.

[Note: spikes]
The detector keeps the loss and the gradient norm of the last ``window`` steps, oldest first, at
fixed addresses. A step is compared with their medians before its own values enter, and only once
half of the window is filled. Nothing is read by the host, so the comparison is part of a captured
``finish``.

Values of a spike enter the window too, skipped or not. One spike hardly moves a median. A lasting
new level takes the median over after at most half a window of steps, so ``skip`` cannot stop a run
for ever. Steps without an observation (non-finite, held, without targets) leave the window alone.

All ranks must take the same decision. Data-parallel ranks hold the bits of one sum. Tensor-parallel
ranks have summed the same numbers in groups of their own, perhaps in another order: ``group`` makes
their values one by a maximum.
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
"""The values that are watched, in their order in every tensor here."""


class SpikeDetector:
    """Running medians of loss and gradient norm, and the decision whether a step is a spike.

    Reads: [Note: spikes].

    Args:
        window: steps that the medians are taken over.
        factors: a value is a spike above its median times this; of the loss and of the gradient
        norm.
        skip: a step that is a spike is not applied.
        device: of the window.
        group: ranks whose values may differ in their last bits and must decide alike; None if there
            are none.
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
        """``(2, window)``, oldest first; infinite where there is no value yet."""
        self.medians = torch.zeros(len(WATCHED), dtype=torch.float32, device=device)
        """Medians that the spikes of the last step were compared with; 0 for a value that was no
        spike.
        """

    @classmethod
    def from_config(
        cls, config: TrainingConfig, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> SpikeDetector | None:
        """Return the detector of ``--loss-spike-policy``; None if that is off."""
        if config.loss_spike_policy == "off":
            return None
        skip = config.loss_spike_policy == "skip"
        return cls(
            window=config.loss_spike_window,
            factors=(config.loss_spike_factor, config.grad_norm_spike_factor),
            skip=skip,
            device=device,
            group=group if skip else None,  # a warning comes from rank 0 alone
        )

    @torch.no_grad()
    def observe(self, loss: Tensor, grad_norm: Tensor, skip: Tensor) -> Tensor:
        """Compare a step with those before it, and let its values enter the window; nothing waits
        for the device.

        Args:
            loss, grad_norm: of the step, one element each.
            skip: 0-d float32, above 0 for a step that is skipped for another reason and is no
            observation.
        Returns:
            0-d float32: ``skip``, or 1 for a spike under the policy ``skip``.
        """
        values = all_reduce_max(
            torch.cat([loss.reshape(1), grad_norm.reshape(1)]).to(torch.float32), self._group
        )
        observed = skip == 0
        known = (self.recent[0] < math.inf).sum()
        middle = ((known - 1) // 2).clamp(min=0)
        medians = self.recent.sort(dim=1).values.index_select(1, middle.view(1)).view(-1)
        spikes = (
            (values > self._factors * medians) & (medians > 0) & (known >= self._needed) & observed
        )
        self.medians.copy_(medians.masked_fill(~spikes, 0.0))
        entered = torch.cat([self.recent[:, 1:], values.view(-1, 1)], dim=1)
        self.recent.copy_(torch.where(observed, entered, self.recent))
        return skip.maximum(spikes.any().to(torch.float32)) if self.skip else skip

    def state(self) -> dict[str, list[float]]:
        """Return the values in the window, oldest first, by name; waits for the device."""
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
