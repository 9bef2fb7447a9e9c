"""Standard streams whose failures do not end a run: closed, full, or a pipe whose reader has
exited.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def guard_standard_streams() -> None:
    """Replace standard output and error by streams that report their first failure on the other
    stream and never raise.

    Call it before any file is opened. If descriptor 1 or 2 is closed, the next opened file gets
    that number, and output of libraries would be written into the file.
    """
    open_closed_descriptors()
    sys.stdout = _guarded(sys.stdout, 1, "standard output")
    sys.stderr = _guarded(sys.stderr, 2, "standard error")
    sys.stdout.other = sys.stderr
    sys.stderr.other = sys.stdout


def open_closed_descriptors() -> None:
    """Open the null device for each closed standard stream, so that no file gets its descriptor
    number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(
                os.devnull, os.O_RDWR
            )  # open() takes the lowest free number: that of the closed stream


def _guarded(stream: TextIO | None, descriptor: int, name: str) -> Any:
    if stream is None:  # the stream was closed when Python started
        stream = os.fdopen(descriptor, "w", closefd=False)
    if hasattr(stream, "reconfigure"):
        # If buffered text cannot be written, the next write reports it.
        with suppress(OSError, ValueError):
            # Escape characters that the encoding of the terminal lacks.
            stream.reconfigure(errors="backslashreplace")
    return SteadyStream(stream, name)


class SteadyStream:
    """Text stream whose write errors do not raise; other attributes are taken from the wrapped
    ``stream``.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.failed: Exception | None = None
        """First error that lost text."""
        self.other: SteadyStream | None = None
        """Stream on which the first error is reported."""

    def write(self, text: str) -> int:
        """Write ``text``; if that fails, report the first failure on the other stream."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._say_once(error)
        return len(text)

    def flush(self) -> None:
        """Flush; if that fails, report the first failure on the other stream."""
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
                f"{self._name} cannot be written ({error}); the run continues without it.\n"
            )
            self.other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
