"""Standard streams that cannot end a run: closed, full, or a pipe whose reader has died."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def guard_standard_streams() -> None:
    """Replace standard output and error by streams whose failures are said once on the other one,
    and end nothing.

    Call it before any file is opened: a file that is opened while descriptor 1 or 2 is closed gets
    that number, and what a library prints would be written into it.
    """
    open_closed_descriptors()
    sys.stdout = _guarded(sys.stdout, 1, "standard output")
    sys.stderr = _guarded(sys.stderr, 2, "standard error")
    sys.stdout.other = sys.stderr
    sys.stderr.other = sys.stdout


def open_closed_descriptors() -> None:
    """Open the null device in place of standard streams that are closed, so that no file gets their
    numbers.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def _guarded(stream: TextIO | None, descriptor: int, name: str) -> Any:
    if stream is None:  # it was closed when Python started
        stream = os.fdopen(descriptor, "w", closefd=False)
    if hasattr(stream, "reconfigure"):
        with suppress(
            OSError, ValueError
        ):  # what is buffered cannot be written: the next line says so
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
    return SteadyStream(stream, name)


class SteadyStream:
    """Text stream that goes on when it cannot be written; other attributes are those of ``stream``."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.failed: Exception | None = None
        """Why text was lost first."""
        self.other: SteadyStream | None = None
        """Stream on which the first failure is said."""

    def write(self, text: str) -> int:
        """Write ``text``, or say once that it cannot be written."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._say_once(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or say once that it cannot be written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._say_once(error)

    def _say_once(self, error: Exception) -> None:
        if self.failed is not None:
            return
        self.failed = error
        if self.other is not None:
            self.other.write(
                f"{self._name} cannot be written ({error}); the run goes on without it.\n"
            )
            self.other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
