"""Stand-in for symmetric memory: streams as queues of one process, run in a random order.

Each rank has its own streams. A stream runs its operations in order. The stream that runs next is
drawn at random among those whose next operation may run. A copy runs in two halves, so other operations
may run between them. A barrier completes after all ranks have reached it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_packed.distributed.symmetric_exchange import (
    PIECE_SLOTS,
    SymmetricExchange,
    UsedBytes,
    piece_of_peer,
)

Step = Callable[[], bool]
"""Runs an operation if it may run; returns whether it ran."""


class Queue:
    """Stand-in for a stream of a GPU."""

    def __init__(self, machine: Machine) -> None:
        self.steps: deque[Step] = deque()
        self.done = 0
        self.added = 0
        machine.queues.append(self)

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self.added += 1

    def record_event(self) -> Event:
        return Event(self, self.added)

    def wait_event(self, event: Event) -> None:
        self.add(event.passed)

    def wait_stream(self, other: Queue) -> None:
        self.wait_event(other.record_event())

    def run_next(self) -> bool:
        """Run the next operation if it may run."""
        ran = self.steps[0]()
        if ran:
            self.steps.popleft()
            self.done += 1
        return ran


class Event:
    """Stand-in for an event: a place in a queue."""

    def __init__(self, queue: Queue, place: int) -> None:
        self.queue = queue
        self.place = place

    def passed(self) -> bool:
        return self.queue.done >= self.place


class Machine:
    """GPUs of one host whose queues are run in an order that depends on a seed."""

    def __init__(self, ranks: int, piece_bytes: int) -> None:
        self.queues: list[Queue] = []
        piece = piece_of_peer(ranks, piece_bytes)
        shape = (PIECE_SLOTS, max(ranks - 1, 1), piece)
        self.slots = [torch.full(shape, 255, dtype=torch.uint8) for _ in range(ranks)]
        self.arrived = [0] * ranks
        self.ranks = [QueuedExchange(self, rank, ranks, piece) for rank in range(ranks)]

    def run(self, seed: int, first: Sequence[Queue] = ()) -> None:
        """Run all operations; ``first`` are queues that run whenever they can.

        Raises:
            AssertionError: no operation may run, so the ranks would hang.
        """
        drawn = random.Random(seed)
        while waiting := [queue for queue in self.queues if queue.steps]:
            drawn.shuffle(waiting)
            waiting.sort(key=lambda queue: queue not in first)
            assert any(queue.run_next() for queue in waiting), "the ranks hang"


class QueuedExchange(SymmetricExchange):
    """`SymmetricExchange` of one rank of a `Machine`."""

    def __init__(self, machine: Machine, rank: int, size: int, piece: int) -> None:
        self.machine = machine
        self.group = SimpleNamespace()  # type: ignore[assignment]
        self.rank = rank
        self.size = size
        self.piece_bytes = piece
        self._slots = machine.slots
        self._staging, self._pulling = Queue(machine), Queue(machine)  # type: ignore[assignment]
        self.caller = Queue(machine)
        """Stream from which exchanges are started."""
        self._begun = 0

    def _current(self) -> Queue:  # type: ignore[override]
        return self.caller

    def _copy(self, stream: Queue, target: Tensor, source: Tensor) -> None:  # type: ignore[override]
        assert target.is_contiguous() and source.is_contiguous()
        middle = target.numel() // 2
        for part in (slice(0, middle), slice(middle, None)):
            stream.add(lambda part=part: target[part].copy_(source[part]) is not None)

    def _copy_used(self, used: UsedBytes) -> Callable[..., None]:
        def copy(stream: Queue, target: Tensor, source: Tensor, *part: int, sent: bool) -> None:
            stream.add(lambda: used.copy(target, source, *part, sent=sent) is None)

        return copy

    def _barrier(self, stream: Queue) -> None:  # type: ignore[override]
        self._begun += 1
        number, arrived = self._begun, self.machine.arrived

        def arrive() -> bool:
            assert arrived[self.rank] == number - 1, "barriers of a rank run one after the other"
            arrived[self.rank] = number
            return True

        stream.add(arrive)
        stream.add(lambda: min(arrived) >= number)
