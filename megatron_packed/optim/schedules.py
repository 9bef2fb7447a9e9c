"""Schedules of learning rate and weight decay, computed on the host by Megatron's formulas.

Steps are counted from 0: ``at(k)`` is the value of the optimizer step that follows k finished steps.
So with a warm-up, the first step runs at ``warmup_init``, as in Megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

DECAY_STYLES = ("constant", "linear", "cosine", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to ``lr``, then a decay to ``min_lr``.

    Raises:
        ValueError: the values contradict each other.
    """

    lr: float
    """Highest rate."""
    min_lr: float = 0.0
    """Rate at the end of the decay and after it (not used by ``constant``)."""
    decay_style: str = "linear"
    """One of ``DECAY_STYLES``. WSD: warm-up, stable at ``lr``, decay in the last
    ``wsd_decay_steps``.
    """
    decay_steps: float
    """Step at which ``min_lr`` is reached; the warm-up is included."""
    warmup_steps: float = 0.0
    """Steps of the warm-up. Numbers of steps may have fractions, which come from
    ``lr_warmup_fraction`` and from lengths in samples.
    """
    warmup_init: float = 0.0
    """Rate of step 0 if there is a warm-up."""
    wsd_decay_steps: float | None = None
    """Steps of the final decay of WSD. If it begins during the warm-up, or before step 0, the rate
    drops to the decay's value after the warm-up.
    """
    wsd_decay_style: str = "exponential"
    """One of ``WSD_DECAY_STYLES``."""
    ahead: float = 0.0
    """Steps that are added to the number of finished steps.

    This offset corrects for steps with another batch size, if the lengths of the schedule are in
    samples.
    """

    def __post_init__(self) -> None:
        if self.decay_style not in DECAY_STYLES:
            raise ValueError(
                f"lr_decay_style {self.decay_style!r} is unknown; choose one of {', '.join(DECAY_STYLES)}."
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) must be between 0 and lr ({self.lr}).")
        if not 0 <= self.warmup_init <= self.lr:
            raise ValueError(
                f"lr_warmup_init ({self.warmup_init}) must be between 0 and lr ({self.lr})."
            )
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ValueError(
                f"the warm-up ({self.warmup_steps} steps) must end before the decay does ({self.decay_steps} steps); "
                "lower lr_warmup_iters or raise lr_decay_iters."
            )
        if self.decay_style == "WSD":
            if self.wsd_decay_style not in WSD_DECAY_STYLES:
                choices = ", ".join(WSD_DECAY_STYLES)
                raise ValueError(
                    f"lr_wsd_decay_style {self.wsd_decay_style!r} is unknown; choose one of {choices}."
                )
            if self.wsd_decay_steps is None or self.wsd_decay_steps <= 0:
                raise ValueError(
                    f"lr_wsd_decay_iters ({self.wsd_decay_steps}) must be above 0 for lr_decay_style WSD."
                )

    @classmethod
    def from_config(cls, run: RunConfig, ahead: int = 0) -> Schedule:
        """Return the schedule of a run, with Megatron's defaults.

        By default the decay covers the whole training. A warm-up fraction is a fraction of the
        decay's steps.

        Args:
            run: configuration of the run.
            ahead: samples trained on so far, minus ``global_batch_size`` for each finished step.
                This number is 0 unless the batch size has changed. The schedule uses it only if
                lengths are in samples.
        """
        config = run.optim
        return cls(
            lr=config.lr,
            min_lr=config.min_lr,
            decay_style=config.lr_decay_style,
            decay_steps=run.decay_iters,
            warmup_steps=run.warmup_iters,
            warmup_init=config.lr_warmup_init,
            wsd_decay_steps=run.wsd_decay_iters,
            wsd_decay_style=config.lr_wsd_decay_style,
            ahead=run.full_batches(ahead) if run.schedule_units == {"samples"} else 0.0,
        )

    def at(self, step: float) -> float:
        """Return the learning rate of the step that follows ``step`` finished steps.

        After smaller steps, the number may have a fraction (`PackPlan.full_steps_before`).
        """
        return self._rate(step + self.ahead)

    def _rate(self, step: float) -> float:
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.warmup_init + (self.lr - self.warmup_init) * step / self.warmup_steps
        if self.decay_style == "constant":
            return self.lr
        if step > self.decay_steps:
            return self.min_lr
        return self.min_lr + self._coefficient(step) * (self.lr - self.min_lr)

    def _coefficient(self, step: float) -> float:
        if self.decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            into_decay = step - (self.decay_steps - self.wsd_decay_steps)
            return (
                1.0
                if into_decay <= 0
                else _fall(self.wsd_decay_style, into_decay / self.wsd_decay_steps)
            )
        return _fall(
            self.decay_style, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        )


def _fall(style: str, ratio: float) -> float:
    """Return a coefficient that falls from 1 at ``ratio`` 0 to 0 at ``ratio`` 1."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt"
    return 1.0 - math.sqrt(ratio)


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
