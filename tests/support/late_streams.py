"""Stand-in for the streams of a GPU that reveals missing waits and uses of freed memory.

Streams run as late, and as much out of order, as the waits between them permit. Memory without an
owner is overwritten. `drain` runs what a GPU may run at some time.
"""

import sys
import weakref
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

COMPUTE, OUT, IN = "compute", "out", "in"
ORDERS = [
    (a, b, c)
    for a in (COMPUTE, OUT, IN)
    for b in (COMPUTE, OUT, IN)
    for c in (COMPUTE, OUT, IN)
    if len({a, b, c}) == 3
]


def alias(tensor):
    """Return a tensor with the same memory and without a reference to the original."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def dirty(memory):
    memory.fill_(255)


class LateStreams:
    """Streams of a device whose operations run only when `drain` or a wait requires them.

    Args:
        order: priority of the streams when several can run.
        prompt: run computation at once, as on a CPU, together with everything that it waits for.
        without: name of the function of the offloader whose waits are left out.
        fail_device, fail_host: numbers (from 0) of the allocations that run out of memory, or
            ``{number: error}``.
    """

    def __init__(
        self,
        order=ORDERS[0],
        *,
        prompt=False,
        without=None,
        fail_device=(),
        fail_host=(),
        free=2**62,
    ):
        self.order, self.prompt, self.without, self.free = order, prompt, without, free
        self.queues = {name: [] for name in (COMPUTE, OUT, IN)}
        self.position = dict.fromkeys(self.queues, 0)
        self.current = COMPUTE
        self.fail = {
            kind: given if isinstance(given, dict) else dict.fromkeys(given)
            for kind, given in (("device", fail_device), ("host", fail_host))
        }
        self.allocations = {"device": 0, "host": 0}
        self.host_bytes = self.most_device_bytes = 0
        self._alive = []
        self.copies = {OUT: 0, IN: 0}
        self.freed = {}
        """Freed memory by address. It stays allocated, so that no other memory gets its address."""
        self.strayed = False
        """True if a copy has read or written freed memory, which may have another owner by then."""

    # Interface that the offloader uses.

    def record_event(self):
        return self.current, len(self.queues[self.current])

    def wait_event(self, mark):
        if sys._getframe(1).f_code.co_name != self.without:
            self._queue(("wait", mark))

    def done(self, mark):
        return self.position[mark[0]] >= mark[1]

    def timing_event(self):
        return None

    @contextmanager
    def _on(self, name):
        before, self.current = self.current, name
        yield
        self.current = before

    def offload_stream(self):
        return self._on(OUT)

    def prefetch_stream(self):
        return self._on(IN)

    def copy(self, target, source):
        assert self.current != COMPUTE and target.dtype == source.dtype
        self.copies[self.current] += target.nbytes
        target, source = alias(target), alias(source)
        self._queue(("run", lambda: self._copy(target, source)))

    def _copy(self, target, source):
        self.strayed |= any(
            one.untyped_storage().data_ptr() in self.freed for one in (target, source)
        )
        target.copy_(source)

    def empty(self, count, dtype):
        self._allocate("device")
        return self.owned(torch.empty(count, dtype=dtype))

    def pinned(self, num_bytes):
        self._allocate("host")
        block = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.host_bytes += num_bytes
        weakref.finalize(block, self._unpinned, num_bytes)
        return block

    def free_bytes(self):
        return self.free

    def shares_host_memory(self):
        return False

    def capturing(self):
        return False

    def synchronize(self):
        self.drain()

    # Interface that tests use.

    def owned(self, tensor):
        """Return ``tensor`` as device memory that is overwritten before and after its life.

        With ``prompt`` the memory is not overwritten at the end, because other tensors of autograd
        may hold it.
        """
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.compute(lambda: dirty(memory))
        if not self.prompt:
            weakref.finalize(tensor, self._freed, memory)
            return tensor
        self._alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        self.most_device_bytes = max(self.most_device_bytes, self.device_bytes)
        return tensor

    @property
    def device_bytes(self):
        """With ``prompt``: bytes of all buffers that are alive."""
        self._alive = [
            (storage, num_bytes) for storage, num_bytes in self._alive if not storage.expired()
        ]
        return sum(num_bytes for _, num_bytes in self._alive)

    def tensor(self, values):
        """Return a tensor that gets ``values`` when the computation stream runs this operation."""
        tensor = self.owned(torch.empty_like(values))
        target = alias(tensor)
        self.compute(lambda: target.copy_(values))
        return tensor

    def compute(self, function):
        with self._on(COMPUTE):
            self._queue(("run", function))

    def drain(self):
        """Run all queued operations."""
        while any(self.position[name] < len(queue) for name, queue in self.queues.items()):
            assert any(self._advance(name) for name in self.order), "streams wait for each other"

    def _queue(self, operation):
        self.queues[self.current].append(operation)
        if self.prompt and self.current == COMPUTE:
            self._run_up_to((COMPUTE, len(self.queues[COMPUTE])))

    def _advance(self, name):
        """Run the next operation of a stream; return False if there is none or it must wait."""
        if self.position[name] == len(self.queues[name]):
            return False
        kind, what = self.queues[name][self.position[name]]
        if kind == "wait" and not self.done(what):
            return False
        if kind == "run":
            what()
        self.queues[name][self.position[name]] = None  # frees the memory that the operation holds
        self.position[name] += 1
        return True

    def _run_up_to(self, mark):
        name, end = mark
        while self.position[name] < end:
            if not self._advance(name):
                self._run_up_to(self.queues[name][self.position[name]][1])

    def _allocate(self, kind):
        number, self.allocations[kind] = self.allocations[kind], self.allocations[kind] + 1
        if number in self.fail[kind]:
            raise self.fail[kind][number] or torch.OutOfMemoryError(f"no memory of the {kind}")

    def _freed(self, memory):
        self.compute(lambda: self._free(memory))

    def _free(self, memory):
        dirty(memory)
        self.freed[memory.data_ptr()] = memory

    def _unpinned(self, num_bytes):
        self.host_bytes -= num_bytes
