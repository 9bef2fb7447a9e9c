"""Facts of a report page about one run: how it ended, its main numbers, and its dates."""

from __future__ import annotations

import math
import statistics
from datetime import datetime, timedelta

from megatron_packed.reporting.curves import Record, Run, number_in, numbers_in, steady
from megatron_packed.reporting.html_page import compact, text_of

_DONE, _NONFINITE, _PREEMPTED = 0, 20, 75
"""Exit codes with a sentence of their own."""
_MANY = 0.1
"""Share of skipped steps above which a finished run is not called good."""


def outcome(run: Run) -> tuple[str, str]:
    """Return a kind (``good``, ``bad`` or ``open``) and the sentence that says how the run ended."""
    last, planned = int(number_in(run.steps[-1], "iteration")), run.facts.get("last_iteration")
    place = f"step {last:,} of {planned:,}" if isinstance(planned, int) else f"step {last:,}"
    if not run.end:
        return "open", _without_end(last, planned, place)
    code = run.end.get("exit_code")
    if code == _NONFINITE:
        return "bad", f"Stopped at {place} by a non-finite loss or gradient."
    if code == _PREEMPTED:
        return "open", f"Stopped on request after {place}. The same command continues the run."
    if code != _DONE:
        return "bad", f"Ended after {place} with exit code {code}."
    if run.end.get("stopped_early"):
        return "good", f"Finished: validations stopped the run early at {place}."
    if isinstance(planned, int) and last < planned:
        return "open", f"Stopped after {place}. The same command continues the run."
    skipped = sum(bool(step["skipped"]) for step in run.steps)
    without = f", {skipped:,} of them without an update" if skipped else ""
    kind = "bad" if skipped > _MANY * len(run.steps) else "good"
    return kind, f"Finished: {last:,} {'step' if last == 1 else 'steps'}{without}."


def _without_end(last: int, planned: object, place: str) -> str:
    """Return the verdict about a log without an end."""
    if not isinstance(planned, int):  # the log of an older version
        return f"The log ends at {place}."
    if last >= planned:
        return f"All {planned:,} steps are done, but the log has no end: the run may still save."
    return (
        f"Not finished: the log ends at {place}. The run still goes on, or it was killed or failed."
    )


def tiles_of(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the main numbers of a run."""
    steps, model = run.steps, run.facts.get("model")
    first, last = (number_in(steps[at], "lm_loss") for at in (0, -1))
    tiles = [("training loss", f"{_short(first)} → {_short(last)}", "first and last step")]
    if best := best_validation(run.validations):
        step, loss = best
        remark = f"perplexity {perplexity_text(loss)}, step {step:,}"
        tiles.append(("best validation loss", _short(loss), remark))
    targets = sum(numbers_in(steps, "target_tokens"))
    remark = f"{compact(targets)} of them targets" if targets else "without padding"
    tiles.append(("tokens", compact(number_in(steps[-1], "consumed_tokens")), remark))
    tiles.append(_time(run))
    rate = statistics.median(numbers_in(steady(steps), "tokens_per_second"))
    tiles.append(("tokens per second", compact(rate), "median, without padding"))
    if isinstance(model, dict):
        total, active = (model.get(name) for name in ("parameters", "active_parameters"))
        remark = str(model.get("pattern", ""))
        if isinstance(total, int) and isinstance(active, int):
            remark += f", {compact(active)} active" if active != total else ""
            tiles.append(("parameters", compact(total), remark))
    return tiles


def best_validation(validations: list[Record]) -> tuple[int, float] | None:
    """Return step and loss of the best validation; None without a finite loss."""
    losses = [(int(number_in(r, "iteration")), number_in(r, "valid_loss")) for r in validations]
    finite = [step_and_loss for step_and_loss in losses if math.isfinite(step_and_loss[1])]
    return min(finite, key=lambda step_and_loss: step_and_loss[1]) if finite else None


def _short(loss: float) -> str:
    """Return a loss with three decimals, a small loss with two digits."""
    return f"{loss:.2g}" if 0 < loss < 0.01 else f"{loss:.3f}"


def perplexity_text(loss: float) -> str:
    """Return the perplexity of a loss in nats as text, with about four digits."""
    value = math.exp(loss) if loss < 50 else math.inf
    digits = max(0, 3 - math.floor(math.log10(value))) if 1 <= value < 1e6 else 0
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def _time(run: Run) -> tuple[str, str, str]:
    """Return the tile of the time: between start and end, or the sum of the steps."""
    begun, ended = _last_start_and_end(run)
    restarts = len(run.starts) - 1
    if begun and ended and restarts == 0:
        return "time", duration((ended - begun).total_seconds()), "from start to end"
    noun = "restart" if restarts == 1 else "restarts"
    remark = "in steps" + (f", {restarts} {noun}" if restarts > 0 else "")
    return "time", duration(_seconds_in_steps(run)), remark


def dates_of(run: Run) -> list[tuple[str, str]]:
    """Return (name, value) of the starts, the end and the duration of a run."""
    rows = []
    for place, start in enumerate(run.starts):
        if begun := moment(start.get("time")):
            after = f" after step {text_of(start['step'])}" if start.get("step") else ""
            name = "restarted" if place else "started"
            rows.append((name, f"{begun:%Y-%m-%d %H:%M:%S %z}{after}"))
    begun, ended = _last_start_and_end(run)
    if begun and ended:
        since = " since the last start" if len(run.starts) > 1 else ""
        took = duration((ended - begun).total_seconds())
        rows.append(("ended", f"{ended:%Y-%m-%d %H:%M:%S %z}, {took}{since}"))
    rows.append(("time in steps", duration(_seconds_in_steps(run))))
    return rows


def _last_start_and_end(run: Run) -> tuple[datetime | None, datetime | None]:
    last_start = run.starts[-1] if run.starts else {}
    return moment(last_start.get("time")), moment(run.end.get("time"))


def _seconds_in_steps(run: Run) -> float:
    return sum(numbers_in(run.steps, "step_time_ms")) / 1e3


def moment(text: object) -> datetime | None:
    """Return the time that a log gives as text; None for other values."""
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


_LONGEST = 1e12
"""Seconds from which a time has no days: damaged lines of a log may hold any number."""


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Example:
        ``1 h 2 min`` for 3,750 seconds.
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if not seconds < _LONGEST:
        return f"{seconds:g} s"
    time = timedelta(seconds=round(seconds))
    hours, seconds_of_hour = divmod(time.seconds, 3600)
    parts = (
        (time.days, "d"),
        (hours, "h"),
        (seconds_of_hour // 60, "min"),
        (seconds_of_hour % 60, "s"),
    )
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)
