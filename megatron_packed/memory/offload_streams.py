"""The offload stream (copies to the host) and the prefetch stream (copies back) of a device.

The current stream is looked up at every use, so the same code serves eager steps on any stream, the
thread that autograd runs the backward pass in, and captures.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatron_packed.memory.available_host_memory import KEPT_FREE, available_bytes


class OffloadStreams(Protocol):
    """The current stream, the offload stream and the prefetch stream. Only `synchronize` waits for
    the device.
    """

    def record_event(self) -> Any:
        """Return an event after everything that is queued on the current stream."""

    def wait_event(self, event: Any) -> None:
        """Let later work of the current stream run after ``event``."""

    def done(self, event: Any) -> bool:
        """Return True if the device has passed ``event``."""

    def timing_event(self) -> Any:
        """Return an event that knows its time; None in a capture and without a GPU."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Return the time between two timing events that are done."""

    def offload_stream(self) -> AbstractContextManager[Any]:
        """Make the stream of copies to the host the current one."""

    def prefetch_stream(self) -> AbstractContextManager[Any]:
        """Make the stream of copies from the host the current one."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream; the caller keeps both alive until it is done."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return ``(count,)`` on the device; the memory belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: there is no memory.
        """

    def pinned(self, num_bytes: int) -> Tensor:
        """Return ``(num_bytes,)`` uint8 on the host that the device can copy to and from by itself.

        Raises:
            torch.OutOfMemoryError: there is no memory, or none that can be pinned.
        """

    def capturing(self) -> bool:
        """Return True if work of the current stream is recorded for a graph and not run."""

    def free_bytes(self) -> int:
        """Return the device memory that was free at the worst moment since the start, counting what
        the allocator holds without using it.
        """

    def shares_host_memory(self) -> bool:
        """Return True if host and device share their memory, so that offload frees nothing."""

    def synchronize(self) -> None:
        """Wait until every copy is done, those of graphs included. For the end of a run."""


class CpuStreams:
    """Streams of a CPU: one thread, in which everything is done as soon as it is queued."""

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
        # Its memory is shared indeed, but on a CPU the whole path is run for tests.
        return False

    def synchronize(self) -> None:
        return None


class CudaStreams:
    """Streams of one GPU. The two copy streams are created when they are first used."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        # Two streams, because a GPU has a copy engine for each direction: both copy at once.
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
        # An event that was recorded in a capture has no time of its own.
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
        """Return a block on pages of its own, pinned by registering them.

        torch's allocator of pinned memory rounds up to a power of two. A page that two blocks share
        could be registered only once.
        """
        if self.capturing():
            raise torch.OutOfMemoryError("no host memory can be pinned while a graph is captured")
        left = available_bytes()
        if left is not None and num_bytes > left - KEPT_FREE:
            raise torch.OutOfMemoryError(
                f"{num_bytes / 2**20:,.0f} MiB more would leave less than {KEPT_FREE / 2**20:,.0f} of the "
                f"{left / 2**20:,.0f} MiB of host memory that are free"
            )
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise torch.OutOfMemoryError(
                f"no {num_bytes / 2**20:,.0f} MiB of host memory: {error}"
            ) from error
        block = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
        runtime, address = torch.cuda.cudart(), block.data_ptr()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code != 0:
            self._clear_error()
            text = f"cudaHostRegister of {num_bytes / 2**20:,.0f} MiB failed with error {code}"
            raise torch.OutOfMemoryError(text) if code == _NO_MEMORY else RuntimeError(text)
        # Unregister before the pages return to the system: memory that another process gets must
        # not be pinned for this device. Not at exit: the driver may be gone by then.
        weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
        return block

    def _clear_error(self) -> None:
        """Clear the error of a failed call, which the runtime reports again at the next kernel."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def free_bytes(self) -> int:
        # The allocator's peak, not its present use: buffers are held when memory is shortest.
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(
            self.device
        )
        return int(free + unused)

    def shares_host_memory(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.device).is_integrated)

    def synchronize(self) -> None:
        # The whole device: copies inside graphs run on streams that have no handle here.
        torch.cuda.synchronize(self.device)


_NO_MEMORY = 2
"""cudaErrorMemoryAllocation."""


def streams_of(device: torch.device) -> OffloadStreams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
