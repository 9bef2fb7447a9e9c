"""Blocks of pinned host memory that are used over and over: in a steady step none is pinned and none is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class _Free(NamedTuple):
    block: Tensor
    used: Any
    """The last copy from or to it."""


class HostPool:
    """Lends blocks.

    Args:
        pin: number of bytes -> ``(bytes,)`` uint8; raises `torch.OutOfMemoryError`.
        done: whether the device has come to a mark.
    """

    def __init__(self, pin: Callable[[int], Tensor], done: Callable[[Any], bool]) -> None:
        self._pin, self._done = pin, done
        self._free: list[_Free] = []
        self.num_bytes = 0
        """Of all blocks, lent ones included."""
        self.pinned = 0
        """Blocks that were ever pinned."""
        self.frozen = False
        """Whether no block is given up: graphs copy to and from them."""
        self._closed = False

    def lend(self, num_bytes: int) -> Tensor:
        """A block of at least ``num_bytes``: the smallest free one that will do, else a new one, for which the largest
        that will not do is given up, so that there are never more blocks than were needed at once.

        Raises:
            torch.OutOfMemoryError: no more memory can be pinned.
        """
        fitting = [free for free in self._free if free.block.numel() >= num_bytes]
        if fitting:
            best = min(fitting, key=lambda free: free.block.numel())
            self._take(best)
            return best.block
        small = max(self._free, key=lambda free: free.block.numel(), default=None)
        if small is not None and not self.frozen and self._done(small.used):
            self._take(small)
            self.num_bytes -= small.block.numel()
            del small
        block = self._pin(num_bytes)
        self.num_bytes += num_bytes
        self.pinned += 1
        return block

    def give_back(self, block: Tensor, used: Any) -> None:
        """
        Args:
            used: mark of the last copy from or to it; whoever gets it next queues behind that.
        """
        if self._closed:
            self.num_bytes -= block.numel()
        else:
            self._free.append(_Free(block, used))

    def reset(self) -> None:
        """Give up all free blocks; every copy must be done."""
        self.num_bytes -= sum(free.block.numel() for free in self._free)
        self._free.clear()

    def close(self) -> None:
        """Give up all, also those that come back later."""
        self.reset()
        self._closed = True

    def _take(self, free: _Free) -> None:
        self._free = [other for other in self._free if other is not free]
