"""Step metrics that reach the host one step late, without a host synchronisation.

[Note: late metrics protocol]
The device vector of step i is copied into a pinned buffer and an event is recorded behind the copy. The host goes on
to queue step i + 1 and only then waits for i, by asking ``event.query()``: the device still has step i + 1 to work on,
so the wait costs it nothing, and every rank reads step i at the same place of its program. Decisions that all ranks
must share (a signal, a non-finite step) may therefore be taken from these numbers. Two buffers take turns: a buffer is
written again only after it was read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Facts = TypeVar("Facts")

_POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class Arrived(Generic[Facts]):  # Python 3.10 has no generic NamedTuple
    """A step whose values have reached the host."""

    facts: Facts
    values: list[float]
    at: float
    """``time.perf_counter()`` when the step was seen to be finished."""


class _InFlight(NamedTuple):
    facts: object
    values: Tensor
    event: torch.cuda.Event | None
    pushed_at: float


class LateMetrics(Generic[Facts]):
    """A queue of one: push the vector of a step, take it back after the next step was queued.

    Args:
        size: elements of the device vector (float32).
        device: where the vector lives. On the CPU the values are there at once; the protocol stays the same.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.float32, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._turn = 0
        self._in_flight: _InFlight | None = None

    def push(self, facts: Facts, vector: Tensor) -> Arrived[Facts] | None:
        """Start the copy of this step's ``vector``, then wait for the step before it.

        Returns:
            The previous step; None when this is the first.
        """
        previous = self._in_flight
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        self._turn = 1 - self._turn
        buffer.copy_(vector, non_blocking=True)
        if event is not None:
            event.record()
        self._in_flight = _InFlight(facts, buffer, event, time.perf_counter())
        return self._wait(previous)

    def flush(self) -> Arrived[Facts] | None:
        """Wait for the last step that was pushed."""
        previous, self._in_flight = self._in_flight, None
        return self._wait(previous)

    def _wait(self, item: _InFlight | None) -> Arrived[Facts] | None:
        if item is None:
            return None
        if item.event is None:
            return Arrived(item.facts, item.values.tolist(), item.pushed_at)  # type: ignore[arg-type]
        while not item.event.query():
            time.sleep(_POLL_SECONDS)
        return Arrived(item.facts, item.values.tolist(), time.perf_counter())  # type: ignore[arg-type]
