"""Warnings about losses while a run trains: skipped steps, spikes, validations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_packed.config import flag_names as flags

if TYPE_CHECKING:  # a page of a log needs no torch
    from megatron_packed.checkpoint.run_metadata import RunProgress
    from megatron_packed.config.sections.training import TrainingConfig
    from megatron_packed.models.metrics_layout import StepValues

NON_FINITE, NO_TARGETS, SPIKE = "non-finite", "no targets", "spike"
"""Values of ``skip_reason`` in a log: reasons why the update of a step was not applied."""
RISE = 1.02
"""Validation loss divided by the best earlier one, from which a rise is reported."""


def step_warnings(
    iteration: int,
    values: StepValues,
    reason: str | None,
    progress: RunProgress,
    training: TrainingConfig,
    ranks_per_pack: int,
) -> Iterator[str]:
    """Yield a warning for each problem of a finished step.

    Args:
        iteration: number of the step.
        values: metrics of the step.
        reason: reason why its update was not applied; None if it was applied.
        progress: counts of the run, this step included.
        training: options with the policies.
        ranks_per_pack: number of ranks that share a pack.
    """
    if reason == NON_FINITE:
        places = bad_places(values.bad_micro_batches, ranks_per_pack)
        what = f"loss or gradient in {', '.join(places)}" if places else "gradient norm"
        yield (
            f"step {iteration} had a non-finite {what}; its update was not applied, weights and moments are "
            "unchanged."
        )
    elif reason == NO_TARGETS:
        yield (
            f"step {iteration} had no target tokens; its update was not applied, weights and moments are unchanged "
            f"(such steps so far: {progress.steps_without_targets:,})."
        )
    if values.spikes:
        values_of_spikes = " and ".join(
            _spike(values, name, median, training) for name, median in values.spikes
        )
        done = f"its update was applied; {flags.LOSS_SPIKE_POLICY} skip would skip such updates"
        if reason == SPIKE:
            done = "its update was not applied, weights and moments are unchanged"
        yield f"step {iteration} is a spike: {values_of_spikes}; {done} (spikes so far: {progress.spikes:,})."


def _spike(values: StepValues, name: str, median: float, training: TrainingConfig) -> str:
    """Return the comparison of a value with its running median, in words.

    Example:
        ``loss 12.5 is 5 times its running median 2.5 (--loss-spike-factor 3)``.
    """
    value, factor = getattr(values, name), getattr(training, f"{name}_spike_factor")
    quantity, flag = (
        name.replace("grad_norm", "gradient norm"),
        f"--{name.replace('_', '-')}-spike-factor",
    )
    return f"{quantity} {value:.4g} is {value / median:.3g} times its running median {median:.4g} ({flag} {factor:g})"


def bad_places(bad_micro_batches: Mapping[int, int], ranks_per_pack: int) -> list[str]:
    """Return, in words, the first micro-batch with a non-finite value for each pack.

    Args:
        bad_micro_batches: rank -> number of its first bad micro-batch.
        ranks_per_pack: number of ranks that share a pack; they are reported together.
    Example:
        ``{2: 1, 3: 0}`` with 2 ranks per pack: ``["micro-batch 0 of ranks 2 to 3"]``.
    """
    first: dict[int, int] = {}
    for rank, number in bad_micro_batches.items():
        place = rank // ranks_per_pack * ranks_per_pack
        first[place] = min(number, first.get(place, number))
    last = ranks_per_pack - 1
    ranks = {
        place: f"ranks {place} to {place + last}" if last else f"rank {place}" for place in first
    }
    return [f"micro-batch {number} of {ranks[place]}" for place, number in first.items()]


def rising_validation(losses: Sequence[tuple[int, float]]) -> str:
    """Return a warning if the validation loss rises after its best value; empty otherwise.

    Args:
        losses: (step, loss) of all validations, in order.
    """
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    lowest = best_validation(losses)
    if lowest is None:
        return ""
    best_step, best = lowest
    after = [loss for step, loss in finite if step > best_step]
    # A single higher value may be noise.
    if len(after) < 2 or min(after[-2:]) < RISE * best:
        return ""
    step, last = finite[-1]
    return (
        f"The validation loss rises: it was best at step {best_step:,} ({best:.4f}) and is {last:.4f} at step "
        f"{step:,}. The model begins to memorise the training data; use the checkpoint of step {best_step:,}, train "
        "for fewer steps, or add data."
    )


def zero_loss(step: int) -> str:
    """Return the warning about the first applied step with a loss of exactly zero."""
    return (
        f"The loss of step {step:,} is exactly 0, so the step taught nothing. Check the targets of the data with "
        "megatron-packed packing."
    )


def validation_without_loss(step: int, has_targets: bool) -> str:
    """Return the warning about a validation whose loss is not finite."""
    if not has_targets:
        return (
            f"The validation at step {step:,} had no target tokens. Give validation data whose documents keep "
            f"targets, for example with a larger {flags.SEQ_LENGTH}."
        )
    return f"The validation loss at step {step:,} is not finite. Use an earlier checkpoint and a lower {flags.LR}."


def best_validation(losses: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """Return (step, loss) of the lowest finite loss; None without one."""
    finite = [step_and_loss for step_and_loss in losses if math.isfinite(step_and_loss[1])]
    return min(finite, key=lambda step_and_loss: step_and_loss[1], default=None)
