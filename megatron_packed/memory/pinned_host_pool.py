"""Pool of pinned host blocks. It reuses blocks, so that a steady step pins and frees no memory.

Graphs copy to fixed addresses, so their blocks are reserved. Graphs of all capture sizes share the
reserved blocks, because only one micro-batch at a time is between its forward and its backward
graphs. Two such micro-batches would overwrite each other's blocks, so offload in graphs allows only
one micro-batch slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _FreeBlock(NamedTuple):
    block: Tensor
    used: Any
    """Event after the last copy from or to the block."""


class PinnedHostPool:
    """Pool of blocks of pinned memory.

    Args:
        pin: allocates a pinned block: number of bytes -> ``(bytes,)`` uint8. It raises
            `torch.OutOfMemoryError` if this fails.
        done: returns True if an event is complete.
    """

    def __init__(self, pin: Callable[[int], Tensor], done: Callable[[Any], bool]) -> None:
        self._pin = pin
        self._done = done
        self._free: list[_FreeBlock] = []
        self._free_of_graphs: list[_FreeBlock] = []
        self._of_graphs: set[int] = set()  # addresses
        self.num_bytes = 0
        """Bytes of all blocks, free and in use."""
        self.pinned = 0
        """Number of blocks pinned since the start."""
        self._refused: int | None = None
        """Size in bytes of the block that could not be pinned in this step; None if there is none."""
        self._closed = False

    def allocate(self, num_bytes: int, *, captured: bool = False) -> Tensor:
        """Return the smallest free block of at least ``num_bytes``, or a new block.

        When a new block is pinned, the largest free block is released, unless its last copy is still
        running. So the pool does not hold more blocks than are in use at the same time, and it
        replaces blocks by larger ones. If pinning fails, no block is released, and blocks of this
        size are not requested again before the next step.

        Args:
            num_bytes: size of the block, in bytes.
            captured: every replay of a graph will copy to the block, so use only blocks that are
                reserved for graphs.
        Raises:
            torch.OutOfMemoryError: no more memory can be pinned.
        """
        among = self._free_of_graphs if captured else self._free
        fitting = [place for place, free in enumerate(among) if free.block.numel() >= num_bytes]
        if fitting:
            # The last copy from the block may still run, and no wait is needed. The next copy to the
            # block waits for the current stream, which has waited for that copy: waits 1 and 4 of
            # [Note: offload stream protocol] in offload_copies.py.
            return among.pop(min(fitting, key=lambda place: among[place].block.numel())).block
        if captured:
            # Pinning memory during a capture would invalidate the capture.
            raise torch.OutOfMemoryError(
                "the capture needs more host memory than the eager passes before it used"
            )
        if self._refused is not None and num_bytes >= self._refused:
            # A failed call takes milliseconds in the driver, so try once per step.
            raise torch.OutOfMemoryError(
                f"pinning {self._refused / 2**20:,.0f} MiB already failed in this step"
            )
        return self._pin_new(num_bytes, among)

    def _pin_new(self, num_bytes: int, among: list[_FreeBlock]) -> Tensor:
        try:
            block = self._pin(num_bytes)
        except torch.OutOfMemoryError:
            self._refused = num_bytes
            raise
        largest = max(range(len(among)), key=lambda place: among[place].block.numel(), default=None)
        # If a copy still uses the block, unpinning would make the host wait, or the copy fail.
        if largest is not None and self._done(among[largest].used):
            self.num_bytes -= among.pop(largest).block.numel()
        self.num_bytes += num_bytes
        self.pinned += 1
        return block

    def free(self, block: Tensor, used: Any) -> None:
        """Return a block to the pool.

        Args:
            block: block that `allocate` returned.
            used: event after the last copy from or to the block.
        """
        if self._closed:
            # The block is unpinned when the caller drops its reference to the block.
            self.num_bytes -= block.numel()
        elif block.data_ptr() in self._of_graphs:
            self._free_of_graphs.append(_FreeBlock(block, used))
        else:
            self._free.append(_FreeBlock(block, used))

    def end_step(self) -> None:
        """End a step: allow pinning again, because other processes may have freed memory."""
        self._refused = None

    def reserve_for_graphs(self) -> None:
        """Reserve all free blocks for graphs, and release the blocks of earlier graphs.

        Replays copy to fixed addresses, so eager micro-batches must use other blocks. All copies must
        be complete, and earlier graphs must be freed.
        """
        self.num_bytes -= sum(free.block.numel() for free in self._free_of_graphs)
        self._free_of_graphs = self._free
        self._free = []
        self._of_graphs = {free.block.data_ptr() for free in self._free_of_graphs}

    def reset(self) -> None:
        """Release all free blocks. All copies must be complete, and graphs with these blocks freed."""
        for free in (self._free, self._free_of_graphs):
            self.num_bytes -= sum(buffer.block.numel() for buffer in free)
            free.clear()
        self._of_graphs.clear()

    def close(self) -> None:
        """Release all free blocks now, and blocks in use when they are freed."""
        self.reset()
        self._closed = True
