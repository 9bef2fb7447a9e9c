"""Reasons for the log and warnings for the console, about skipped steps and loss spikes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.reporting.curves import NO_TARGETS, NON_FINITE, SPIKE


def skip_reason(values: StepValues, training: TrainingConfig) -> str | None:
    """Return the reason why the update of a step was not applied; None if it was applied."""
    # Checked first: a non-finite loss cannot be compared with a median.
    if values.nonfinite:
        return NON_FINITE
    if values.no_targets:
        return NO_TARGETS
    return SPIKE if values.spikes and training.loss_spike_policy == "skip" else None


def count_incidents(progress: RunProgress, values: StepValues, training: TrainingConfig) -> None:
    """Add a finished step to the counts of skipped steps and spikes that checkpoints store."""
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
    """Yield a warning for each problem of a finished step.

    Args:
        iteration: number of the step.
        values: metrics of the step.
        progress: counts of the run, this step included.
        training: options with the policies.
        ranks_per_pack: number of ranks that share a pack.
    """
    reason = skip_reason(values, training)
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
