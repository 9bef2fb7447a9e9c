"""Copies of offloaded groups between device and host, ordered by events.

[Note: offload stream protocol]
There are three streams: the current stream with the computation, the offload stream with copies to
the host, and the prefetch stream with copies back. Four waits order them. The host never waits.

1. A copy to the host waits for the work that was queued on the current stream before the copy was
   requested. Without this wait, the copy could read the source before it is computed.
2. The current stream waits for a copy to the host before its source is released. The allocator
   gives released memory to the next allocation of the same stream, which may write to it at once.
   Until the release, `OffloadedGroup.sources` keeps the memory alive. At most as many groups as
   there are device buffers hold sources.
3. A copy from the host waits for the work that was queued on the current stream when its target was
   allocated. Earlier kernels may still use that memory. The copy need not wait for the copy to the
   host, because the current stream has already waited for it (2).
4. The current stream waits for a copy from the host before its target is returned to the caller, or
   released unused. Without this wait, kernels could read or overwrite the target during the copy.

A block of host memory may be reused as soon as its group was restored or dropped. The next copy to
the block waits for the current stream (1), which has waited for the last copy from the block (4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_packed.memory.offload_figures import CopyTimer
from megatron_packed.memory.offload_streams import OffloadStreams
from megatron_packed.memory.offloaded_tensors import HostLayout, OffloadedGroup
from megatron_packed.memory.saved_tensors import versions_of


class OffloadCopies:
    """Copies of offloaded groups on one device. Follows [Note: offload stream protocol].

    Args:
        streams: streams of the device.
        timer: measures the time of each copy and each wait.
    """

    def __init__(self, streams: OffloadStreams, timer: CopyTimer) -> None:
        self._streams = streams
        self._timer = timer

    def to_host(
        self, number: int, sources: list[Tensor], layouts: list[HostLayout], block: Tensor
    ) -> OffloadedGroup:
        """Queue the copy of ``sources`` to ``block``; the returned group keeps the sources alive."""
        streams = self._streams
        num_bytes = sum(layout.num_bytes for layout in layouts)
        computed = streams.record_event()
        with streams.offload_stream(), torch.no_grad():
            # (1): the kernels that compute the sources are queued, but may not have run yet.
            streams.wait_event(computed)
            begin = self._timer.begin()
            for source, layout in zip(sources, layouts):
                # A flat view with stride 1 copies any strided tensor by one contiguous transfer.
                streams.copy(layout.part_of(block), source.as_strided((layout.span,), (1,)))
            self._timer.copied_to_host(begin, num_bytes)
            copied = streams.record_event()
        return OffloadedGroup(number, layouts, block, num_bytes, copied, sources)

    def release_sources(self, group: OffloadedGroup) -> None:
        """Release the sources of a group, whose copy to the host was queued."""
        assert group.sources is not None
        # (2): after this wait, later work on this stream may overwrite the memory. If the references
        # were dropped first, the allocator could reuse the memory while the copy still reads it.
        self._streams.wait_event(group.copied)
        # An in-place write to a source raises an error when the group is restored. Autograd also
        # reports a modified saved tensor only when the backward pass reads it.
        group.modified = versions_of(group.sources) != group.versions
        group.sources = None

    def from_host(self, group: OffloadedGroup) -> None:
        """Allocate device buffers and queue the copy from the host into them.

        Raises:
            torch.OutOfMemoryError: no device memory for the buffers.
        """
        streams = self._streams
        # Allocate on the current stream, not on the prefetch stream. The freed memory is then
        # available to layers, which allocate on the current stream, without `record_stream`.
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
        """Return the tensors of a group whose copy back was queued; the caller owns their memory."""
        assert group.prefetched is not None
        wait_begin = self._timer.begin()
        # There is no event if the copy was captured in an earlier graph: that graph has waited for
        # the copy at its end.
        if group.arrived is not None:
            self._streams.wait_event(group.arrived)  # (4): the backward pass reads the target next
        self._timer.waited(wait_begin)
        pairs = zip(group.layouts, group.prefetched)
        tensors = [
            buffer.as_strided(saved.shape, saved.stride, saved.lead) for saved, buffer in pairs
        ]
        group.prefetched = None
        return tensors

    def repeated(self, groups: Iterable[OffloadedGroup]) -> Callable[[], None] | None:
        """Return a function that repeats the copies of the prefetched groups among ``groups``.

        Return None if no group is prefetched.
        """
        pairs = [
            (buffer[layout.lead :], layout.part_of(group.block))
            for group in groups
            for buffer, layout in zip(group.prefetched or (), group.layouts)
        ]

        def copy_again() -> None:
            for buffer, source in pairs:
                self._streams.copy(buffer, source)

        return copy_again if pairs else None

    def drop(self, group: OffloadedGroup) -> None:
        """Release the device buffers of a prefetched group without using them."""
        if group.arrived is not None:
            # (4): the copy may still write to the memory that the allocator is about to reuse.
            self._streams.wait_event(group.arrived)
        group.prefetched = None

    def event_after_all(self) -> Any:
        """Let the current stream wait for all copies; return an event that follows all of them."""
        streams = self._streams
        with streams.offload_stream():
            to_host = streams.record_event()
        with streams.prefetch_stream():
            # The prefetch stream waits for the offload stream, so that one event follows both.
            streams.wait_event(to_host)
            both = streams.record_event()
        streams.wait_event(both)
        return both
