"""Schedule of the weight decay, computed on the host by Megatron's formulas.

Steps are counted as in ``lr_schedule.py``: ``at(k)`` is the weight decay of the optimizer step that
follows k finished steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay that rises from ``start`` to ``end``, or is always ``end``."""

    start: float
    """Weight decay of the first step (not used by ``constant``)."""
    end: float
    """Weight decay at step ``incr_steps`` and after it."""
    incr_style: str = "constant"
    """``constant``, ``linear`` or ``cosine``."""
    incr_steps: float
    """Step at which ``end`` is reached; may have a fraction, from lengths in samples."""
    ahead: float = 0.0
    """Steps that are added to the number of finished steps, as in ``Schedule``."""

    @classmethod
    def from_config(cls, run: RunConfig, ahead: int = 0) -> WeightDecaySchedule:
        """Return the schedule of a run; by default the decay rises over the whole training.

        Args:
            run: configuration of the run.
            ahead: samples that `Schedule.from_config` describes.
        """
        config = run.optim
        start, end = config.start_weight_decay, config.end_weight_decay
        if not config.weight_decay_changes:
            start = end = config.weight_decay
        assert start is not None and end is not None, "OptimizerConfig requires both"
        return cls(
            start=start,
            end=end,
            incr_style=config.weight_decay_incr_style,
            incr_steps=run.weight_decay_incr_iters,
            ahead=run.full_batches(ahead) if run.schedule_units == {"samples"} else 0.0,
        )

    @property
    def changes(self) -> bool:
        """Return whether the weight decay depends on the step."""
        return self.incr_style != "constant"

    def at(self, step: float) -> float:
        """Return the weight decay of the step that follows ``step`` finished steps.

        After smaller steps, the number may have a fraction (`PackPlan.full_steps_before`).
        """
        ratio = (step + self.ahead) / self.incr_steps
        if not self.changes or ratio > 1:
            return self.end
        if self.incr_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start + ratio * (self.end - self.start)
