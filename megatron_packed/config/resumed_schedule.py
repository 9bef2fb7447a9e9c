"""Learning-rate schedule of a checkpoint, for ``--use-checkpoint-opt_param-scheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.optim import (
    DECAY,
    ENDS_WITH_RUN,
    RATE,
    SAMPLE_UNITS,
    OptimizerConfig,
)
from megatron_packed.config.serialise import as_given

_SCHEDULE = tuple(
    about for about in section_fields(OptimizerConfig) if about.option.group in (RATE, DECAY)
)


def takes_schedule(config: RunConfig) -> bool:
    """Return whether the run continues the schedule of the checkpoint that it resumes."""
    options = config.checkpoint
    return (
        options.use_checkpoint_opt_param_scheduler
        and options.load is not None
        and options.load_optim
        and not options.finetune
    )


def stored_schedule(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schedule options in the configuration of a checkpoint.

    A change that ended with the checkpoint's run gets that run's length. In a checkpoint from before
    there was a rise of the weight decay, the weight decay is constant.
    """
    optim, training = stored["optim"], stored["training"]
    schedule = {
        about.name: optim.get(about.name, about.default)
        for about in _SCHEDULE
        if about.name in optim or about.option.group == DECAY
    }
    samples = training.get("train_samples")
    for iters in ENDS_WITH_RUN:
        constant = iters == "weight_decay_incr_iters" and (
            schedule["weight_decay_incr_style"] == "constant"
        )
        if not constant and not schedule.get(iters) and not schedule.get(SAMPLE_UNITS[iters]):
            schedule[SAMPLE_UNITS[iters]] = samples
            schedule[iters] = training["train_iters"] if samples is None else None
    return schedule


def schedule_as_stored(
    config: RunConfig, stored: Mapping[str, Mapping[str, Any]]
) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the schedule of a checkpoint, and texts of the overridden
    options such as ``--lr 0.1 instead of 0.2``.

    Raises:
        ConfigError: the schedule does not fit the other options.
    """
    schedule, changed = stored_schedule(stored), []
    for about in _SCHEDULE:
        now = getattr(config.optim, about.name)
        then = schedule.get(about.name, now)
        if then != now:
            given = f" instead of {as_given(about, now)}" * (now is not None)
            changed.append(f"{about.flag} {as_given(about, then)}{given}")
    return replace(config, optim=replace(config.optim, **schedule)), changed
