"""Activations that wait for their backward pass in the host's memory, and come back while others
are computed.

[Note: offload stream protocol]
Three queues: the stream of computation (whichever is current), one of copies to the host, one of
copies from it. Four waits keep them apart, and the host waits for nothing:

1. A copy to the host waits for what was queued on the current stream when it was asked for: its
  source is computed.
2. The current stream waits for a copy to the host before its source is let go. The allocator gives
   that memory to the next taker on the same stream, so it may be used at once. Until then the
   source is held; there are never more of them than buffers.
3. A copy from the host waits for what was queued on the current stream when its target was
   allocated: whoever had the memory before is done with it. It need not wait for the copy to the
   host, as the current stream has (2).
4. The current stream waits for a copy from the host before its target is handed out, or let go
  unused.

A block of host memory may be used again as soon as its bundle was handed out or let go: the next
copy to it waits for the current stream (1), which has waited for the last copy from it (4).

Bundles come back in the reverse order of their leaving. With n buffers, n - 1 bundles in front of
the one that is handed out are loaded ahead, while it is in use. A buffer is memory of the allocator
like any other: it belongs to whoever holds the tensor, so it is never written to while somebody
reads it, and between backward passes it serves the forward pass. What is still held when its turn
comes is handed out as it is.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.memory.away import Away, Layout, layouts_of
from megatron_packed.memory.buffer_count import BufferCount
from megatron_packed.memory.host_pool import HostPool
from megatron_packed.memory.offload_figures import OffloadFigures, Stopwatch
from megatron_packed.memory.recompute import WRITTEN_TO, Kept, SavedByAutograd, versions_of
from megatron_packed.memory.streams import Streams, streams_of

MIN_ELEMENTS = 2**20
"""Megatron's default: what is smaller is not worth a copy."""


class Offload:
    """Puts tensors away in host memory: its `keep` is what ``memory/recompute.py`` calls a `Keep`.

    One for each model and device. Between the forward and the backward pass of a micro-batch others
    may come; a forward pass may go without its backward pass. Reads: [Note: offload stream
    protocol].

    Args:
        device: of the tensors.
        buffers: to load into, at most; 1 in the first step. With 1 nothing is loaded ahead of its
        use.
        headroom_mib: device memory that must stay free beside another buffer.
        min_elements: tensors with fewer stay on the device.
        forced: exactly so many buffers; 0 moves nothing.
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
        streams: Streams | None = None,
    ) -> None:
        self.streams: Streams = streams_of(device) if streams is None else streams
        self._device_type = device.type
        self.min_elements = max(min_elements, 1)
        self.buffers = BufferCount(buffers, headroom_mib * 2**20, forced)
        self.pool = HostPool(self.streams.host, self.streams.done)
        self.off: str | None = None
        """Why nothing is moved any more."""
        self._news: list[str] = []
        self._said = set[str]()
        self._watch = Stopwatch(self.streams)
        self._away: dict[int, Away] = {}
        self._order: list[int] = []  # the numbers of what is away, sorted
        self._held: deque[Away] = (
            deque()
        )  # of which the sources are still there, in the order of their leaving
        self._dropped: deque[int] = deque()  # written by finalizers, at any time
        self._number = self._loaded = 0
        self._largest = 0
        if forced == 0:
            self.turn_off("MEGATRON_PACKED_OFFLOAD_BUFFERS is 0")
        elif self.streams.unified():
            self.turn_off("host and device share their memory")

    @classmethod
    def from_config(
        cls, config: MemoryConfig, device: torch.device | str, forced: int | None = None
    ) -> Offload:
        """As ``--offload-buffers`` and its friends say."""
        return cls(
            torch.device(device),
            buffers=config.offload_buffers,
            headroom_mib=config.offload_headroom_mib,
            min_elements=config.min_offloaded_tensor_size,
            forced=forced,
        )

    # -------------------------------------------------------------------------------------------------
    # there and back

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Put tensors away; those that are too small, on another device, or find no host memory
        stay where they are.

        Args:
            tensors: detached; nobody writes to their memory before they were taken.
        """
        self._forget_dropped()
        moved = [
            tensor.numel() >= self.min_elements and tensor.device.type == self._device_type
            for tensor in tensors
        ]
        if self.off is not None or not any(moved):
            return SavedByAutograd(tensors)
        sources = [tensor for tensor, moves in zip(tensors, moved) if moves]
        layouts, block_bytes = layouts_of(sources)
        while len(self._held) >= self.buffers.now:
            self._let_go(self._held.popleft())
        try:
            block = self.pool.lend(block_bytes, captured=self.streams.capturing())
        except torch.OutOfMemoryError as error:
            sentence = "offload: some activations stay on the device, as host memory is short"
            self._say_once(sentence, f": {error}")
            return SavedByAutograd(tensors)
        away = self._put(sources, layouts, block)
        stayed = [None if moves else tensor for tensor, moves in zip(tensors, moved)]
        bundle = _Bundle(self, away.number, stayed)
        weakref.finalize(bundle, self._dropped.append, away.number).atexit = False
        return bundle

    def _put(self, sources: list[Tensor], layouts: list[Layout], block: Tensor) -> Away:
        streams, num_bytes = self.streams, sum(layout.num_bytes for layout in layouts)
        computed = streams.mark()
        with streams.outward(), torch.no_grad():
            streams.wait(computed)  # (1)
            begin = self._watch.begin()
            for source, layout in zip(sources, layouts):
                streams.copy(layout.part_of(block), source.as_strided((layout.span,), (1,)))
            self._watch.put(begin, num_bytes)
            away = Away(self._number, layouts, block, num_bytes, streams.mark(), sources)
        self._number += 1
        self._away[away.number] = away
        self._order.append(away.number)
        self._held.append(away)
        self._largest = max(self._largest, num_bytes)
        return away

    def take(self, number: int) -> list[Tensor]:
        """What was put away under a number; then those in front of it are on their way. `_Bundle`
        asks.

        Raises:
            torch.OutOfMemoryError: no memory to load it into; it may be asked for again.
            RuntimeError: somebody has written to it before its copy was awaited.
        """
        self._forget_dropped()
        away = self._away[number]
        if away.sources is not None:
            tensors = list(away.sources)
            self._held.remove(away)
            self._let_go(away)
        else:
            if away.loaded is None:
                self._load_now(away)
            assert away.loaded is not None
            before = self._watch.begin()
            if away.arrival is not None:
                self.streams.wait(away.arrival)  # (4)
            self._watch.waited(before)
            pairs = zip(away.layouts, away.loaded)
            tensors = [loaded.as_strided(one.shape, one.stride, one.lead) for one, loaded in pairs]
            away.loaded = None
            self._loaded -= 1
        self._remove(number)
        self.pool.give_back(away.block, away.arrival or away.copied)
        if away.spoiled:
            raise RuntimeError(WRITTEN_TO)
        self._load_ahead(number)
        return tensors

    def _load_ahead(self, number: int) -> None:
        """Loads what will be asked for after ``number``, into the buffers that nobody has."""
        position = bisect_left(self._order, number)
        while position > 0 and 1 + len(self._held) + self._loaded < self.buffers.now:
            position -= 1
            away = self._away[self._order[position]]
            if away.sources is not None or away.loaded is not None:
                continue
            try:
                self._load(away)
            except torch.OutOfMemoryError:
                self._run_short(self._loaded + 1)
                return

    def _load_now(self, away: Away) -> None:
        """
        Raises:
            torch.OutOfMemoryError: not even when nothing was loaded ahead.
        """
        try:
            self._load(away)
        except torch.OutOfMemoryError:
            self._run_short(1)
            while self._held:
                self._let_go(self._held.popleft())
            for other in self._away.values():
                self._unload(other)
            self._load(away)

    def _load(self, away: Away) -> None:
        streams = self.streams
        targets = [
            streams.empty(layout.lead + layout.span, layout.dtype) for layout in away.layouts
        ]
        free = streams.mark()
        with streams.inward(), torch.no_grad():
            streams.wait(free)  # (3)
            begin = self._watch.begin()
            for target, layout in zip(targets, away.layouts):
                streams.copy(target[layout.lead :], layout.part_of(away.block))
            self._watch.loaded(begin, away.num_bytes)
            away.arrival = streams.mark()
        away.loaded = targets
        self._loaded += 1

    def _unload(self, away: Away) -> None:
        if away.loaded is not None:
            if away.arrival is not None:
                self.streams.wait(away.arrival)  # (4)
            away.loaded = None
            self._loaded -= 1

    def _let_go(self, away: Away) -> None:
        assert away.sources is not None
        self.streams.wait(away.copied)  # (2)
        sources, away.sources = away.sources, None
        away.spoiled = (
            versions_of(sources) != away.versions
        )  # told to who asks for it, as autograd does

    def _forget_dropped(self) -> None:
        """Bundles that nobody asks for any more: a graph that was dropped, an exception in
        mid-forward.
        """
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._away:
                away = self._remove(number)
                self._unload(away)
                self.pool.give_back(away.block, away.arrival or away.copied)

    def _remove(self, number: int) -> Away:
        del self._order[bisect_left(self._order, number)]
        return self._away.pop(number)

    # ----------------------------------------------------------------------------------------------
    # between the steps

    def join(self) -> None:
        """The current stream waits for all copies. Behind a backward pass: what comes next may use
        another stream.
        """
        self._forget_dropped()
        while self._held:
            self._let_go(self._held.popleft())
        for away in self._away.values():
            self._unload(away)

    def end_step(self) -> None:
        """Behind a step: there may be another buffer from now on, and a new page of statistics."""
        moved = self._watch.end_step(self.buffers.now)
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
        reason = None if self.figures is None or self.buffers.fixed else self.figures.cannot_pay
        if reason is not None and self.streams.free_bytes() > moved + self.buffers.headroom_bytes:
            self.turn_off(f"{reason}, and the device has room for what was moved")

    def settle(self) -> None:
        """Before graphs are captured, behind a pass of all that will be: the number of buffers
        stays, and host memory is set apart for the graphs. `reset` and `close` only after they are
        gone.
        """
        self._forget_dropped()
        self._watch.forget()
        self.buffers.settle(self._largest, self.streams.free_bytes)
        if self._largest:
            self._say_buffers()
        self.pool.set_apart()

    def seam(self) -> None:
        """The current stream waits for all copies; what is loaded ahead stays. See [Note: copies
        between graphs].
        """
        self._forget_dropped()
        while self._held:
            self._let_go(self._held.popleft())
        for away in self._away.values():
            if away.arrival is not None:
                self.streams.wait(away.arrival)
                away.arrival = None

    def loaded_ahead(self) -> Callable[[], None] | None:
        """Copies what is loaded ahead once more, into the same memory, on the current stream; None
        if nothing is.
        """
        pairs = [
            (loaded[layout.lead :], layout.part_of(away.block))
            for away in self._away.values()
            for loaded, layout in zip(away.loaded or (), away.layouts)
        ]

        def again() -> None:
            for loaded, source in pairs:
                self.streams.copy(loaded, source)

        return again if pairs else None

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Around a forward pass and its backward pass: behind it the current stream has waited for
        all copies, so that what comes next may use another stream, and a capture may end.
        """
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.join()

    def abandon(self) -> None:
        """A pass has failed, perhaps inside a capture, whose marks nobody may wait for: the current
        stream waits for new ones, behind all copies, unless these were only recorded. The host
        waits for nothing: a collective may be queued in front of them that no other rank comes to.
        """
        copied = None if self.streams.capturing() else self._all_copied()
        for away in self._away.values():
            away.sources, away.loaded, away.arrival = None, None, None
            away.copied = away.copied if copied is None else copied
        self._held.clear()
        self._loaded = 0

    def _all_copied(self) -> Any:
        streams = self.streams
        with streams.outward():
            put = streams.mark()
        with streams.inward():
            streams.wait(put)
            copied = streams.mark()
        streams.wait(copied)
        return copied

    @property
    def figures(self) -> OffloadFigures | None:
        """Of the last step that is known of; None before."""
        return self._watch.figures

    def news(self) -> list[str]:
        """What has become known since it was asked for last, in sentences, each of them once."""
        news, self._news = self._news, []
        return news

    def turn_off(self, reason: str) -> None:
        """From now on everything stays on the device."""
        self.off = reason
        self._say_once(f"offload is off: {reason}")

    def reset(self) -> None:
        """Give up all memory that is not in use. The host waits for the copies."""
        self.join()
        self.streams.synchronize()
        self.pool.reset()

    def close(self) -> None:
        """As `reset`, for good: what is put away now stays on the device, and blocks in use go when
        they come back.
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
            self._news.append(sentence + details)


class _Bundle:
    """What `Offload.keep` returns. Who lets go of it lets go of what was put away."""

    def __init__(self, offload: Offload, number: int, stayed: list[Tensor | None]) -> None:
        self._offload, self._number, self._stayed = offload, number, stayed
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return versions_of(tensor for tensor in self._stayed if tensor is not None)

    def take(self) -> Sequence[Tensor]:
        moved = iter(self._offload.take(self._number))
        if self._versions_now() != self._versions:
            raise RuntimeError(WRITTEN_TO)
        return [next(moved) if tensor is None else tensor for tensor in self._stayed]
