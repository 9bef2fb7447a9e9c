"""SIGTERM, SIGINT and SIGUSR1 end the run in a checkpoint.

The handler only sets a flag. The flag rides on the gradient all-reduce of the next step, so every
rank learns of it in the same step and no rank saves alone. A second signal exits at once: the user
means it. One that comes right behind the first is the same request: a scheduler signals every
process, and torchrun, signalled too, passes it on.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0


class SignalFlag:
    """Remembers that this process was asked to stop.

    Args:
        exit_now: called with the exit code on a second signal; ``os._exit`` unless a test replaces
        it.
        speaks: say on standard error that the first one was heard: data may be tokenised for long
            before a step.
    """

    def __init__(self, exit_now=os._exit, *, speaks: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._speaks = speaks
        self._received_at = 0.0
        self._exit_now = exit_now
        self._previous: dict[int, object] = {}

    def __enter__(self) -> SignalFlag:
        for number in SIGNALS:
            # A scheduler warns before it kills: the run saves in that time.
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            # The time first: a second signal may interrupt this handler between the two lines.
            self._received_at = now
            self.received = signal.Signals(number)
            if self._speaks:
                promise = "the run will stop behind its next step; a second signal ends it at once"
                with suppress(OSError):
                    os.write(
                        2, f"{self.received.name}: {promise}.\n".encode()
                    )  # print may be at work already
        elif now - self._received_at > SAME_REQUEST_SECONDS:
            self._exit_now(128 + number)
