"""Number of device buffers for restored groups.

The number grows while the device has free memory, and shrinks after an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE = 8
"""Steps between an out-of-memory error and the next attempt to grow; doubled by each further error."""


class DeviceBufferCount:
    """Number of device buffers, which starts at one.

    The memory that a step needs is unknown before the first step, so the number grows later.

    Args:
        most: largest number.
        headroom_bytes: device memory that must stay free in addition to a new buffer.
        forced: fixed number that does not grow or shrink.
    """

    def __init__(self, most: int, headroom_bytes: int, forced: int | None = None) -> None:
        self.now = 1 if forced is None else max(forced, 1)
        self.most = most
        self.fixed = forced is not None
        """True if the number does not change any more: it was forced, or frozen for graphs."""
        self.headroom_bytes = headroom_bytes
        self._pause = FIRST_PAUSE
        self._steps = 0
        self._next = 0

    def end_step(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Add one buffer after a step if the device has free memory; return True if it was added.

        Args:
            buffer_bytes: size of the largest group so far; 0 if no group was offloaded.
            free_bytes: returns the smallest free device memory since the start.
        """
        self._steps += 1
        return self._grow(buffer_bytes, free_bytes)

    def _grow(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> bool:
        # Call `free_bytes` last, because it calls the driver, and most steps do not need it.
        if self.fixed or self.now >= self.most or buffer_bytes == 0 or self._steps < self._next:
            return False
        if free_bytes() <= buffer_bytes + self.headroom_bytes:
            return False
        self.now += 1
        return True

    def freeze(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> None:
        """Add buffers while the device has free memory, then fix the number for captured graphs."""
        # `free_bytes` reports the smallest free memory of the warm-up, which used one buffer. So
        # subtract the buffers that this loop has added.
        while self._grow(buffer_bytes, lambda: free_bytes() - (self.now - 1) * buffer_bytes):
            pass
        self.fixed = True

    def shrink(self, to: int) -> None:
        """Shrink to ``to`` buffers after an out-of-memory error, and try to grow again later."""
        if self.fixed:
            return
        self.now = max(min(to, self.now), 1)
        # Double the pause, because each failed attempt to grow costs a retry in a backward pass. A
        # run that always fails then makes few attempts.
        self._next = self._steps + self._pause
        self._pause *= 2
