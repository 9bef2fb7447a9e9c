"""Warnings about a run, found in the records of its log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron_packed.config import flag_names as flags
from megatron_packed.reporting.curves import Record, Run, number_in, numbers_in, steady
from megatron_packed.reporting.loss_warnings import (
    NO_TARGETS,
    NON_FINITE,
    SPIKE,
    rising_validation,
    validation_without_loss,
    zero_loss,
)

LISTED = 5
"""Largest number of steps of one kind that are listed by number."""
_FEW = 0.01
"""Share of documents without a target above which a warning follows."""
_WAIT = 0.1
"""Share of the step time that steps wait for data, from which a warning follows."""


def listed(steps: Sequence[Record]) -> str:
    """Return the count of steps and the first of them: ``12 (7, 9, 30, ...)``; empty for none."""
    if not steps:
        return ""
    numbers = [f"{step['iteration']:,}" for step in steps[:LISTED]]
    return f"{len(steps):,} ({', '.join(numbers)}{', ...' if len(steps) > LISTED else ''})"


def skipped_for(steps: Sequence[Record], reason: str) -> list[Record]:
    """Return the steps that were skipped for a reason.

    Logs of older versions lack the reason; all their skipped steps were non-finite.
    """
    return [s for s in steps if s["skipped"] and s.get("skip_reason", NON_FINITE) == reason]


def spikes_of(steps: Sequence[Record]) -> list[Record]:
    """Return the steps with a spike of the loss or the gradient norm."""
    return [step for step in steps if "loss_median" in step or "grad_norm_median" in step]


def graph_counts(steps: Sequence[Record]) -> tuple[int, int]:
    """Return the numbers of micro-batches that CUDA graphs replayed and that ran eagerly."""
    replays, eager = (sum(numbers_in(steps, f"graph_{name}")) for name in ("replays", "fallbacks"))
    return int(replays), int(eager)


def share_of_waiting(steps: Sequence[Record]) -> float | None:
    """Return the share of the step time that steps wait for data; None if it is not logged."""
    waits = [step for step in steady(steps) if "data_wait_ms" in step]
    if not waits:
        return None
    waited, total = (sum(numbers_in(waits, name)) for name in ("data_wait_ms", "step_time_ms"))
    return waited / max(total, 1e-9)


def warnings_of(run: Run) -> list[str]:
    """Return the warnings about a run as sentences, the most serious first."""
    steps = run.steps
    return [
        *_of_skipped_steps(steps),
        *_of_losses(steps),
        *_of_validations(run),
        *_of_data(run.data),
        *_of_graphs(run),
        *_of_waiting(steps),
    ]


def _of_skipped_steps(steps: Sequence[Record]) -> Iterator[str]:
    if affected_steps := skipped_for(steps, NON_FINITE):
        yield (
            f"Steps with a non-finite loss or gradient: {listed(affected_steps)}. Their updates were not applied. "
            f"Lower {flags.LR}, lengthen the warm-up, or look at the documents of these steps."
        )
    if affected_steps := skipped_for(steps, NO_TARGETS):
        yield (
            f"Steps without target tokens: {listed(affected_steps)}. Their updates were not applied. "
            f"Too few documents keep an answer; a larger {flags.SEQ_LENGTH} keeps more."
        )
    if spikes := spikes_of(steps):
        skipped = skipped_for(steps, SPIKE)
        done = (
            f"{len(skipped):,} of these updates were not applied."
            if skipped
            else (
                f"These updates were applied; {flags.LOSS_SPIKE_POLICY} skip would leave them out."
            )
        )
        yield f"Steps with a spike of the loss or the gradient norm: {listed(spikes)}. {done}"


def _of_losses(steps: Sequence[Record]) -> Iterator[str]:
    zeros = [step for step in steps if step["lm_loss"] == 0 and not step["skipped"]]
    if zeros:
        yield zero_loss(int(number_in(zeros[0], "iteration")))
    losses = [loss for loss in numbers_in(steps, "lm_loss") if math.isfinite(loss)]
    tenth = len(losses) // 10
    if tenth >= 2 and statistics.fmean(losses[-tenth:]) >= statistics.fmean(losses[:tenth]):
        yield (
            "The training loss did not fall: the mean of the last tenth of the steps is "
            f"{statistics.fmean(losses[-tenth:]):.4f}, that of the first tenth {statistics.fmean(losses[:tenth]):.4f}."
        )


def _of_validations(run: Run) -> Iterator[str]:
    for (step, loss), record in zip(run.validation_losses, run.validations):
        if not math.isfinite(loss):
            yield validation_without_loss(step, record.get("valid_target_tokens") != 0)
            break
    if text := rising_validation(run.validation_losses):
        yield text


def _of_data(data: Mapping[str, object]) -> Iterator[str]:
    for name, of in data.items():
        lost = of.get("documents_without_targets", 0) if isinstance(of, dict) else 0
        if lost > _FEW * of["documents_in"]:  # type: ignore[index]
            yield (
                f"{lost:,} of {of['documents_in']:,} {name} documents keep no target, "  # type: ignore[index]
                f"so nothing is learned from them. A larger {flags.SEQ_LENGTH} keeps more."
            )


def _of_graphs(run: Run) -> Iterator[str]:
    replays, eager = graph_counts(run.steps)
    if eager:
        reasons = " The details below have the reasons." if run.end.get("notes") else ""
        yield (
            f"CUDA graphs: {eager:,} of {replays + eager:,} micro-batches ran eagerly, which is slower.{reasons}"
        )


def _of_waiting(steps: Sequence[Record]) -> Iterator[str]:
    share = share_of_waiting(steps) or 0.0
    if share > _WAIT:
        yield f"Steps wait for data for {100 * share:.1f} % of their time. More {flags.NUM_WORKERS} may help."
