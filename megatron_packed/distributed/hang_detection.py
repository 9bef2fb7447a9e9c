"""Detection of a GPU that makes no progress, by a thread that calls no CUDA function.

[Note: hangs that no timeout sees]
torch's process groups do not track a collective inside a CUDA graph. Their watchdog does not see
that the collective is queued, and their timeout never expires. The main thread may not notice the
hang either. It queues replays until the driver accepts no more, then blocks inside the driver.
Every other thread that calls CUDA then blocks too. So the watch thread calls no CUDA function and
looks for signs of progress in the main thread's stack instead:

* A main thread that works (it compiles kernels or packs an epoch) is at a different instruction
  each time the watch thread looks. That is progress.
* A main thread that waits for a step calls `HangDetector.waits`, which queries the CUDA events
  recorded after each micro-batch. Progress is then only an event that completes.
* A main thread that waits for other hosts (`all_gather_json`, `barrier`) counts as making progress.
  Those collectives have their own timeout, and repeated short calls look like one long call.

If there is no sign of progress for `patience` seconds, the device hangs.
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
"""Number of times that the watch thread looks at the main thread within `patience` seconds."""
_POLL_SECONDS = 1e-3
# Waits in these functions are not watched: their collectives have a timeout whose error names the
# group.
_WAIT_FOR_HOSTS = {function.__code__ for function in (all_gather_json, barrier)}


class Event(Protocol):
    """Marker in a stream's queue, with the interface of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True if the device has completed all work queued before the event."""


class DeviceHangError(RuntimeError):
    """Error for a GPU that makes no progress, usually because it waits for another GPU."""


class DeviceWatch:
    """Interface of `HangDetector`; this class does nothing, for a device that waits for no other."""

    def beat(self) -> None:
        """Record that work was queued."""

    def waits(self) -> None:
        """Look at the queued work; called repeatedly by a main thread that waits for the device."""

    def wait(self) -> None:
        """Wait until the device has completed the work of the last `beat`."""

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the watch inside a ``with`` block whose waits have their own timeout."""
        yield

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for all queued work, and suspend the watch inside the block."""
        self.beat()
        self.wait()
        with self.resting():
            yield


UNWATCHED = DeviceWatch()
"""Watch of a device that waits for no other device."""


class HangDetector(DeviceWatch):
    """Context manager that watches for a hanging GPU while its ``with`` block runs.

    See [Note: hangs that no timeout sees].

    Args:
        patience: seconds without progress after which the GPU counts as hanging. The watch thread
            looks for progress `LOOKS` times within this time.
        on_hang: function called once, in the watch thread. It should end the process, and must not
            call CUDA.
        mark: function that records an event on the current stream; by default a CUDA event.
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
        """Stack of the main thread at the last look, as `_place_of_host` returns it."""
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
        """Record an event after a queued micro-batch; its completion counts as progress."""
        # Without this call the list of events would grow if the host never waits for the device.
        self._forget_what_has_come()
        self._pending.append(self._mark())
        self._last = time.monotonic()

    def waits(self) -> None:
        """Query the recorded events; called repeatedly by a main thread that waits for the device.

        After this call a changed position of the main thread no longer counts as progress. Only a
        completed event does.
        """
        self._asks = True
        if self._forget_what_has_come():
            self._last = time.monotonic()

    def wait(self) -> None:
        """Wait until the device has completed the event of the last `beat`.

        Call it before a function that would block until the device is done: the watch thread cannot
        tell such a block from a hang.
        """
        while self._pending:
            self.waits()
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the watch inside a ``with`` block whose waits have their own timeout."""
        was_resting = self._resting
        self._resting = True
        try:
            yield
        finally:
            # The suspended time does not count, so the clock restarts before the watch resumes.
            self._last = time.monotonic()
            self._resting = was_resting

    def _forget_what_has_come(self) -> bool:
        """Remove completed events from the list; return True if there was a completed event."""
        num_pending = len(self._pending)
        # Events of one stream complete in order, so the loop stops at the first pending event.
        while self._pending and self._pending[0].query():
            self._pending.popleft()
        return len(self._pending) < num_pending

    def _watch(self) -> None:
        while not self._stopped.wait(self._patience / LOOKS):
            # This thread never calls CUDA: a call could block in the driver like the main thread.
            previous_place = self._place
            self._place = self._place_of_host()
            polled_events = self._asks
            self._asks = False
            waits_for_hosts = any(code in _WAIT_FOR_HOSTS for code, _ in self._place)
            # A main thread that polls events changes its position too, but that is no progress.
            if waits_for_hosts or (self._place != previous_place and not polled_events):
                self._last = time.monotonic()
            if not self._resting and time.monotonic() - self._last > self._patience:
                self._on_hang(
                    DeviceHangError(f"the GPU has made no progress for {self._patience:.0f} s")
                )
                return

    def _place_of_host(self) -> list[tuple[object, int]]:
        """Return each function on the main thread's stack with its position, innermost first."""
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
