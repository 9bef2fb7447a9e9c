"""Offload of activations: copies to the host in the forward pass, prefetch in the backward pass.

``README.md`` describes the life of an offloaded tensor. *Earlier* and *later* mean the order of the
forward pass; *next* means the order of the backward pass, which is the reverse.

With n device buffers, up to n - 1 groups are prefetched while one group is in use. On an H200, a
step that recomputes layers takes 1.09 times as long if their inputs are offloaded with one buffer,
and 1.004 times with two (2026-11-29). A buffer is ordinary memory of torch's allocator and belongs
to the caller that holds the tensor. So no copy writes to it while it is read, and between backward
passes the forward pass uses its memory. Groups whose sources still exist when they are restored are
returned without a copy back.

There is no lock: the backward pass runs in autograd's thread, while the thread that called it waits.
Finalizers run in any thread at any time, but only append to a deque, which is atomic.
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
    """Offloader of one model on one device. Its `save` is a `SaveTensors` function.

    Other micro-batches may run between the forward and the backward pass of a micro-batch, and a
    forward pass may have no backward pass. Follows [Note: offload stream protocol].

    Args:
        device: device of the tensors.
        max_buffers: largest number of device buffers for restored groups. The first step uses one.
            With one buffer nothing is prefetched, and a group is copied back when it is restored.
        headroom_mib: device memory that must stay free in addition to a new buffer.
        min_elements: tensors with fewer elements stay on the device.
        forced_buffers: fixed number of buffers; 0 offloads nothing.
        streams: streams to use; by default those of ``device``.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        max_buffers: int = 2,
        headroom_mib: int = 512,
        min_elements: int = MIN_ELEMENTS,
        forced_buffers: int | None = None,
        streams: OffloadStreams | None = None,
    ) -> None:
        device = torch.device(device)
        self.streams: OffloadStreams = streams_of(device) if streams is None else streams
        self._device_type = device.type
        self.min_elements = max(min_elements, 1)
        self.buffer_count = DeviceBufferCount(max_buffers, headroom_mib * 2**20, forced_buffers)
        self.pool = PinnedHostPool(self.streams.pinned, self.streams.done)
        self.off_reason: str | None = None
        """Reason why offload is off; None while it is on."""
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
            device,
            max_buffers=config.offload_buffers,
            headroom_mib=config.offload_headroom_mib,
            min_elements=config.min_offloaded_tensor_size,
            forced_buffers=forced_buffers,
        )

    # --- save and restore

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Offload tensors, except small tensors and tensors of another device.

        If no host memory can be pinned, all tensors stay on the device.

        Args:
            tensors: detached tensors, whose memory must not be written to until they are restored.
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
        # Without this limit, sources would fill the device if computation is faster than the copies.
        while len(self._with_sources) >= self.buffer_count.now:
            self._copies.release_sources(self._with_sources.popleft())
        try:
            block = self.pool.allocate(block_bytes, captured=self.streams.capturing())
        except torch.OutOfMemoryError as error:
            sentence = "offload: some activations stay on the device, because host memory is short"
            self._say_once(sentence, f": {error}")
            return SavedByAutograd(tensors)
        group = self._copies.to_host(self._number, sources, layouts, block)
        self._add(group)
        stayed = [None if moves else tensor for tensor, moves in zip(tensors, moved)]
        number = group.number  # not `group`: the handle must not keep its host block alive
        handle = OffloadHandle(lambda: self.restore(number), stayed)
        # A graph may be dropped without a backward pass: after an exception, or with an unused loss.
        # The finalizer only notes the number: it can run inside any allocation, where queueing
        # stream waits is not safe.
        weakref.finalize(handle, self._dropped.append, number).atexit = False
        return handle

    def restore(self, number: int) -> list[Tensor]:
        """Return the tensors of a group, and prefetch the groups that are restored next.

        Args:
            number: number of the group.
        Raises:
            torch.OutOfMemoryError: no device memory for the tensors; the group stays restorable.
            RuntimeError: the sources were written to in place before they were released.
        """
        self._release_dropped()
        group = self._offloaded[number]
        if group.sources is not None:
            # This group is one of the last of the forward pass, and is still on the device.
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
        # Prefetch last, so that these copies overlap with the computation that reads the tensors.
        self._prefetch_next(number)
        return tensors

    def _prefetch_next(self, number: int) -> None:
        """Prefetch the groups that are restored after group ``number``, while buffers are free."""
        position = bisect_left(self._order, number)
        # The group that the caller holds now also occupies a buffer: count 1 for it.
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
                # Prefetch is only an optimization: the group is copied back at its restore instead.
                self._shrink_buffers(self._num_prefetched + 1)
                return

    def _copy_back_now(self, group: OffloadedGroup) -> None:
        """Copy a group back for its restore; if memory is short, release all other buffers first.

        Raises:
            torch.OutOfMemoryError: no device memory, even after all other buffers were released.
        """
        try:
            self._copy_back(group)
        except torch.OutOfMemoryError:
            self._shrink_buffers(1)
            # All other groups have a copy on the host, so their device memory can be released.
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
        """Release groups whose handle is gone, so that no backward pass can restore them."""
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._offloaded:  # else the group was restored before its handle was freed
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

        Afterwards work may run on another stream. Groups stay restorable from the host.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            self._drop_prefetched(group)

    def end_step(self) -> None:
        """Start the next step's statistics; add a buffer, or turn offload off if it costs time."""
        moved = self._timer.end_step(self.buffer_count.now)
        self.pool.end_step()
        if self.off_reason is not None:
            return
        if self._largest == 0 and not self._said:
            self._say_once(
                "offload has moved nothing: no activation that the options select has "
                f"{self.min_elements:,} elements ({flags.MIN_OFFLOADED_TENSOR_SIZE})"
            )
        if self.buffer_count.end_step(self._largest, self.streams.free_bytes):
            self._say_buffers()
        # The number of buffers is fixed in two cases, and offload then stays on. Captured graphs
        # contain the copies and cannot drop them. A user who forces a number always needs offload.
        reason = (
            None if self.figures is None or self.buffer_count.fixed else self.figures.cannot_pay
        )
        if (
            reason is not None
            and self.streams.free_bytes() > moved + self.buffer_count.headroom_bytes
        ):
            self.turn_off(f"{reason}, and the device has free memory for all offloaded activations")

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Return a context for the forward and backward pass of one micro-batch, eager or captured.

        The context ends with `join`, so that a capture may end, or work on other streams may
        follow.
        """
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.join()

    def abandon(self) -> None:
        """Release all device memory of offloaded groups after a pass or a capture failed.

        The host must not wait: a collective that other ranks do not join may be queued before the
        copies. After an eager pass the current stream waits for all copies. In a capture it does not,
        because the events of a failed capture never complete.
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
        """Fix the number of buffers, and reserve the free host blocks for graphs.

        Call it after eager passes over everything that will be captured. Call `reset` and `close`
        only after the graphs are freed.
        """
        self._release_dropped()
        self._timer.forget()
        self.buffer_count.freeze(self._largest, self.streams.free_bytes)
        if self._largest:
            self._say_buffers()
        self.pool.reserve_for_graphs()

    def graph_boundary(self) -> None:
        """Let the current stream wait for all copies; prefetched groups stay for the next graph.

        Call this method only in captures, at the end of a module's graph. A capture is valid only
        if the capture stream has waited for all work that was queued on other streams.
        """
        self._release_dropped()
        self._release_all_sources()
        for group in self._offloaded.values():
            # Skip groups that are not prefetched: a stream has already waited for their last copy.
            if group.prefetched is not None and group.arrived is not None:
                self.streams.wait_event(group.arrived)
                # The next graph must not wait for an event that was recorded in this graph.
                group.arrived = None

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Return a function that repeats the copies of all prefetched groups; None without groups.

        Call this method only between captures. The caller captures the returned function as a
        separate graph. That graph is replayed if the graph with the prefetch was not replayed for a
        micro-batch.
        """
        return self._copies.repeated(self._offloaded.values())

    # --- reports, and the end of offloading

    @property
    def figures(self) -> OffloadFigures | None:
        """Figures of the last step whose times are known; None if there is none."""
        return self._timer.figures

    def messages(self) -> list[str]:
        """Return the messages for the log since the last call; each message is returned once."""
        messages = self._messages
        self._messages = []
        return messages

    def turn_off(self, reason: str) -> None:
        """Stop offloading, and log ``reason``: tensors that are saved later stay on the device."""
        self.off_reason = reason
        self._say_once(f"offload is off: {reason}")

    def reset(self) -> None:
        """Release all sources, prefetched buffers and free host blocks. The host waits for copies."""
        self.join()
        self.streams.synchronize()
        self.pool.reset()

    def close(self) -> None:
        """Turn offload off and release its memory; a block in use is released after its use."""
        self.off_reason = self.off_reason or "the offloader was closed"
        self.reset()
        self.pool.close()

    def _say_buffers(self) -> None:
        self._say_once(
            f"offload: {self.buffer_count.now} device buffer(s) of {self._largest / 2**20:,.1f} MiB"
        )

    def _shrink_buffers(self, to: int) -> None:
        self.buffer_count.shrink(to)
        self._say_once(
            f"offload: device memory is short; using {self.buffer_count.now} device buffer(s) for now"
        )

    def _say_once(self, sentence: str, details: str = "") -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._messages.append(sentence + details)
