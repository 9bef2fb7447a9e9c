"""Display of progress: a bar on a terminal, and a line every 10 s if the output is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron_packed.config.errors import escaped, printable

_QUIET_SECONDS = 2.0
"""Nothing is shown for work that takes less than this time."""
_LINE_EVERY = 10.0
_MEASURED_SECONDS = 5.0
"""Shortest time over which the speed of the work is measured, for the time left."""


class ProgressBar:
    """Progress display of work over ``total`` units (bytes, documents), with the time left.

    Args:
        title: name of the work.
        total: number of units of the complete work.
        show: False shows nothing; used on all ranks except one.
    """

    def __init__(self, title: str, total: int, show: bool = True) -> None:
        self._title = title
        self._total = max(total, 1)
        self._show = show
        self._start = self._last = time.monotonic()
        self._first: tuple[float, int] | None = None
        """Time and units of the first update with finished units. The speed is measured from it,
        because the work before it, such as imports, has another speed.
        """
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show that ``done`` units are finished.

        Args:
            note: text about the results so far.
            total: new number of units of the complete work; None keeps the old number.
        """
        self._total = max(total or self._total, 1)
        timestamp = time.monotonic()
        if self._first is None and done > 0:
            self._first = timestamp, done
        if not self._show or timestamp - self._start < _QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            if timestamp - self._last >= 0.2:
                self._draw(done, note)
                self._last = timestamp
        elif timestamp - self._last >= _LINE_EVERY:
            self._last = timestamp
            parts = [f"{done / self._total:.0%}", note, self._time_left(timestamp, done)]
            print(f"{self._title}: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)

    def _time_left(self, timestamp: float, done: int) -> str:
        """Return the time left; empty before the speed is known."""
        begun, first = self._first or (timestamp, done)
        if timestamp - begun < _MEASURED_SECONDS or done <= first:
            return ""
        left = (timestamp - begun) * max(self._total - done, 0) / (done - first)
        return f"{left:.0f} s left"

    def _draw(self, done: int, note: str) -> None:
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            # The units finished so far are no sample of the speed.
            self._task = self._bar.add_task(
                self._title, total=self._total, completed=done, note=note
            )
        self._bar.update(self._task, completed=done, total=self._total, note=note)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def say(line: str) -> None:
    """Print a line about the data on standard error."""
    print(escaped(line), file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Print a warning about the data on standard error, bold on a terminal."""
    text = f"WARNING: {line}"
    if not sys.stderr.isatty():
        say(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(printable(text, 1000), style="bold yellow"))
