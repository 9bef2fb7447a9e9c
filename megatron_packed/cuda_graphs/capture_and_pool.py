"""Capture of functions in CUDA graphs, and nothing else; tests without a GPU replace it by a stand-in.

A backend owns one memory pool and the stream on which it captures. It knows nothing of modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_packed.torch_private import end_allocate_to_pool, release_pool

T = TypeVar("T")


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Queue it once more, over the same memory."""

    def reset(self) -> None:
        """Free the graph and its memory."""


class GraphBackend(Protocol):
    """Captures functions whose memory comes from one pool.

    Graphs of one pool that leave results in it (those of layers) must be replayed in the order of
    their capture, one capture size at a time: memory that was free again when a graph was captured
    may be used by it. Graphs that leave nothing alive in the pool (those of whole steps) may be
    replayed in any order.
    """

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``function`` once under capture (nothing is computed); its results are where replays
        write.
        """

    def lent(self) -> AbstractContextManager[Any]:
        """Lend the pool to a library that captures by `torch.cuda.graph`; the context gives the pool.

        The library captures on the stream of the captures. After an error everything is as before.
        """

    def take_stream(self) -> None:
        """Make the stream of the captures current; the caller makes another one current afterwards."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Return a context for warm-ups: its work is queued on the stream of the captures.

        Libraries make workspaces for each stream. Memory of the warm-up goes back to the device.
        After an error inside, too, the current stream waits for that work.
        """

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not own it.

        The pool may then use the memory for other captures, while replays still write it here.
        """

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of the generator that modules draw from."""

    def memory_mib(self) -> float:
        """Return the MiB that graphs hold and nothing else can use.

        Memory of graphs that were dropped counts as long as other graphs keep their pool alive.
        """

    def reset(self) -> None:
        """Take a new pool; all graphs of the old one must have been reset.

        A pool does not outlive its last graph: its handle must not be used again.
        """

    def another(self) -> GraphBackend:
        """Return a backend with a pool of its own, which captures on the same stream."""


class Copies(Protocol):
    """Copies of activations to the host and back, on streams of their own (``memory/``).

    [Note: copies between graphs]
    Work on another stream belongs to a graph if it begins and ends in it. So a forward graph copies
    its activations to the host and ends when the copies are done; the memory then serves the graphs
    after it. A backward graph copies back what the next backward graph will read, so that the copy
    runs under its own computation; the memory belongs to the pool and lives until that graph. When
    a backward graph is replayed without the one before it (in an audit, or after a neighbour that
    ran eagerly), a third graph first does the copies that its neighbour would have done.
    """

    def prepare_for_capture(self) -> None:
        """Reserve host memory for graphs, after the warm-ups and before the first capture."""

    def graph_boundary(self) -> None:
        """Let the current stream wait for all copies; called last in a graph of a module."""

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Return a function that repeats all prefetched copies; None if nothing is prefetched."""

    def abandon(self) -> None:
        """Release all device memory after a pass or a capture failed; see `Offload.abandon`."""


class CudaGraphBackend:
    """torch's CUDA graphs on one device.

    Raises:
        ValueError: the device is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need a GPU, and the device is {device}.")
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed = False
        self.reset()

    def reset(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._reserved = 0

    def another(self) -> CudaGraphBackend:
        backend = CudaGraphBackend(self.device)
        # One stream for all pools: cuBLAS keeps a workspace of 64 MiB for every stream.
        backend.stream = self.stream
        return backend

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        if self._failed:
            # Memory of a failed capture is free, but belongs to its pool until it goes back.
            torch.cuda.empty_cache()
            self._failed = False
        before = torch.cuda.memory_reserved(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            # thread_local: the loader's thread pins memory at the same time, and another mode would
            # end the capture with an error for that.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = function()
                # Raises if the function swallowed an error, or did not wait for another stream.
                self._end(graph)
            except BaseException:
                self._failed = True
                self._end_failed(graph)
                raise
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._reserved += torch.cuda.memory_reserved(self.device) - before
        return graph, result

    @staticmethod
    def _end(graph: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():
            # A model without attention and experts has tables without a kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            self._end(graph)
        except RuntimeError:
            # It reports that the capture is invalid; the caller raises the error that made it so.
            self._close_half_open(self._stop_recording())

    def _stop_recording(self) -> bool:
        """Let the allocator record nothing more into the pool; False if it did not."""
        try:
            end_allocate_to_pool(self.device.index, self.pool)
        except RuntimeError:
            return False
        return True

    def _close_half_open(self, recorded: bool) -> None:
        """An invalidated capture is left half open by torch: its allocator goes on recording into
        the pool, and its generator believes in a capture. Both are set right, and the pool is left
        to the graphs that have it.
        """
        index = self.device.index
        if recorded:
            with suppress(RuntimeError):
                release_pool(index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())

    @contextmanager
    def lent(self) -> Iterator[Any]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._failed = False
        before = torch.cuda.memory_reserved(self.device)
        random_state = torch.cuda.get_rng_state(self.device)
        # Without a stream torch.cuda.graph takes a new one, and workspaces would be made twice.
        # Without an error mode the loader's thread could not pin memory during the capture.
        original, current = torch.cuda.graph, torch.cuda.current_stream(self.device)
        ours = partial(original, stream=self.stream, capture_error_mode="thread_local")
        torch.cuda.graph = ours  # type: ignore[assignment, misc]
        try:
            yield self.pool
        except BaseException:
            self._failed = True
            if self._stop_recording():
                self._close_half_open(recorded=True)
            # torch's capture stays on its stream if its end fails.
            torch.cuda.set_stream(current)
            torch.cuda.set_rng_state(random_state, self.device)
            raise
        finally:
            torch.cuda.graph = original  # type: ignore[misc]
        torch.cuda.empty_cache()
        self._reserved += torch.cuda.memory_reserved(self.device) - before

    def take_stream(self) -> None:
        torch.cuda.set_stream(self.stream)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                yield
        except BaseException:
            # A device in error refuses this too, and the first error is the one to report.
            with suppress(RuntimeError):
                self._leave_side_stream()
            raise
        self._leave_side_stream()

    def _leave_side_stream(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        # The allocator keeps blocks for the stream that allocated them, out of the pool's reach.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def borrowed(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        flat = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def random_state(self, device: torch.device) -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def memory_mib(self) -> float:
        return self._reserved / 2**20


class _Memory:
    """The bytes under a tensor, from its first element to its last, for `torch.as_tensor`, which
    does not copy them.
    """

    def __init__(self, tensor: Tensor) -> None:
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        self.__cuda_array_interface__ = {
            "shape": (span * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
