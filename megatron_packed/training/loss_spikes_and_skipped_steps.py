"""Steps that were not taken and loss spikes: the reason in a word for the log, and in a sentence
for the console.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.reporting.curves import NO_TARGETS, NON_FINITE, SPIKE
from megatron_packed.training.checkpoint_metadata import RunProgress
from megatron_packed.training.metrics_layout import StepValues


def skip_reason(values: StepValues, training: TrainingConfig) -> str | None:
    """Return why the update of a step was not applied; None for a step that was taken."""
    # Before the others: a median says nothing about a loss that is no number.
    if values.nonfinite:
        return NON_FINITE
    if values.no_targets:
        return NO_TARGETS
    return SPIKE if values.spikes and training.loss_spike_policy == "skip" else None


def count_incidents(progress: RunProgress, values: StepValues, training: TrainingConfig) -> None:
    """Add a finished step to the counts that checkpoints keep."""
    reason = skip_reason(values, training)
    progress.skipped_steps += reason == NON_FINITE
    progress.steps_without_targets += reason == NO_TARGETS
    progress.spikes += bool(values.spikes)
    progress.skipped_spikes += reason == SPIKE


def sentences(
    iteration: int,
    values: StepValues,
    progress: RunProgress,
    training: TrainingConfig,
    ranks_per_pack: int,
) -> Iterator[str]:
    """Yield a warning for each thing that went wrong in a finished step.

    Args:
        progress: with this step in its counts.
        training: the policies.
        ranks_per_pack: ranks that share a pack.
    """
    reason = skip_reason(values, training)
    if reason == NON_FINITE:
        places = bad_places(values.bad_micro_batches, ranks_per_pack)
        what = f"loss or gradient in {', '.join(places)}" if places else "gradient norm"
        yield (
            f"step {iteration} had a non-finite {what}; its update was not applied, weights and moments are those of "
            "the step before."
        )
    elif reason == NO_TARGETS:
        yield (
            f"step {iteration} had no target tokens: not taken, weights and moments are those of the step before "
            f"({progress.steps_without_targets:,} so far)."
        )
    if values.spikes:
        found = " and ".join(
            _spike(values, name, median, training) for name, median in values.spikes
        )
        done = "its update was applied; --loss-spike-policy skip would leave such updates out"
        if reason == SPIKE:
            done = "its update was not applied, weights and moments are those of the step before"
        yield f"step {iteration} is a spike: {found}; {done} ({progress.spikes:,} so far)."


def _spike(values: StepValues, name: str, median: float, training: TrainingConfig) -> str:
    """Return what was compared with what: ``loss 12.5 is 5.0 times its running median 2.5
    (--loss-spike-factor 3)``.
    """
    value, factor = getattr(values, name), getattr(training, f"{name}_spike_factor")
    words, flag = (
        name.replace("grad_norm", "gradient norm"),
        f"--{name.replace('_', '-')}-spike-factor",
    )
    return f"{words} {value:.4g} is {value / median:.3g} times its running median {median:.4g} ({flag} {factor:g})"


def bad_places(bad_micro_batches: Mapping[int, int], ranks_per_pack: int) -> list[str]:
    """Return where non-finite values were seen first, in words; ranks that share a pack are one
    place.

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
