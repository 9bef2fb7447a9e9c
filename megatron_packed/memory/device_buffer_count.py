"""Number of device buffers that the backward pass prefetches into: more where there is room, fewer
after an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE = 8
"""Steps after an out-of-memory error before growth is tried again; each further error doubles it."""


class DeviceBufferCount:
    """Counter that starts with one buffer, because the memory that a step needs is unknown before
    the first step.

    Args:
        most: upper limit.
        headroom_bytes: device memory that must stay free beside another buffer.
        forced: fixed number that neither grows nor shrinks.
    """

    def __init__(self, most: int, headroom_bytes: int, forced: int | None = None) -> None:
        self.now = 1 if forced is None else max(forced, 1)
        self.most = most
        self.fixed = forced is not None
        """True when it neither grows nor shrinks any more: forced, or frozen for graphs."""
        self.headroom_bytes = headroom_bytes
        self._pause = FIRST_PAUSE
        self._steps = 0
        self._next = 0

    def end_step(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Grow by one buffer after a step if there is room; return True if it did.

        Args:
            buffer_bytes: size of one buffer, as seen so far; 0 if nothing was seen.
            free_bytes: returns what the device had left at its worst moment.
        """
        self._steps += 1
        return self._grow(buffer_bytes, free_bytes)

    def _grow(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> bool:
        # Asked last: `free_bytes` is a call into the driver, and most steps need none.
        if self.fixed or self.now >= self.most or buffer_bytes == 0 or self._steps < self._next:
            return False
        if free_bytes() <= buffer_bytes + self.headroom_bytes:
            return False
        self.now += 1
        return True

    def freeze(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> None:
        """Grow as far as there is room now and fix the number, since graphs are captured with it."""
        # `free_bytes` is the worst moment of the warm-up, which ran with one buffer: the buffers
        # that were added since are not in it yet and are subtracted here.
        while self._grow(buffer_bytes, lambda: free_bytes() - (self.now - 1) * buffer_bytes):
            pass
        self.fixed = True

    def shrink(self, to: int) -> None:
        """Shrink to ``to`` buffers after an out-of-memory error, and try to grow again later."""
        if self.fixed:
            return
        self.now = max(min(to, self.now), 1)
        # The pause doubles: a run that fails again and again soon stops paying for the attempts,
        # each of which costs a retry inside a backward pass.
        self._next = self._steps + self._pause
        self._pause *= 2
