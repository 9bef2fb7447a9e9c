"""Facts of a report page about one run: how it ended, and how long it took."""

from __future__ import annotations

from megatron_packed.reporting.curves import Run, number_in
from megatron_packed.reporting.page_filters import counted, moment

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
    return kind, f"Finished: {counted(last, 'step')}{without}."


def _without_end(last: int, planned: object, place: str) -> str:
    """Return the verdict about a log without an end."""
    if not isinstance(planned, int):  # the log of an older version
        return f"The log ends at {place}."
    if last >= planned:
        return f"All {planned:,} steps are done, but the log has no end: the run may still save."
    return (
        f"Not finished: the log ends at {place}. The run still goes on, or it was killed or failed."
    )


def seconds_since_start(run: Run) -> float | None:
    """Return the seconds between the last start and the end of a run; None if one is unknown."""
    begun = moment(run.starts[-1].get("time")) if run.starts else None
    ended = moment(run.end.get("time"))
    return (ended - begun).total_seconds() if begun and ended else None
