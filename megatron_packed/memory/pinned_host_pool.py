"""Pool of pinned host blocks that are reused: a steady step pins no memory and frees none.

Graphs copy to fixed addresses, so their blocks are reserved. Graphs of all capture sizes share them:
one micro-batch at a time is between its forward and its backward graphs, and uses only those of its
size. Two such micro-batches would overwrite each other's blocks, so only one slot is allowed then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _FreeBlock(NamedTuple):
    block: Tensor
    used: Any
    """Event after the last copy from or to it."""


class PinnedHostPool:
    """Pool that allocates blocks of pinned memory and takes them back.

    Args:
        pin: number of bytes -> ``(bytes,)`` uint8; raises `torch.OutOfMemoryError`.
        done: returns True when the device has passed an event.
    """

    def __init__(self, pin: Callable[[int], Tensor], done: Callable[[Any], bool]) -> None:
        self._pin = pin
        self._done = done
        self._free: list[_FreeBlock] = []
        self._free_of_graphs: list[_FreeBlock] = []
        self._of_graphs: set[int] = set()  # addresses
        self.num_bytes = 0
        """Bytes of all blocks, allocated ones included."""
        self.pinned = 0
        """Number of blocks that were ever pinned."""
        self._refused: int | None = None
        """Bytes that could not be pinned in this step."""
        self._closed = False

    def allocate(self, num_bytes: int, *, captured: bool = False) -> Tensor:
        """Return a block of at least ``num_bytes``: the smallest free one that is large enough,
        else a new one.

        For a new block a free one is released, so that there are no more blocks than were needed at
        once, or one more while its copy still runs. It is the largest, since blocks that are too
        small would stay forever. If pinning fails nothing is released, and as many bytes are not
        requested again before the next step.

        Args:
            captured: a graph will copy to it in every replay, so it is taken from those that were
                reserved for graphs.
        Raises:
            torch.OutOfMemoryError: no more memory can be pinned.
        """
        among = self._free_of_graphs if captured else self._free
        fitting = [place for place, free in enumerate(among) if free.block.numel() >= num_bytes]
        if fitting:
            # The last copy from the block may still run. No wait here: the next copy to it waits
            # for the current stream, which has waited for that copy (rules 1 and 4 of the note).
            return among.pop(min(fitting, key=lambda place: among[place].block.numel())).block
        if captured:
            # Pinning inside a capture would invalidate it.
            raise torch.OutOfMemoryError(
                "the passes before a capture had less in host memory than the capture needs"
            )
        if self._refused is not None and num_bytes >= self._refused:
            # A failed pin takes the driver milliseconds; once in a step is enough.
            raise torch.OutOfMemoryError(f"there was none for {self._refused / 2**20:,.0f} MiB")
        return self._pin_new(num_bytes, among)

    def _pin_new(self, num_bytes: int, among: list[_FreeBlock]) -> Tensor:
        try:
            block = self._pin(num_bytes)
        except torch.OutOfMemoryError:
            self._refused = num_bytes
            raise
        largest = max(range(len(among)), key=lambda place: among[place].block.numel(), default=None)
        # Unpinning memory that a copy still reads would wait for the device, or fault.
        if largest is not None and self._done(among[largest].used):
            self.num_bytes -= among.pop(largest).block.numel()
        self.num_bytes += num_bytes
        self.pinned += 1
        return block

    def free(self, block: Tensor, used: Any) -> None:
        """Take a block back.

        Args:
            used: event after the last copy from or to it.
        """
        if self._closed:
            # The block is unpinned when the caller drops its reference.
            self.num_bytes -= block.numel()
        elif block.data_ptr() in self._of_graphs:
            self._free_of_graphs.append(_FreeBlock(block, used))
        else:
            self._free.append(_FreeBlock(block, used))

    def end_step(self) -> None:
        """Allow pinning again: other processes may have released memory since."""
        self._refused = None

    def reserve_for_graphs(self) -> None:
        """Reserve all free blocks for graphs, and release those of earlier graphs.

        Replays copy to fixed addresses, so eager micro-batches beside them must use other blocks.
        Every copy must be done, and earlier graphs must be gone.
        """
        self.num_bytes -= sum(free.block.numel() for free in self._free_of_graphs)
        self._free_of_graphs = self._free
        self._free = []
        self._of_graphs = {free.block.data_ptr() for free in self._free_of_graphs}

    def reset(self) -> None:
        """Release all free blocks; every copy must be done, and graphs that use them gone."""
        for free in (self._free, self._free_of_graphs):
            self.num_bytes -= sum(one.block.numel() for one in free)
            free.clear()
        self._of_graphs.clear()

    def close(self) -> None:
        """Release all free blocks now, and blocks in use when they come back."""
        self.reset()
        self._closed = True
