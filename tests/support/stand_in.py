"""Stand-in for CUDA capture: a replay runs the captured function into the same memory.

As on a GPU, a capture performs no communication, so no rank waits for a rank whose capture fails.
The stand-in is stricter in one respect. Between micro-batches, `scramble` fills the memory of
graphs with NaN, which reveals reads of values that the replay did not write.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_packed.distributed import collectives


class RecordedGraph:
    def __init__(self, backend, function, result):
        self.backend, self.function, self.result = backend, function, result
        self.replays = 0
        self.gone = False

    def replay(self):
        assert not self.gone, "a graph was replayed after its reset"
        self.backend.log.append(self)
        self.replays += 1
        copy_into(self.result, self.function())

    def reset(self):
        self.gone = True


class RecordingBackend:
    """Capture backend for the CPU that runs the function and logs every capture and replay.

    Args:
        fail_at: numbers of captures (from 0) that fail.
    """

    def __init__(self, fail_at=()):
        self.fail_at = set(fail_at)
        self.graphs, self.log = [], []
        self.attempts = self.lendings = self.stream_taken = 0
        self.pool_used = False
        self.others = []

    def capture(self, function):
        number, self.attempts = self.attempts, self.attempts + 1
        assert not self.pool_used or any(not graph.gone for graph in self.graphs), (
            "the pool died with its last graph"
        )
        if number in self.fail_at:
            raise torch.OutOfMemoryError(f"capture {number} has no memory")
        with alone():
            result = function()
        graph = RecordedGraph(self, function, result)
        self.graphs.append(graph)
        self.pool_used = True
        return graph, result

    @contextmanager
    def side_stream(self):
        yield

    @contextmanager
    def library_capture(self):
        """Yield this backend to a capture function from outside the project, which captures with
        it.
        """
        self.lendings += 1
        yield self

    def take_stream(self):
        self.stream_taken += 1

    def without_ownership(self, tensor):
        return tensor

    def random_state(self, device):
        return torch.get_rng_state()

    def memory_mib(self):
        return float(sum(not graph.gone for graph in self.graphs))

    def reset(self):
        self.pool_used = False
        assert all(graph.gone for graph in self.graphs), "the pool was renewed under living graphs"

    def another(self):
        self.others.append(RecordingBackend())
        return self.others[-1]

    def scramble(self):
        """Fill all tensors that replays write: floating-point tensors with NaN."""
        for graph in self.graphs:
            if not graph.gone:
                tree_map(_scramble, graph.result)


def _scramble(leaf):
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        with torch.no_grad():
            leaf.fill_(float("nan"))


@contextmanager
def alone():
    """Let collectives return at once inside a ``with`` block.

    Received tensors are zero, in-place results are unchanged, and sums are this rank's part.
    """
    if not dist.is_initialized():
        yield
        return
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (dist, "all_reduce", lambda tensor, **options: _Done()),
            (dist, "all_to_all_single", _nothing_comes),
            (dist, "batch_isend_irecv", _nothing_is_received),
            (collectives, "_all_gather", _nothing_comes),
            (collectives, "_reduce_scatter", _nothing_comes),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


class _Done:
    def wait(self):
        return True


@torch.no_grad()
def _nothing_comes(result, given, *arguments, **options):
    if result.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        result.zero_()
    return _Done()


@torch.no_grad()
def _nothing_is_received(operations):
    for operation in operations:
        if operation.op is dist.irecv:
            operation.tensor.zero_()
    return []


@torch.no_grad()
def copy_into(target, source):
    if isinstance(target, Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for name in target:
            copy_into(target[name], source[name])
    elif isinstance(target, (list, tuple)):
        for one, other in zip(target, source, strict=True):
            copy_into(one, other)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            copy_into(getattr(target, field.name), getattr(source, field.name))
    else:
        assert target == source, "a graph cannot change what is no tensor"
