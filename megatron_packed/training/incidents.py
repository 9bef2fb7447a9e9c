"""Steps that were not taken: the reason, in one word for the log and in a sentence for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_packed.training.curves import NO_TARGETS, NON_FINITE
from megatron_packed.training.state import Progress
from megatron_packed.training.train_step import StepValues


def skip_reason(values: StepValues) -> str | None:
    """Return why the update of a step was not applied; None for a step that was taken."""
    if values.nonfinite:
        return NON_FINITE
    return NO_TARGETS if values.no_targets else None


def count_incidents(progress: Progress, values: StepValues) -> None:
    """Add a finished step to the counts that checkpoints keep."""
    reason = skip_reason(values)
    progress.skipped_steps += reason == NON_FINITE
    progress.steps_without_targets += reason == NO_TARGETS


def sentences(iteration: int, values: StepValues, progress: Progress, ranks_per_pack: int) -> Iterator[str]:
    """Yield a warning for each thing that went wrong in a finished step.

    Args:
        progress: with this step in its counts.
        ranks_per_pack: ranks that share a pack.
    """
    reason = skip_reason(values)
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


def bad_places(bad_micro_batches: Mapping[int, int], ranks_per_pack: int) -> list[str]:
    """Where non-finite values were seen first, in words: the ranks that share a pack are one place.

    Example:
        ``{2: 1, 3: 0}`` with 2 ranks per pack: ``["micro-batch 0 of ranks 2 to 3"]``.
    """
    first: dict[int, int] = {}
    for rank, number in bad_micro_batches.items():
        place = rank // ranks_per_pack * ranks_per_pack
        first[place] = min(number, first.get(place, number))
    last = ranks_per_pack - 1
    ranks = {place: f"ranks {place} to {place + last}" if last else f"rank {place}" for place in first}
    return [f"micro-batch {number} of {ranks[place]}" for place, number in first.items()]
