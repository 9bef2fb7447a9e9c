"""Streams that run as late, and as much out of order, as the waits between them allow; and memory
that is dirty whenever nobody owns it. What a GPU may do, some time, `drain` does.
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
    """The same memory, and no reference to the tensor: how a kernel sees it."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def dirty(memory):
    memory.fill_(255)


class LateStreams:
    """
    Args:
        order: which stream runs first whenever several may. With ``prompt``, computation runs when
            it is asked for, as on a CPU, and drags along what it waits for.
        without: name of the function of the offloader whose waits are left out.
        fail_device, fail_host: numbers (from 0) of the allocations that find no memory, or
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
        """Address -> memory that was given back; it is kept, so that no other gets its address."""
        self.strayed = False
        """Whether a copy has come upon such memory, which belongs to somebody else by then."""

    # What the offloader asks for.

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

    # What a test asks for.

    def owned(self, tensor):
        """``tensor`` as memory of the device's allocator: dirty before, and dirty when nobody has
        it any more.

        With ``prompt`` that is not seen: autograd holds memory by other tensors.
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
        """With ``prompt``: of all buffers that anybody has."""
        self._alive = [
            (storage, num_bytes) for storage, num_bytes in self._alive if not storage.expired()
        ]
        return sum(num_bytes for _, num_bytes in self._alive)

    def tensor(self, values):
        """What computation makes: ``values``, when it comes to that."""
        tensor = self.owned(torch.empty_like(values))
        target = alias(tensor)
        self.compute(lambda: target.copy_(values))
        return tensor

    def compute(self, function):
        with self._on(COMPUTE):
            self._queue(("run", function))

    def drain(self):
        """Run everything."""
        while any(self.position[name] < len(queue) for name, queue in self.queues.items()):
            assert any(self._advance(name) for name in self.order), "streams wait for each other"

    def _queue(self, operation):
        self.queues[self.current].append(operation)
        if self.prompt and self.current == COMPUTE:
            self._run_up_to((COMPUTE, len(self.queues[COMPUTE])))

    def _advance(self, name):
        """The next operation of a stream, if there is one and it need not wait."""
        if self.position[name] == len(self.queues[name]):
            return False
        kind, what = self.queues[name][self.position[name]]
        if kind == "wait" and not self.done(what):
            return False
        if kind == "run":
            what()
        self.queues[name][self.position[name]] = None  # it holds memory
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
