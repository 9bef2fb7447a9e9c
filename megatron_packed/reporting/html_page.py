"""Writer of self-contained HTML pages from the templates beside this module, and their filters.

Filters are the texts of numbers and times, which templates call.
"""

from __future__ import annotations

import math
import os
from datetime import datetime, timedelta
from pathlib import Path

from megatron_packed.files.written_files import resolve_output, write_file
from megatron_packed.reporting.charts import COLOURS, DARK_COLOURS

_LONGEST = 1e12
"""Seconds from which a time has no days: damaged lines of a log may hold any number."""
_UNSAFE = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\N{REPLACEMENT CHARACTER}",
)
"""Replacements of control characters, and of marks that reverse the direction of text. Prompts and
file names may contain them.
"""


def render(template: str, **values: object) -> str:
    """Return the HTML of a template with the given values, which are escaped.

    Args:
        template: name of a file beside this module.
        values: variables of the template; every page has a ``title``.
    Raises:
        ValueError: a value that the template needs is missing.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= {"colours": COLOURS, "dark_colours": DARK_COLOURS}
    try:
        return environment.get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(error.message) from error


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Write a page and return its path.

    Args:
        path: file to write; missing folders are created.
        html: the page, from `render`.
    Raises:
        OSError: the page cannot be written, or the path is a device; an earlier page is unchanged.
    """
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    # A title may be a path with bytes that are not valid text.
    data = html.translate(_UNSAFE).encode("utf-8", errors="backslashreplace")
    try:
        write_file(resolve_output(page), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from error
    return page


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
