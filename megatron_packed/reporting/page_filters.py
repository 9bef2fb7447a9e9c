"""Texts of numbers and times on pages; templates call these functions as filters."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

_LONGEST = 1e12
"""Seconds from which a time has no days: damaged lines of a log may hold any number."""


def text_of(value: object) -> str:
    """Return a count with thousands separators, other values as they are, ``?`` if missing."""
    return f"{value:,}" if isinstance(value, int) else str(value) or "?"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def compact(value: float) -> str:
    """Return a count with three digits and a letter.

    Example:
        ``1.23 M`` for 1,234,567.
    """
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= power:
            unit = 1e3 if letter == "k" else power
            return f"{value / unit:.3g} {letter}"
    return f"{value:,.0f}"


def short_loss(loss: object) -> str:
    """Return a loss of a log with three decimals, a small loss with two digits."""
    value = float(loss)  # type: ignore[arg-type]
    return f"{value:.2g}" if 0 < value < 0.01 else f"{value:.3f}"


def perplexity(loss: float) -> str:
    """Return the perplexity of a loss in nats, with about four digits."""
    value = math.exp(loss) if loss < 50 else math.inf
    digits = max(0, 3 - math.floor(math.log10(value))) if 1 <= value < 1e6 else 0
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def moment(text: object) -> datetime | None:
    """Return the time that a log gives as text; None for other values."""
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


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
    minutes, rest = divmod(seconds_of_hour, 60)
    parts = ((time.days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


FILTERS = {
    "text": text_of,
    "counted": counted,
    "compact": compact,
    "loss": short_loss,
    "perplexity": perplexity,
    "moment": moment,
    "duration": duration,
}
"""Name in templates -> function."""
