"""Handler of SIGTERM, SIGINT and SIGUSR1: the run saves a checkpoint and ends.

The handler only sets a flag. The flag is sent with the gradient all-reduce of the next step, so all
ranks see it in the same step and save together. A second signal exits at once. A signal within
`SAME_REQUEST_SECONDS` of the first is ignored as a duplicate: a scheduler signals every process,
and torchrun, which is signalled too, forwards the signal to its processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0


_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
"""Result of ``signal.signal``."""


class SignalFlag:
    """Flag that this process has received a signal to stop.

    Args:
        exit_now: called with the exit code on a second signal; ``os._exit`` except in tests.
        speaks: acknowledge the first signal on standard error. The run may take long to react:
            tokenising the data, for example, is not interrupted.
        signals: the signals that ask the run to stop.
    """

    def __init__(
        self,
        exit_now: Callable[[int], object] = os._exit,
        *,
        speaks: bool = False,
        signals: tuple[signal.Signals, ...] = SIGNALS,
    ) -> None:
        self.received: signal.Signals | None = None
        self._speaks = speaks
        self._signals = signals
        self._received_at = 0.0
        self._exit_now = exit_now
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> SignalFlag:
        for number in self._signals:
            # A scheduler sends a signal some time before it kills the job; the run saves in that
            # time.
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        time_now = time.monotonic()
        if self.received is None:
            # Set the time first: a second signal may interrupt this handler between the two lines,
            # and its handler compares with the time.
            self._received_at = time_now
            self.received = signal.Signals(number)
            if self._speaks:
                promise = "the run will stop after its next step; a second signal ends it at once"
                # Not print: the signal may interrupt a print call, which is not reentrant.
                with suppress(OSError):
                    os.write(2, f"{self.received.name}: {promise}.\n".encode())
        elif time_now - self._received_at > SAME_REQUEST_SECONDS:
            self._exit_now(128 + number)
