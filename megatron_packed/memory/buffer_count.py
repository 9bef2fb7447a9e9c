"""How many device buffers the backward pass loads into: more where there is room, fewer where there
was none.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE = 8
"""Steps after an out-of-memory error before growth is tried again; each further error doubles it."""


class BufferCount:
    """Starts with one, as nothing is known in the first step of the room that a step needs.

    Args:
        most: never more than these.
        headroom_bytes: what must stay free beside another buffer.
        forced: this many, whatever happens.
    """

    def __init__(self, most: int, headroom_bytes: int, forced: int | None = None) -> None:
        self.now = 1 if forced is None else max(forced, 1)
        self.most, self.fixed = most, forced is not None
        """``fixed``: it neither grows nor shrinks any more."""
        self.headroom_bytes = headroom_bytes
        self._pause = FIRST_PAUSE
        self._steps = self._next = 0

    def end_step(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Behind a step; whether there is one buffer more from now on.

        Args:
            buffer_bytes: of one buffer, as seen so far; 0 if nothing was seen.
            free_bytes: what the device had left at its worst moment.
        """
        self._steps += 1
        if self.fixed or self.now >= self.most or buffer_bytes == 0 or self._steps < self._next:
            return False
        if free_bytes() <= buffer_bytes + self.headroom_bytes:
            return False
        self.now += 1
        return True

    def settle(self, buffer_bytes: int, free_bytes: Callable[[], int]) -> None:
        """For good, as graphs are captured with it: as many as there is room for now."""
        while self.end_step(buffer_bytes, lambda: free_bytes() - (self.now - 1) * buffer_bytes):
            pass
        self.fixed = True

    def shrink(self, to: int) -> None:
        """There was no memory: fewer from now on, and another try later."""
        if self.fixed:
            return
        self.now = max(min(to, self.now), 1)
        self._next = self._steps + self._pause
        self._pause *= 2
