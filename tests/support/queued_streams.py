"""Stand-in for the streams of GPUs: queues of one process, run in a random order.

Each rank has its own streams. A stream runs its operations in order. The stream that runs next is
drawn at random among those whose next operation may run. A copy runs in two halves, so other operations
may run between them. A barrier completes after all ranks have reached it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

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

    def __init__(self, ranks: int) -> None:
        self.queues: list[Queue] = []
        self.barriers = Barriers(ranks)

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


class Barriers:
    """Stand-in for the barriers of a buffer of several ranks."""

    def __init__(self, ranks: int) -> None:
        self.begun = [0] * ranks
        self.arrived = [0] * ranks

    def add(self, rank: int, stream: Queue) -> None:
        """Queue the next barrier of a rank."""
        self.begun[rank] += 1
        number, arrived = self.begun[rank], self.arrived

        def arrive() -> bool:
            assert arrived[rank] == number - 1, "barriers of a rank run one after the other"
            arrived[rank] = number
            return True

        stream.add(arrive)
        stream.add(lambda: min(arrived) >= number)


def queue_copy(stream: Queue, target: Tensor, source: Tensor) -> None:
    """Queue a copy in two halves."""
    assert target.is_contiguous() and source.is_contiguous()
    middle, target, source = target.numel() // 2, target.view(-1), source.view(-1)
    for part in (slice(0, middle), slice(middle, None)):
        stream.add(lambda part=part: target[part].copy_(source[part]) is not None)
