"""Offload of activations: copied to the host in the forward pass, prefetched while the backward pass
computes with others. ``README.md`` shows the life of an offloaded tensor.

*Earlier* and *later* mean the order of the forward pass; *next* means the order of the backward
pass, which is the reverse. With n device buffers, the n - 1 groups that are restored next are
prefetched while one is in use. A buffer is ordinary memory of the allocator and belongs to the
caller that holds the tensor: no copy writes to it while it is read, and between backward passes the
forward pass uses the memory. Groups whose sources still exist when they are restored are returned
without a copy back.

There is no lock: the backward pass runs in autograd's thread, and the thread that called it waits
meanwhile. Finalizers run in any thread at any time, but only append to a deque, which is atomic.
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
from megatron_packed.memory.saved_tensors import WRITTEN_TO, SavedByAutograd, SavedTensors

MIN_ELEMENTS = 2**20
"""Megatron's default: a copy of fewer elements costs more than it frees."""


class Offload:
    """Offloader of one model on one device; its `save` is a `SaveTensors`.

    Between the forward and the backward pass of a micro-batch others may come, and a forward pass
    may have no backward pass. Follows [Note: offload stream protocol].

    Args:
        device: of the tensors.
        max_buffers: device buffers to prefetch into, at most; 1 in the first step. With 1 a group
            is copied back only when it is restored.
        headroom_mib: device memory that must stay free beside another buffer.
        min_elements: tensors with fewer stay on the device.
        forced_buffers: exactly this number of buffers; 0 offloads nothing.
        streams: by default those of the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_buffers: int = 2,
        headroom_mib: int = 512,
        min_elements: int = MIN_ELEMENTS,
        forced_buffers: int | None = None,
        streams: OffloadStreams | None = None,
    ) -> None:
        self.streams: OffloadStreams = streams_of(device) if streams is None else streams
        self._device_type = device.type
        self.min_elements = max(min_elements, 1)
        self.buffer_count = DeviceBufferCount(max_buffers, headroom_mib * 2**20, forced_buffers)
        self.pool = PinnedHostPool(self.streams.pinned, self.streams.done)
        self.off_reason: str | None = None
        """Reason why nothing is offloaded any more; None while it is on."""
        self._messages: list[str] = []
        self._said = set[str]()
        self._timer = CopyTimer(self.streams)
        self._copies = OffloadCopies(self.streams, self._timer)
        self._offloaded: dict[int, OffloadedGroup] = {}
        self._order: list[int] = []  # numbers of the offloaded groups, in forward order
        self._with_sources: deque[OffloadedGroup] = deque()
        """Groups whose sources still exist, the oldest first."""
        self._dropped: deque[int] = deque()
        """Numbers of groups whose handle is gone, appended by finalizers."""
        self._number = 0
        self._num_prefetched = 0
        self._largest = 0
        if forced_buffers == 0:
            self.turn_off("MEGATRON_PACKED_OFFLOAD_BUFFERS is 0")
        elif self.streams.shares_host_memory():
            self.turn_off("host and device share their memory")

    @classmethod
    def from_config(
        cls, config: MemoryConfig, device: torch.device | str, forced_buffers: int | None = None
    ) -> Offload:
        """Build the offloader of ``--offload-buffers`` and its related options."""
        return cls(
            torch.device(device),
            max_buffers=config.offload_buffers,
            headroom_mib=config.offload_headroom_mib,
            min_elements=config.min_offloaded_tensor_size,
            forced_buffers=forced_buffers,
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
        if self.off_reason is not None or not any(moved):
            return SavedByAutograd(tensors)
        sources = [tensor for tensor, moves in zip(tensors, moved) if moves]
        layouts, block_bytes = layouts_of(sources)
        # Bounds the device memory that waits for copies: a forward pass that computes faster than
        # the bus copies would otherwise hold every source and save nothing.
        while len(self._with_sources) >= self.buffer_count.now:
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
        # A graph may be dropped without a backward pass: after an exception, or with an unused loss.
        # The finalizer only notes the number: it can run inside any allocation, where queueing
        # stream waits is not safe.
        weakref.finalize(handle, self._dropped.append, number).atexit = False
        return handle

    def restore(self, number: int) -> list[Tensor]:
        """Return the tensors of a group, and prefetch those that are restored next.

        Raises:
            torch.OutOfMemoryError: no memory to copy it into; the group stays restorable.
            RuntimeError: the sources were written to in place while they were held.
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
        self.pool.free(group.block, group.last_copy)
        if group.modified:
            raise RuntimeError(WRITTEN_TO)
        # Last: the copies of the next groups run under the computation that reads these tensors.
        self._prefetch_next(number)
        return tensors

    def _prefetch_next(self, number: int) -> None:
        """Prefetch the groups that are restored next after ``number``, as far as buffers are free."""
        position = bisect_left(self._order, number)
        # 1 for the group that the caller holds now, which occupies a buffer as well.
        while (
            position > 0
            and 1 + len(self._with_sources) + self._num_prefetched < self.buffer_count.now
        ):
            position -= 1
            group = self._offloaded[self._order[position]]
            if group.sources is not None or group.prefetched is not None:
                continue
            try:
                self._copy_back(group)
            except torch.OutOfMemoryError:
                # Prefetch is an optimization: the group is copied when it is restored instead.
                self._shrink_buffers(self._num_prefetched + 1)
                return

    def _copy_back_now(self, group: OffloadedGroup) -> None:
        """Copy a group back for its restore, at the cost of all other buffers.

        Raises:
            torch.OutOfMemoryError: no memory even when nothing else is prefetched.
        """
        try:
            self._copy_back(group)
        except torch.OutOfMemoryError:
            self._shrink_buffers(1)
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
        """Release groups that no backward pass will restore, since their handle is gone."""
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._offloaded:  # else it was restored before its handle went
                group = self._remove(number)
                if group.sources is not None:
                    self._with_sources.remove(group)
                    self._copies.release_sources(group)
                self._drop_prefetched(group)
                self.pool.free(group.block, group.last_copy)

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
        """Let the current stream wait for all copies; release all sources and prefetched buffers.

        After it work may run on another stream. Groups stay restorable, from the host.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            self._drop_prefetched(group)

    def end_step(self) -> None:
        """End a step: begin new statistics, and add a buffer if there is room."""
        moved = self._timer.end_step(self.buffer_count.now)
        self.pool.end_step()
        if self.off_reason is not None:
            return
        if self._largest == 0 and not self._said:
            self._say_once(
                f"offload has moved nothing: no tensor that it is for has {self.min_elements:,} elements "
                f"({flags.MIN_OFFLOADED_TENSOR_SIZE})"
            )
        if self.buffer_count.end_step(self._largest, self.streams.free_bytes):
            self._say_buffers()
        # The number is fixed where graphs are captured, which keep their copies, and where it is
        # forced, because that user wants offload at any cost. Neither turns offload off.
        reason = (
            None if self.figures is None or self.buffer_count.fixed else self.figures.cannot_pay
        )
        if (
            reason is not None
            and self.streams.free_bytes() > moved + self.buffer_count.headroom_bytes
        ):
            self.turn_off(f"{reason}, and the device has room for what was moved")

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Surround the forward and the backward pass of one micro-batch, eager or captured.

        Its end is a `join`: a capture may end there, and work on other streams may follow.
        """
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.join()

    def abandon(self) -> None:
        """Release all device memory of offloaded groups after a pass or a capture failed.

        The host does not wait: a collective that no other rank joins may be queued before the
        copies, and would never end. After an eager pass the current stream waits for all copies.
        During a capture nothing waits, because its events were only recorded.
        """
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
        self.buffer_count.freeze(self._largest, self.streams.free_bytes)
        if self._largest:
            self._say_buffers()
        self.pool.reserve_for_graphs()

    def graph_boundary(self) -> None:
        """Let the current stream wait for all copies; prefetched groups stay for the next graph.

        Called only in captures, last in the graph of a module. Work on another stream belongs to a
        graph only if the capturing stream has waited for it when the capture ends.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            # Without a prefetch the event is of a copy whose buffers are gone: the stream has
            # waited for it, perhaps outside this capture, which must not wait for it again.
            if group.prefetched is not None and group.arrived is not None:
                self.streams.wait_event(group.arrived)
                # An event of this graph must not be waited for in the next one.
                group.arrived = None

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Return a function that repeats the copies of all prefetched groups; None without any.

        Called only between captures. The function is captured as a graph of its own. It is replayed
        when the graph that prefetched was not replayed for this micro-batch.
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
        self.off_reason = reason
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
        self.off_reason = self.off_reason or "it was closed"
        self.reset()
        self.pool.close()

    def _say_buffers(self) -> None:
        self._say_once(
            f"offload: {self.buffer_count.now} device buffer(s) of {self._largest / 2**20:,.1f} MiB"
        )

    def _shrink_buffers(self, to: int) -> None:
        self.buffer_count.shrink(to)
        self._say_once(
            f"offload: device memory is short; {self.buffer_count.now} buffer(s) for now"
        )

    def _say_once(self, sentence: str, details: str = "") -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._messages.append(sentence + details)
