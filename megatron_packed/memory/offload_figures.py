"""Times of offload's copies, and the share of that time hidden by computation.

Events on the device measure the times. The host reads the events of a step at the end of the next
step, so that it does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed.memory.offload_streams import OffloadStreams

ENOUGH = 4
"""Number of waits that a step must exceed for a meaningful median of the time between them."""


@dataclass(frozen=True, kw_only=True)
class OffloadFigures:
    """Figures of one step on one rank.

    Times are means over copies, measured on the device; None if the device has no timing events.
    The keys of the log are ``offload_`` and the name of the field. *Moved* and *put* mean copies to
    the host, *loaded* and *load* mean copies from the host.
    """

    buffers: int
    """Number of device buffers at the end of the step."""
    moved_mib: float
    """MiB copied to the host, without the copies in replayed graphs."""
    loaded_mib: float
    """MiB copied from the host, without the copies in replayed graphs.

    The value is less than ``moved_mib``, because the last groups of a forward pass are still on the
    device when they are restored.
    """
    put_ms: float | None = None
    """Mean time of a copy to the host, in ms."""
    load_ms: float | None = None
    """Mean time of a copy from the host, in ms."""
    load_gb_per_s: float | None = None
    """Speed of the copies from the host, in 10^9 bytes per second."""
    hidden: float | None = None
    """Share (0 to 1) of the time of copies from the host during which computation did not wait."""
    compute_ms: float | None = None
    """Median time between two restores, in ms: the computation that can hide one copy."""

    @property
    def cannot_pay(self) -> str | None:
        """Reason why computation cannot hide the copies; None if it can, or if times are unknown."""
        if self.load_ms is None or self.compute_ms is None or self.load_ms <= self.compute_ms:
            return None
        return (
            f"a copy back takes {self.load_ms:.2f} ms, and the computation that could hide it takes "
            f"{self.compute_ms:.2f} ms"
        )


class _Timed(NamedTuple):
    begin: Any
    end: Any


class _StepTimes:
    """Timing events and byte counts of one step."""

    def __init__(self) -> None:
        self.to_host: list[_Timed] = []
        self.from_host: list[_Timed] = []
        self.waits: list[_Timed] = []
        self.bytes_to_host = 0
        self.bytes_from_host = 0
        self.buffers = 0


class CopyTimer:
    """Timer of one step's copies, by events in the streams. Captured copies are not timed.

    Use: call `begin`, queue the copy or the wait, then call `copied_to_host`, `copied_from_host` or
    `waited`.
    """

    def __init__(self, streams: OffloadStreams) -> None:
        self._streams = streams
        self.figures: OffloadFigures | None = None
        """Figures of the last step whose times are known.

        None if nothing was copied, or if only replayed graphs copied.
        """
        self._now = _StepTimes()
        self._before = _StepTimes()

    def begin(self) -> Any:
        return self._streams.timing_event()

    def copied_to_host(self, begin: Any, num_bytes: int) -> None:
        self._note(self._now.to_host, begin)
        self._now.bytes_to_host += 0 if self._streams.capturing() else num_bytes

    def copied_from_host(self, begin: Any, num_bytes: int) -> None:
        self._note(self._now.from_host, begin)
        self._now.bytes_from_host += 0 if self._streams.capturing() else num_bytes

    def waited(self, begin: Any) -> None:
        self._note(self._now.waits, begin)

    def _note(self, where: list[_Timed], begin: Any) -> None:
        if begin is not None:
            where.append(_Timed(begin, self._streams.timing_event()))

    def end_step(self, buffers: int) -> int:
        """Compute the figures of the previous step; return the bytes copied to the host in this step.

        Events of this step may not be complete, and reading their times would make the host wait for
        the device. So they are read at the end of the next step.
        """
        self._now.buffers = buffers
        if self._before.bytes_to_host:
            self._read(self._before)
        else:
            self.figures = None
        self._before = self._now
        self._now = _StepTimes()
        return self._before.bytes_to_host

    def forget(self) -> None:
        """Discard all events since the last step, which belong to a warm-up."""
        self._now = _StepTimes()

    def _read(self, step: _StepTimes) -> None:
        # Streams run in order. So if the last event of each kind is complete, all events are.
        last = (*step.to_host[-1:], *step.from_host[-1:], *step.waits[-1:])
        if not all(self._streams.done(timed.end) for timed in last):
            return
        times: dict[str, float] = {}
        if step.to_host:
            times["put_ms"] = self._sum(step.to_host) / len(step.to_host)
        if step.from_host:
            total, waited = self._sum(step.from_host), self._sum(step.waits)
            times["load_ms"] = total / len(step.from_host)
            times["load_gb_per_s"] = step.bytes_from_host / max(total, 1e-6) / 1e6
            times["hidden"] = max(0.0, 1 - waited / max(total, 1e-6))
        if len(step.waits) > ENOUGH:
            gaps = [
                (wait.end, next_wait.begin) for wait, next_wait in zip(step.waits, step.waits[1:])
            ]
            times["compute_ms"] = sorted(self._streams.milliseconds(*gap) for gap in gaps)[
                len(gaps) // 2
            ]
        self.figures = OffloadFigures(
            buffers=step.buffers,
            moved_mib=step.bytes_to_host / 2**20,
            loaded_mib=step.bytes_from_host / 2**20,
            **times,
        )

    def _sum(self, timed: Sequence[_Timed]) -> float:
        return sum(self._streams.milliseconds(*interval) for interval in timed)
