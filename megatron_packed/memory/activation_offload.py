"""Offload of activations: copied to the host after the forward pass of a part, prefetched while the
backward pass computes later layers. ``README.md`` shows the life of an offloaded tensor.

Groups are restored in the reverse order of the forward pass. With n device buffers, the n - 1
groups before the one that is restored are prefetched while that one is in use. A buffer is ordinary
memory of the allocator and belongs to the caller that holds the tensor: no copy writes to it while
it is read, and between backward passes the forward pass uses the memory. Groups whose sources still
exist when they are restored are returned without a copy back.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.memory.device_buffer_count import DeviceBufferCount
from megatron_packed.memory.offload_copies import OffloadCopies
from megatron_packed.memory.offload_figures import CopyTimer, OffloadFigures
from megatron_packed.memory.offload_streams import OffloadStreams, streams_of
from megatron_packed.memory.offloaded_tensors import OffloadedGroup, OffloadHandle, layouts_of
from megatron_packed.memory.pinned_host_pool import PinnedHostPool
from megatron_packed.memory.saved_tensors import (
    WRITTEN_TO,
    SavedByAutograd,
    SavedTensors,
)

MIN_ELEMENTS = 2**20
"""Megatron's default: a copy of fewer elements costs more than it frees."""


class Offload:
    """Offloader of one model on one device; its `save` is a `SaveTensors`.

    Between the forward and the backward pass of a micro-batch others may come, and a forward pass
    may have no backward pass. Follows [Note: offload stream protocol].

    Args:
        device: of the tensors.
        buffers: device buffers to prefetch into, at most; 1 in the first step. With 1 a group is
            copied back only when it is restored.
        headroom_mib: device memory that must stay free beside another buffer.
        min_elements: tensors with fewer stay on the device.
        forced: exactly this number of buffers; 0 moves nothing.
        streams: by default those of the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        buffers: int = 2,
        headroom_mib: int = 512,
        min_elements: int = MIN_ELEMENTS,
        forced: int | None = None,
        streams: OffloadStreams | None = None,
    ) -> None:
        self.streams: OffloadStreams = streams_of(device) if streams is None else streams
        self._device_type = device.type
        self.min_elements = max(min_elements, 1)
        self.buffers = DeviceBufferCount(buffers, headroom_mib * 2**20, forced)
        self.pool = PinnedHostPool(self.streams.host, self.streams.done)
        self.off: str | None = None
        """Why nothing is moved any more."""
        self._messages: list[str] = []
        self._said = set[str]()
        self._timer = CopyTimer(self.streams)
        self._copies = OffloadCopies(self.streams, self._timer)
        self._offloaded: dict[int, OffloadedGroup] = {}
        self._order: list[int] = []  # numbers of the offloaded groups, sorted
        self._with_sources: deque[OffloadedGroup] = deque()
        """Groups whose sources still exist, the oldest first."""
        # Finalizers append to it, in any thread and at any time; a deque's append is atomic.
        self._dropped: deque[int] = deque()
        self._number = 0
        self._num_prefetched = 0
        self._largest = 0
        if forced == 0:
            self.turn_off("MEGATRON_PACKED_OFFLOAD_BUFFERS is 0")
        elif self.streams.unified():
            self.turn_off("host and device share their memory")

    @classmethod
    def from_config(
        cls, config: MemoryConfig, device: torch.device | str, forced: int | None = None
    ) -> Offload:
        """Build the offloader of ``--offload-buffers`` and its related options."""
        return cls(
            torch.device(device),
            buffers=config.offload_buffers,
            headroom_mib=config.offload_headroom_mib,
            min_elements=config.min_offloaded_tensor_size,
            forced=forced,
        )

    # --- save and restore

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Offload tensors; those that are too small, on another device, or find no host memory stay
        on the device.

        Args:
            tensors: detached; their memory is not written to before they are restored.
        """
        self._release_dropped()
        moved = [
            tensor.numel() >= self.min_elements and tensor.device.type == self._device_type
            for tensor in tensors
        ]
        if self.off is not None or not any(moved):
            return SavedByAutograd(tensors)
        sources = [tensor for tensor, moves in zip(tensors, moved) if moves]
        layouts, block_bytes = layouts_of(sources)
        # Bounds the device memory that waits for copies: a forward pass that computes faster than
        # the bus copies would otherwise hold every source and save nothing.
        while len(self._with_sources) >= self.buffers.now:
            self._copies.release_sources(self._with_sources.popleft())
        try:
            block = self.pool.allocate(block_bytes, captured=self.streams.capturing())
        except torch.OutOfMemoryError as error:
            sentence = "offload: some activations stay on the device, as host memory is short"
            self._say_once(sentence, f": {error}")
            return SavedByAutograd(tensors)
        group = self._copies.to_host(self._number, sources, layouts, block)
        self._add(group)
        stayed = [None if moves else tensor for tensor, moves in zip(tensors, moved)]
        number = group.number  # the handle must not hold the group, whose block returns to the pool
        handle = OffloadHandle(lambda: self.restore(number), stayed)
        # Autograd may drop the graph without a backward pass. The finalizer only notes the number:
        # it can run inside any allocation, where queueing stream waits is not safe.
        weakref.finalize(handle, self._dropped.append, number).atexit = False
        return handle

    def restore(self, number: int) -> list[Tensor]:
        """Return the tensors of a group and prefetch the groups before it; `OffloadHandle` calls it.

        Raises:
            torch.OutOfMemoryError: no memory to copy it into; it may be requested again.
            RuntimeError: it was written to in place before its copy was waited for.
        """
        self._release_dropped()
        group = self._offloaded[number]
        if group.sources is not None:
            # The last groups of a forward pass: still on the device, nothing to copy back.
            tensors = list(group.sources)
            self._with_sources.remove(group)
            self._copies.release_sources(group)
        else:
            if group.prefetched is None:
                self._copy_back_now(group)
            tensors = self._copies.restored(group)
            self._num_prefetched -= 1
        self._remove(number)
        self.pool.free(group.block, group.arrived or group.copied)
        if group.modified:
            raise RuntimeError(WRITTEN_TO)
        # After the tensors are out: the copies of earlier groups run under the computation that
        # reads these.
        self._prefetch_before(number)
        return tensors

    def _prefetch_before(self, number: int) -> None:
        """Prefetch the groups that are restored after ``number``, as far as buffers are free."""
        position = bisect_left(self._order, number)
        # 1 for the group that the caller holds now, which occupies a buffer as well.
        while (
            position > 0 and 1 + len(self._with_sources) + self._num_prefetched < self.buffers.now
        ):
            position -= 1
            group = self._offloaded[self._order[position]]
            if group.sources is not None or group.prefetched is not None:
                continue
            try:
                self._copy_back(group)
            except torch.OutOfMemoryError:
                # Prefetch is an optimization: the group is copied when it is restored instead.
                self._run_short(self._num_prefetched + 1)
                return

    def _copy_back_now(self, group: OffloadedGroup) -> None:
        """Copy a group back for its restore, at the cost of all other buffers.

        Raises:
            torch.OutOfMemoryError: no memory even when nothing else is prefetched.
        """
        try:
            self._copy_back(group)
        except torch.OutOfMemoryError:
            self._run_short(1)
            # Values on the host can be copied again, so every other buffer is expendable.
            self._release_all_sources()
            for other in self._offloaded.values():
                self._drop_prefetched(other)
            self._copy_back(group)

    def _copy_back(self, group: OffloadedGroup) -> None:
        self._copies.from_host(group)
        self._num_prefetched += 1

    def _drop_prefetched(self, group: OffloadedGroup) -> None:
        if group.prefetched is not None:
            self._copies.drop(group)
            self._num_prefetched -= 1

    def _release_all_sources(self) -> None:
        while self._with_sources:
            self._copies.release_sources(self._with_sources.popleft())

    def _release_dropped(self) -> None:
        """Release groups that no backward pass will restore: a graph was dropped, or a forward pass
        raised.
        """
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._offloaded:  # else it was restored before its handle went
                group = self._remove(number)
                self._drop_prefetched(group)
                self.pool.free(group.block, group.arrived or group.copied)

    def _add(self, group: OffloadedGroup) -> None:
        self._number += 1
        self._offloaded[group.number] = group
        self._order.append(group.number)
        self._with_sources.append(group)
        self._largest = max(self._largest, group.num_bytes)

    def _remove(self, number: int) -> OffloadedGroup:
        del self._order[bisect_left(self._order, number)]
        return self._offloaded.pop(number)

    # --- between passes and steps

    def join(self) -> None:
        """Let the current stream wait for all copies, and drop what is prefetched.

        After a backward pass: the next work may run on another stream.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            self._drop_prefetched(group)

    def end_step(self) -> None:
        """End a step: begin new statistics, and add a buffer if there is room."""
        moved = self._timer.end_step(self.buffers.now)
        self.pool.end_step()
        if self.off is not None:
            return
        if self._largest == 0 and not self._said:
            self._say_once(
                f"offload has moved nothing: no tensor that it is for has {self.min_elements:,} elements "
                f"({flags.MIN_OFFLOADED_TENSOR_SIZE})"
            )
        if self.buffers.end_step(self._largest, self.streams.free_bytes):
            self._say_buffers()
        # Captured graphs keep their copies, so only eager runs may turn offload off.
        reason = None if self.figures is None or self.buffers.fixed else self.figures.cannot_pay
        if reason is not None and self.streams.free_bytes() > moved + self.buffers.headroom_bytes:
            self.turn_off(f"{reason}, and the device has room for what was moved")

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Surround a forward pass and its backward pass, and let the current stream wait for all
        copies at the end, so that a capture may end and other streams may follow.
        """
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.join()

    def abandon(self) -> None:
        """Release all device memory after a pass failed, without a wait of the host.

        A collective may be queued before the copies that no other rank joins, so waiting for the
        device could last forever. The current stream waits instead.
        """
        # Events of a failed capture were only recorded and must not be waited for.
        copied = None if self.streams.capturing() else self._copies.event_after_all()
        for group in self._offloaded.values():
            group.sources = None
            group.prefetched = None
            group.arrived = None
            group.copied = group.copied if copied is None else copied
        self._with_sources.clear()
        self._num_prefetched = 0

    # --- CUDA graphs, see [Note: copies between graphs]

    def prepare_for_capture(self) -> None:
        """Fix the number of buffers and reserve host memory, after a pass of all that is captured.

        `reset` and `close` may follow only after the graphs are gone.
        """
        self._release_dropped()
        self._timer.forget()
        self.buffers.freeze(self._largest, self.streams.free_bytes)
        if self._largest:
            self._say_buffers()
        self.pool.reserve_for_graphs()

    def graph_boundary(self) -> None:
        """Let the current stream wait for all copies; what is prefetched stays for the next graph.

        Work on another stream belongs to a graph only if it joins the capturing stream before the
        capture ends.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            if group.arrived is not None:
                self.streams.wait_event(group.arrived)
                # An event of this graph must not be waited for in the next one.
                group.arrived = None

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Return a function that copies all prefetched groups once more, into the same memory, on
        the current stream; None if nothing is prefetched.
        """
        pairs = [
            (buffer[layout.lead :], layout.part_of(group.block))
            for group in self._offloaded.values()
            for buffer, layout in zip(group.prefetched or (), group.layouts)
        ]

        def copy_again() -> None:
            for buffer, source in pairs:
                self.streams.copy(buffer, source)

        return copy_again if pairs else None

    # --- reports, and the end

    @property
    def figures(self) -> OffloadFigures | None:
        """Figures of the last step whose times are known; None before."""
        return self._timer.figures

    def messages(self) -> list[str]:
        """Return new sentences for the log, each of them once."""
        messages = self._messages
        self._messages = []
        return messages

    def turn_off(self, reason: str) -> None:
        """Leave all tensors on the device from now on."""
        self.off = reason
        self._say_once(f"offload is off: {reason}")

    def reset(self) -> None:
        """Release all memory that is not in use. The host waits for the copies."""
        self.join()
        self.streams.synchronize()
        self.pool.reset()

    def close(self) -> None:
        """Release all memory for good: later tensors stay on the device, and blocks in use are
        released when they come back.
        """
        self.off = self.off or "it was closed"
        self.reset()
        self.pool.close()

    def _say_buffers(self) -> None:
        self._say_once(
            f"offload: {self.buffers.now} device buffer(s) of {self._largest / 2**20:,.1f} MiB"
        )

    def _run_short(self, to: int) -> None:
        self.buffers.shrink(to)
        self._say_once(f"offload: device memory is short; {self.buffers.now} buffer(s) from now on")

    def _say_once(self, sentence: str, details: str = "") -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._messages.append(sentence + details)
