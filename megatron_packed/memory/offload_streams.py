"""Offload stream (copies to the host) and prefetch stream (copies from the host) of a device.

Every use queries the current stream. So the same code works for eager steps on any stream, in
autograd's thread for the backward pass, and in captures.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatron_packed.memory.available_host_memory import KEPT_FREE, available_bytes
from megatron_packed.memory_purpose import Purpose, counted_as


class OffloadStreams(Protocol):
    """Current stream, offload stream and prefetch stream of a device.

    Only in `synchronize` does the host wait for the device.
    """

    def record_event(self) -> Any:
        """Record an event on the current stream, after all work queued so far; return the event."""

    def wait_event(self, event: Any) -> None:
        """Make later work on the current stream wait for ``event``."""

    def done(self, event: Any) -> bool:
        """Return True if ``event`` is complete."""

    def timing_event(self) -> Any:
        """Record an event with timing and return it; return None in a capture and without a GPU."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Return the time between two complete timing events, in ms."""

    def offload_stream(self) -> AbstractContextManager[Any]:
        """Return a context that makes the stream of copies to the host current."""

    def prefetch_stream(self) -> AbstractContextManager[Any]:
        """Return a context that makes the stream of copies from the host current."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream.

        The caller must keep both tensors alive until the copy is complete.
        """

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor ``(count,)`` on the device, for the current stream.

        Raises:
            torch.OutOfMemoryError: no device memory.
        """

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate a tensor ``(num_bytes,)`` uint8 in pinned host memory.

        Raises:
            torch.OutOfMemoryError: no host memory, or no host memory that can be pinned.
        """

    def capturing(self) -> bool:
        """Return True if the current stream is under capture, so that its work is only recorded."""

    def free_bytes(self) -> int:
        """Return the smallest free device memory since the start, in bytes.

        Memory that the allocator has reserved but never used counts as free.
        """

    def shares_host_memory(self) -> bool:
        """Return True if host and device share their memory, so that offload would free nothing."""

    def synchronize(self) -> None:
        """Wait until all copies are complete, including copies in graphs. For the end of a run."""


class CpuStreams:
    """Streams of a CPU, where every operation runs immediately and events do nothing."""

    def record_event(self) -> None:
        return None

    def wait_event(self, event: None) -> None:
        return None

    def done(self, event: None) -> bool:
        return True

    def timing_event(self) -> None:
        return None

    def milliseconds(self, begin: None, end: None) -> float:
        raise AssertionError("a CPU has no timing events")

    def offload_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    prefetch_stream = offload_stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capturing(self) -> bool:
        return False

    def free_bytes(self) -> int:
        return 2**62

    def shares_host_memory(self) -> bool:
        # On a CPU, host and device do share their memory. But tests must run the complete offload
        # path on a CPU, so report that they do not.
        return False

    def synchronize(self) -> None:
        return None


class CudaStreams:
    """Streams of one GPU. The two copy streams are created at their first use."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        # A GPU has one copy engine per direction. With two streams, copies in both directions
        # overlap.
        self._offload: torch.cuda.Stream | None = None
        self._prefetch: torch.cuda.Stream | None = None

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def timing_event(self) -> torch.cuda.Event | None:
        # An event that was recorded in a capture has no time.
        if self.capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def offload_stream(self) -> AbstractContextManager[Any]:
        if self._offload is None:
            self._offload = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[Any]", torch.cuda.stream(self._offload))

    def prefetch_stream(self) -> AbstractContextManager[Any]:
        if self._prefetch is None:
            self._prefetch = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[Any]", torch.cuda.stream(self._prefetch))

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate a block on separate pages, and pin the pages with ``cudaHostRegister``.

        torch's allocator of pinned memory is not used, because it rounds sizes up to a power of two.
        Blocks must not share a page, because a page can be registered only once.
        """
        if self.capturing():
            raise torch.OutOfMemoryError("no host memory can be pinned while a graph is captured")
        left = available_bytes()
        if left is not None and num_bytes > left - KEPT_FREE:
            raise torch.OutOfMemoryError(
                f"pinning {num_bytes / 2**20:,.0f} MiB would leave less than {KEPT_FREE / 2**20:,.0f} of the "
                f"{left / 2**20:,.0f} MiB of host memory that are free"
            )
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise torch.OutOfMemoryError(
                f"cannot allocate {num_bytes / 2**20:,.0f} MiB of host memory: {error}"
            ) from error
        block = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
        runtime, address = torch.cuda.cudart(), block.data_ptr()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code != 0:
            self._clear_error()
            text = f"cudaHostRegister of {num_bytes / 2**20:,.0f} MiB failed with error {code}"
            raise torch.OutOfMemoryError(text) if code == _NO_MEMORY else RuntimeError(text)
        # Unregister before the pages return to the system, because another process may get them next.
        # At exit skip this call, because the driver may already be shut down.
        weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
        return block

    def _clear_error(self) -> None:
        """Clear the error of a failed CUDA call, which would otherwise be reported by a later kernel."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def free_bytes(self) -> int:
        # Use the allocator's peak and not its present use: at the peak of the next step the new
        # buffer is in use too.
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(
            self.device
        )
        return int(free + unused)

    def shares_host_memory(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.device).is_integrated)

    def synchronize(self) -> None:
        # Synchronize the device, not single streams: copies in graphs run on internal streams.
        torch.cuda.synchronize(self.device)


_NO_MEMORY = 2
"""Error code ``cudaErrorMemoryAllocation``."""


class MetaStreams(CpuStreams):
    """Streams of the meta device, for estimates: memory without values on device and host."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        with counted_as(Purpose.ACTIVATIONS):
            return torch.empty(count, dtype=dtype, device="meta")

    def pinned(self, num_bytes: int) -> Tensor:
        with counted_as(Purpose.HOST):
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def streams_of(device: torch.device) -> OffloadStreams:
    if device.type == "cuda":
        return CudaStreams(device)
    return MetaStreams() if device.type == "meta" else CpuStreams()
