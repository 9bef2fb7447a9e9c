"""A thread that ends a job whose GPU makes no progress.

[Note: hangs that no timeout sees]
A collective inside a CUDA graph is no work of torch's process groups: their watchdog does not know
that it is queued, and their timeout never ends. The host may not even notice: it queues replays
until the driver takes no more, and then sits in the driver, where every other thread that asks CUDA
anything has to wait, too. So a thread that knows nothing of CUDA looks for signs of life. A host
that works (it compiles kernels, packs an epoch) is at another place of its program whenever one
looks. One that waits for a step says so, and asks for the events behind its micro-batches: while
they come, the device is alive. One that waits for other hosts is left to the timeout of that: it
may find itself at the same place again and again, each time for a moment of its own. One that
stands where it stood, or waits for events that do not come, for some minutes, belongs to a device
that hangs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron_packed.distributed.collectives import all_gather_json, barrier

LOOKS = 20
"""Number of looks of the thread while its patience lasts."""
_POLL_SECONDS = 1e-3
# They have the timeout of their own collective, which names the group that did not come.
_WAIT_FOR_HOSTS = {function.__code__ for function in (all_gather_json, barrier)}


class Event(Protocol):
    """Something that the device comes to in its turn."""

    def query(self) -> bool:
        """Return True if the device has passed it."""


class DeviceHangError(RuntimeError):
    """The GPU makes no progress: it waits for another one."""


class HangDetector:
    """Watches between ``with``'s begin and end. Reads: [Note: hangs that no timeout sees].

    Args:
        patience: seconds without a sign of life; looked for `LOOKS` times while they last.
        on_hang: called once, in the thread of the watch; it is expected to end the process, and
        must not ask CUDA.
        mark: an event behind what is queued on the current stream.
    """

    def __init__(
        self,
        patience: float,
        on_hang: Callable[[DeviceHangError], object],
        mark: Callable[[], Event] | None = None,
    ) -> None:
        self._patience = patience
        self._on_hang = on_hang
        self._mark = _record if mark is None else mark
        self._pending: deque[Event] = deque()
        self._last = time.monotonic()
        self._resting = self._asks = False
        self._host = threading.main_thread().ident
        self._place: list[tuple[object, int]] = []
        """Where the host was when the thread last looked."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-detection", daemon=True)

    def __enter__(self) -> HangDetector:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self) -> None:
        """The host queues a micro-batch; the device is alive when it has come this far."""
        self._forget_what_has_come()  # a host that never has to wait would keep all of them
        self._pending.append(self._mark())
        self._last = time.monotonic()

    def waits(self) -> None:
        """The host does nothing but ask, again and again, how far the device has come."""
        self._asks = True
        if self._forget_what_has_come():
            self._last = time.monotonic()

    def wait(self) -> None:
        """Until the device has come as far as the last `beat`: before a call that would wait for it
        in silence.
        """
        while self._pending:
            self.waits()
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the host has a timeout of its own where it waits."""
        before = self._resting
        self._resting = True
        try:
            yield
        finally:
            # The rest does not count as silence, so the clock starts again before the watch does.
            self._last = time.monotonic()
            self._resting = before

    def _forget_what_has_come(self) -> bool:
        """Forget the events that the device has passed; return True if there was one."""
        before = len(self._pending)
        # Events of one stream are passed in order, so the first pending one decides.
        while self._pending and self._pending[0].query():
            self._pending.popleft()
        return len(self._pending) < before

    def _watch(self) -> None:
        while not self._stopped.wait(self._patience / LOOKS):
            # This thread never calls CUDA: a call could block in the driver like the main thread.
            before = self._place
            self._place = self._place_of_host()
            asked = self._asks
            self._asks = False
            waits_for_hosts = any(code in _WAIT_FOR_HOSTS for code, _ in self._place)
            # A host that asks for events moves, too, but its progress is the device's.
            if waits_for_hosts or (self._place != before and not asked):
                self._last = time.monotonic()
            if not self._resting and time.monotonic() - self._last > self._patience:
                self._on_hang(
                    DeviceHangError(f"the GPU has made no progress for {self._patience:.0f} s")
                )
                return

    def _place_of_host(self) -> list[tuple[object, int]]:
        """Return the functions of the host's stack, the innermost first, and the position in each."""
        places: list[tuple[object, int]] = []
        frame = sys._current_frames().get(self._host or 0)
        while frame is not None:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return places


def _record() -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
