"""Step metrics that reach the host one step late, without a host synchronisation.

[Note: late metrics protocol]
The device vector of step i is copied into a pinned buffer, and an event is recorded after the copy.
The host queues step i + 1 and only then waits for step i, by calling ``event.query()`` repeatedly.
The device works on step i + 1 during this wait, so it does not become idle. Every rank reads step i
at the same place of its program. Decisions that all ranks must share (a signal, a non-finite step)
may therefore depend on these numbers. Two buffers alternate, so that a buffer is written again only
after the host has read it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, Union, cast

import torch
from torch import Tensor

from megatron_packed.distributed.hang_detection import UNWATCHED, DeviceWatch

Facts = TypeVar("Facts")

_POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class Arrived(Generic[Facts]):  # Python 3.10 has no generic NamedTuple
    """Finished step, whose values have reached the host."""

    facts: Facts
    values: list[float]
    seconds: float
    """Time from the end of the previous step, or from `LateMetrics.restart`, to the end of this
    step. On a GPU, events measure the time.
    """


Mark = Union["torch.cuda.Event", float]
"""Point in time: an event in the stream, or ``time.perf_counter()`` without a GPU."""


class _InFlight(NamedTuple):
    facts: object
    values: Tensor
    begin: Mark
    end: Mark


class LateMetrics(Generic[Facts]):
    """Queue of one step's metrics: push a step's vector, and receive it after the next push.

    See [Note: late metrics protocol].

    Args:
        size: elements of the device vector (float32).
        device: device of the vector. On a CPU the values are available at once; the protocol is the
            same.
        hang_detector: watches the device while the host waits for it.
    """

    def __init__(
        self, size: int, device: torch.device, *, hang_detector: DeviceWatch = UNWATCHED
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._hang_detector = hang_detector
        # Two buffers: the host may still read one while the next step's vector is copied to the
        # other. They are pinned, since a copy to pageable memory waits for the device.
        self._buffers = [
            torch.zeros(size, dtype=torch.float32, pin_memory=self._on_gpu) for _ in range(2)
        ]
        self._turn = 0
        self._in_flight: _InFlight | None = None
        self.restart()

    def restart(self) -> None:
        """Start the time measurement of the next step now.

        The time since the last step is not counted.
        """
        self._begin = self._mark()

    def push(self, facts: Facts, vector: Tensor) -> Arrived[Facts] | None:
        """Start the copy of this step's ``vector``, then wait for the step before it.

        Returns:
            The previous step; None when this is the first.
        """
        previous = self._in_flight
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        buffer.copy_(vector, non_blocking=True)
        end = self._mark()
        self._in_flight = _InFlight(facts, buffer, self._begin, end)
        self._begin = end
        return self._wait(previous)

    def flush(self) -> Arrived[Facts] | None:
        """Wait for the last step that was pushed."""
        previous = self._in_flight
        self._in_flight = None
        return self._wait(previous)

    def _wait(self, item: _InFlight | None) -> Arrived[Facts] | None:
        if item is None:
            return None
        if isinstance(item.end, float):
            seconds = item.end - cast(float, item.begin)
        else:
            # Not `synchronize`: a host that waits inside CUDA sends no heartbeat to the thread that
            # detects hangs.
            while not item.end.query():  # type: ignore[no-untyped-call]
                self._hang_detector.waits()
                time.sleep(_POLL_SECONDS)
            seconds = cast(torch.cuda.Event, item.begin).elapsed_time(item.end) / 1e3
        return Arrived(item.facts, item.values.tolist(), seconds)  # type: ignore[arg-type]

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
