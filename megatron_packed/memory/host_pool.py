"""Blocks of pinned host memory that are used over and over: in a steady step none is pinned and
none is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
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
        self._free_of_graphs: list[_Free] = []
        self._of_graphs: set[int] = set()  # addresses
        self.num_bytes = 0
        """Of all blocks, lent ones included."""
        self.pinned = 0
        """Blocks that were ever pinned."""
        self._refused: int | None = None
        """Bytes that could not be pinned in this step."""
        self._closed = False

    def lend(self, num_bytes: int, *, captured: bool = False) -> Tensor:
        """A block of at least ``num_bytes``: the smallest free one that will do, else a new one,
        for which the largest that will not do is given up, so that there are no more blocks than
        were needed at once. Where none can be pinned nothing is given up, and for so many bytes it
        is not tried again before the next step.

        Args:
            captured: a graph will copy to it, again and again: it comes from those that were set
            apart.
        Raises:
            torch.OutOfMemoryError: no more memory can be pinned.
        """
        among = self._free_of_graphs if captured else self._free
        fitting = [place for place, free in enumerate(among) if free.block.numel() >= num_bytes]
        if fitting:
            return among.pop(min(fitting, key=lambda place: among[place].block.numel())).block
        if captured:
            raise torch.OutOfMemoryError(
                "the passes before a capture had less in host memory than the capture needs"
            )
        if self._refused is not None and num_bytes >= self._refused:
            raise torch.OutOfMemoryError(f"there was none for {self._refused / 2**20:,.0f} MiB")
        try:
            block = self._pin(num_bytes)
        except torch.OutOfMemoryError:
            self._refused = num_bytes
            raise
        largest = max(range(len(among)), key=lambda place: among[place].block.numel(), default=None)
        if largest is not None and self._done(among[largest].used):
            self.num_bytes -= among.pop(largest).block.numel()
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
        elif block.data_ptr() in self._of_graphs:
            self._free_of_graphs.append(_Free(block, used))
        else:
            self._free.append(_Free(block, used))

    def end_step(self) -> None:
        """There may be memory again."""
        self._refused = None

    def set_apart(self) -> None:
        """All free blocks are those of graphs from now on: others, and graphs, may be in use at the
        same time. Those of earlier graphs are given up; every copy must be done, and the graphs
        that know of them gone.
        """
        self.num_bytes -= sum(free.block.numel() for free in self._free_of_graphs)
        self._free_of_graphs, self._free = self._free, []
        self._of_graphs = {free.block.data_ptr() for free in self._free_of_graphs}

    def reset(self) -> None:
        """Give up all free blocks; every copy must be done, and graphs that know of them gone."""
        for free in (self._free, self._free_of_graphs):
            self.num_bytes -= sum(one.block.numel() for one in free)
            free.clear()
        self._of_graphs.clear()

    def close(self) -> None:
        """Give up all, also those that come back later."""
        self.reset()
        self._closed = True
