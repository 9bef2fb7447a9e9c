"""Queues of copies beside the stream of computation: what moves activations asks for, on a GPU and
on a CPU.

The current stream is looked up at every use, so the same code serves eager steps on any stream, the
autograd engine's thread, and captures.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megatron_packed.memory.host_memory import KEPT_FREE, available_bytes


class Streams(Protocol):
    """The current stream, one for copies to the host and one for copies from it. Nothing here waits
    for the device.
    """

    def mark(self) -> Any:
        """A moment: everything that is queued on the current stream by now."""

    def wait(self, mark: Any) -> None:
        """What is queued on the current stream from now on runs behind ``mark``."""

    def done(self, mark: Any) -> bool:
        """Whether the device has come to ``mark``."""

    def clock(self) -> Any:
        """A mark that knows its time; None where there is none to be had (in a capture, without a
        GPU).
        """

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Between two marks of `clock` that are done."""

    def outward(self) -> AbstractContextManager[Any]:
        """Inside, the current stream is the one of copies to the host."""

    def inward(self) -> AbstractContextManager[Any]:
        """Inside, the current stream is the one of copies from the host."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream; both stay valid until it is done, which is the
        caller's business.
        """

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """``(count,)`` on the device; the memory belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: there is no memory.
        """

    def host(self, num_bytes: int) -> Tensor:
        """``(num_bytes,)`` uint8 on the host, which the device can copy to and from by itself.

        Raises:
            torch.OutOfMemoryError: there is no memory, or none that can be pinned.
        """

    def capturing(self) -> bool:
        """Whether what is queued on the current stream is recorded for a graph, and not run."""

    def free_bytes(self) -> int:
        """What the device's memory has left at the worst moment since the start, counting what the
        allocator holds without using it.
        """

    def unified(self) -> bool:
        """Whether host and device share their memory, so that moving something there frees nothing."""

    def synchronize(self) -> None:
        """The host waits until every copy is done, those of graphs included. For the end."""


class HostStreams:
    """On a CPU: one thread, in which everything is done as soon as it is asked for."""

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    def done(self, mark: None) -> bool:
        return True

    def clock(self) -> None:
        return None

    def milliseconds(self, begin: None, end: None) -> float:
        raise AssertionError("there are no clocks to ask")

    def outward(self) -> AbstractContextManager[None]:
        return nullcontext()

    inward = outward

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capturing(self) -> bool:
        return False

    def free_bytes(self) -> int:
        return 2**62

    def unified(self) -> bool:
        """It is, but a CPU is where everything is tried out."""
        return False

    def synchronize(self) -> None:
        return None


class CudaStreams:
    """Of one GPU. The streams of copies are made when they are first used."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._out: torch.cuda.Stream | None = None
        self._in: torch.cuda.Stream | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def done(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def clock(self) -> torch.cuda.Event | None:
        if self.capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def outward(self) -> AbstractContextManager[Any]:
        if self._out is None:
            self._out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[Any]", torch.cuda.stream(self._out))

    def inward(self) -> AbstractContextManager[Any]:
        if self._in is None:
            self._in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return cast("AbstractContextManager[Any]", torch.cuda.stream(self._in))

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def host(self, num_bytes: int) -> Tensor:
        """Pages of its own, pinned by registering them: torch's own allocator of pinned memory
        rounds up to a power of two, and a page that two blocks share can be registered once only.
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
            self._forget_error()
            text = f"cudaHostRegister of {num_bytes / 2**20:,.0f} MiB failed with error {code}"
            raise torch.OutOfMemoryError(text) if code == _NO_MEMORY else RuntimeError(text)
        # Before the memory goes back to the system, where it might be used for something else while
        # still registered.
        weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
        return block

    def _forget_error(self) -> None:
        """The runtime tells of a failed call again at the next kernel, whoever launches it."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(
            self.device
        )
        return int(free + unused)

    def unified(self) -> bool:
        return bool(torch.cuda.get_device_properties(self.device).is_integrated)

    def synchronize(self) -> None:
        torch.cuda.synchronize(
            self.device
        )  # graphs have their copies done on no stream that anybody knows


_NO_MEMORY = 2
"""cudaErrorMemoryAllocation."""


def streams_of(device: torch.device) -> Streams:
    """What there is on a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
