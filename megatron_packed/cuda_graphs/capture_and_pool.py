"""Capture of functions in CUDA graphs. Tests without a GPU replace this module's backend by a fake.

A backend owns one memory pool and the stream on which it captures. It captures any function, and
does not depend on modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_packed.memory.saved_tensors import span_of
from megatron_packed.torch_private import end_allocate_to_pool, release_pool

T = TypeVar("T")


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Queue the captured kernels on the current stream; they use the same memory every time."""

    def reset(self) -> None:
        """Free the graph and its memory."""


class GraphBackend(Protocol):
    """Capture of functions whose memory comes from one pool.

    Graphs of layers leave results in the pool. Such graphs must be replayed in the order of their
    capture, one capture size at a time: a graph may use any memory that was free when the graph was
    captured. Graphs of whole steps leave nothing alive in the pool and may be replayed in any order.
    """

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        """Capture ``function``; return the graph and the results of ``function``.

        ``function`` is called once, and its kernels are recorded but not executed. Replays write to
        the memory of the returned results.
        """

    def library_capture(self) -> AbstractContextManager[Any]:
        """Return a context in which a library captures into this pool by `torch.cuda.graph`.

        The context yields the pool's handle. The library captures on this backend's stream. An
        error inside restores the stream, the random state and `torch.cuda.graph`.
        """

    def take_stream(self) -> None:
        """Make the capture stream current. The caller must make another stream current afterwards."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Return a context for warm-ups, whose work is queued on the capture stream.

        Libraries allocate their workspaces per stream, so the warm-up must use the capture stream.
        At the end the current stream waits for the work, also after an error. Memory of the warm-up
        is returned to the device.
        """

    def without_ownership(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep the memory allocated.

        When the original tensor is freed, the pool may use its memory for later captures. Replays
        of the earlier graph still write to the memory, where the returned tensor reads the result.
        """

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of the generator from which modules draw random numbers."""

    def memory_mib(self) -> float:
        """Return the MiB that graphs hold and nothing else can use.

        Memory of graphs that were reset still counts as long as other graphs keep their pool alive.
        """

    def reset(self) -> None:
        """Switch to a new pool; all graphs of the old pool must have been reset before.

        A pool is freed together with its last graph, and its handle must not be used again.
        """

    def another(self) -> GraphBackend:
        """Return a backend with a separate pool that captures on the same stream."""


class Copies(Protocol):
    """Copies of activations to the host and back, on separate copy streams (``memory/``).

    [Note: copies between graphs]
    Work on another stream belongs to a graph only if the work begins and ends in that graph. So a
    forward graph copies its activations to the host, and ends after the copies are complete. Later
    graphs can then use the device memory of these activations. A backward graph copies back the
    activations that the next backward graph will read, so that the copy overlaps with computation.
    Their memory belongs to the pool and stays allocated until that next backward graph. A backward
    graph is sometimes replayed without the backward graph before it: in an audit, or after a
    neighbour that ran eagerly. Then a third graph is replayed first, which makes the copies that
    the neighbour would have made.
    """

    def prepare_for_capture(self) -> None:
        """Reserve host memory for graphs, after the warm-ups and before the first capture."""

    def graph_boundary(self) -> None:
        """Let the current stream wait for all copies. Called as the last step of a module's graph."""

    def prefetched_copies(self) -> Callable[[], None] | None:
        """Return a function that repeats all prefetched copies; None if nothing is prefetched."""

    def abandon(self) -> None:
        """Release all device memory of copies after a pass or capture failed; see `Offload.abandon`."""


class CudaGraphBackend:
    """Backend that captures with torch's CUDA graphs on one device.

    Raises:
        ValueError: the device is not a GPU.
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
        # All pools share one stream, because cuBLAS allocates a workspace of 64 MiB per stream.
        backend.stream = self.stream
        return backend

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        if self._failed:
            # Memory of a failed capture is free, but stays reserved for its pool until it is returned
            # to the device.
            torch.cuda.empty_cache()
            self._failed = False
        reserved_before = torch.cuda.memory_reserved(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            # Use thread_local, because the loader's thread pins memory at the same time. In the
            # other modes pinning would make the capture fail.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = function()
                # Ending the capture raises an error if `function` suppressed a CUDA error. It also
                # raises one if `function` queued work on another stream and did not join it to the
                # capture stream.
                self._end(graph)
            except BaseException:
                self._failed = True
                self._end_failed(graph)
                raise
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._reserved += torch.cuda.memory_reserved(self.device) - reserved_before
        return graph, result

    @staticmethod
    def _end(graph: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():
            # Ignore this warning: in a model without attention and experts, the graph of the shared
            # tables contains no kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            self._end(graph)
        except RuntimeError:
            # This error only reports that the capture is invalid. The caller raises the first error,
            # which made the capture invalid.
            self._close_half_open(self._stop_recording())

    def _stop_recording(self) -> bool:
        """Stop the allocator from recording into the pool; return False if it was not recording."""
        try:
            end_allocate_to_pool(self.device.index, self.pool)
        except RuntimeError:
            return False
        return True

    def _close_half_open(self, recorded: bool) -> None:
        """Clean up after an invalidated capture, which torch does not end completely.

        The caller has already stopped the allocator from recording into the pool. This method drops
        the allocator's reference to the pool and takes the random generator out of its capture
        state. The backend switches to a new pool; the old pool stays with the graphs that were
        captured into it.

        Args:
            recorded: True if the allocator was recording into the pool, so that it holds a reference.
        """
        index = self.device.index
        if recorded:
            with suppress(RuntimeError):
                release_pool(index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())

    @contextmanager
    def library_capture(self) -> Iterator[Any]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._failed = False
        reserved_before = torch.cuda.memory_reserved(self.device)
        random_state = torch.cuda.get_rng_state(self.device)
        # Without a stream argument torch.cuda.graph captures on a new stream, and libraries would
        # allocate a second set of workspaces. Without this error mode the capture would fail when the
        # loader's thread pins memory.
        original, current = torch.cuda.graph, torch.cuda.current_stream(self.device)
        ours = partial(original, stream=self.stream, capture_error_mode="thread_local")
        torch.cuda.graph = ours  # type: ignore[assignment, misc]
        try:
            yield self.pool
        except BaseException:
            self._failed = True
            if self._stop_recording():
                self._close_half_open(recorded=True)
            # If the end of a capture fails, torch.cuda.graph leaves the capture stream current.
            torch.cuda.set_stream(current)
            torch.cuda.set_rng_state(random_state, self.device)
            raise
        finally:
            torch.cuda.graph = original  # type: ignore[misc]
        torch.cuda.empty_cache()
        self._reserved += torch.cuda.memory_reserved(self.device) - reserved_before

    def take_stream(self) -> None:
        torch.cuda.set_stream(self.stream)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self.stream):
                yield
        except BaseException:
            # After a device error these calls fail too, and only the first error must be reported.
            with suppress(RuntimeError):
                self._leave_side_stream()
            raise
        self._leave_side_stream()

    def _leave_side_stream(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        # The allocator caches freed blocks per stream, where the graph pool cannot use them. So wait
        # until the work is complete, and return the blocks to the device.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def without_ownership(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        flat = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def random_state(self, device: torch.device) -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def memory_mib(self) -> float:
        return self._reserved / 2**20


class NoGraphs:
    """Backend for a device without CUDA graphs. It captures nothing, and its contexts do nothing."""

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        raise AssertionError("StepGraphs must not capture if off_reason is set")

    def library_capture(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def take_stream(self) -> None:
        pass

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def without_ownership(self, tensor: Tensor) -> Tensor:
        return tensor

    def random_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def memory_mib(self) -> float:
        return 0.0

    def reset(self) -> None:
        pass

    def another(self) -> NoGraphs:
        return self


class _Memory:
    """Bytes of a tensor from its first to its last element, in a form that `torch.as_tensor` accepts.

    `torch.as_tensor` then returns a tensor over the same memory, without a copy and without ownership.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (span_of(tensor) * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


@contextmanager
def addresses_noted(saved: set[int]) -> Iterator[None]:
    """Add the addresses of all tensors that autograd saves within this context to ``saved``."""

    def note(tensor: Tensor) -> Tensor:
        saved.add(address_of(tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its elements share memory, as after ``expand``."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.contiguous() if overlaps else tensor
