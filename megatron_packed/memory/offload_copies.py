"""Copies of offloaded groups between device and host, ordered by events.

[Note: offload stream protocol]
Three streams take part: the stream of computation (whichever is current), the offload stream with
copies to the host, and the prefetch stream with copies back. Four waits order them, and the host
waits for nothing:

1. A copy to the host waits for the work that was queued on the current stream when the copy was
   requested: its source is computed.
2. The current stream waits for a copy to the host before its source is released. The allocator
   gives that memory to the next allocation of the same stream, which may write to it at once.
   Until then `OffloadedGroup.sources` keeps it alive; there are at most as many such groups as
   device buffers.
3. A copy from the host waits for the work that was queued on the current stream when its target was
   allocated: earlier users of that memory are done with it. It need not wait for the copy to the
   host, because the current stream has (2).
4. The current stream waits for a copy from the host before its target is handed out, or released
   unused.

A block of host memory may be reused as soon as its group was restored or dropped: the next copy to
it waits for the current stream (1), which has waited for the last copy from it (4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_packed.memory.offload_figures import CopyTimer
from megatron_packed.memory.offload_streams import OffloadStreams
from megatron_packed.memory.offloaded_tensors import HostLayout, OffloadedGroup
from megatron_packed.memory.saved_tensors import versions_of


class OffloadCopies:
    """Queue of the copies of one device. Follows [Note: offload stream protocol].

    Args:
        streams: of the device.
        timer: times each copy and each wait.
    """

    def __init__(self, streams: OffloadStreams, timer: CopyTimer) -> None:
        self._streams = streams
        self._timer = timer

    def to_host(
        self, number: int, sources: list[Tensor], layouts: list[HostLayout], block: Tensor
    ) -> OffloadedGroup:
        """Queue the copy of ``sources`` to ``block``; the group keeps the sources alive."""
        streams = self._streams
        num_bytes = sum(layout.num_bytes for layout in layouts)
        computed = streams.record_event()
        with streams.offload_stream(), torch.no_grad():
            # (1): the kernels that compute the sources are only queued so far.
            streams.wait_event(computed)
            begin = self._timer.begin()
            for source, layout in zip(sources, layouts):
                # A flat view with stride 1 makes one contiguous transfer of any strided tensor.
                streams.copy(layout.part_of(block), source.as_strided((layout.span,), (1,)))
            self._timer.copied_to_host(begin, num_bytes)
            copied = streams.record_event()
        return OffloadedGroup(number, layouts, block, num_bytes, copied, sources)

    def release_sources(self, group: OffloadedGroup) -> None:
        """Release the device memory of a group that is on the host, or will be."""
        assert group.sources is not None
        # (2): after this wait, later work on this stream may overwrite the memory. Dropping the
        # references first would let the allocator hand it out while the copy still reads it.
        self._streams.wait_event(group.copied)
        # The error is raised when the values are asked for, as autograd does for its own.
        group.modified = versions_of(group.sources) != group.versions
        group.sources = None

    def from_host(self, group: OffloadedGroup) -> None:
        """Allocate device buffers and queue the copy back into them.

        Raises:
            torch.OutOfMemoryError: no memory for the buffers.
        """
        streams = self._streams
        # Allocated on the current stream, not on the prefetch stream: the memory then returns to
        # the pool that layers allocate from, without `record_stream`.
        targets = [
            streams.empty(layout.lead + layout.span, layout.dtype) for layout in group.layouts
        ]
        allocated = streams.record_event()
        with streams.prefetch_stream(), torch.no_grad():
            # (3): kernels that used this memory before may still run on the current stream.
            streams.wait_event(allocated)
            begin = self._timer.begin()
            for target, layout in zip(targets, group.layouts):
                streams.copy(target[layout.lead :], layout.part_of(group.block))
            self._timer.copied_from_host(begin, group.num_bytes)
            group.arrived = streams.record_event()
        group.prefetched = targets

    def restored(self, group: OffloadedGroup) -> list[Tensor]:
        """Return the tensors of a group whose copy back was queued; the caller owns the memory."""
        assert group.prefetched is not None
        before = self._timer.begin()
        # No event is left where a captured graph ended between the copy and its use: the graph
        # itself has waited for it.
        if group.arrived is not None:
            self._streams.wait_event(group.arrived)  # (4): the backward pass reads it next
        self._timer.waited(before)
        pairs = zip(group.layouts, group.prefetched)
        tensors = [buffer.as_strided(one.shape, one.stride, one.lead) for one, buffer in pairs]
        group.prefetched = None
        return tensors

    def drop(self, group: OffloadedGroup) -> None:
        """Release the device buffers of a group that was prefetched in vain."""
        if group.arrived is not None:
            # (4): the copy still writes to the memory that the allocator is about to reuse.
            self._streams.wait_event(group.arrived)
        group.prefetched = None

    def event_after_all(self) -> Any:
        """Let the current stream wait for all copies; return an event after them."""
        streams = self._streams
        with streams.offload_stream():
            to_host = streams.record_event()
        with streams.prefetch_stream():
            # One stream waits for the other, so that a single event stands for both.
            streams.wait_event(to_host)
            both = streams.record_event()
        streams.wait_event(both)
        return both
