"""Times of offload's copies, and the share hidden under computation, measured by events on the
device and read one step late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed.memory.offload_streams import OffloadStreams

ENOUGH = 4
"""Copies from the host that a step needs for a meaningful median of the time between them."""


@dataclass(frozen=True, kw_only=True)
class OffloadFigures:
    """Figures of one step on one rank. Times are means of single copies by the device's clock; None
    where it has none.

    The names of the fields, after ``offload_``, are the keys of the log: *moved* and *put* are
    copies to the host, *loaded* and *load* are copies from the host.
    """

    buffers: int
    """Device buffers at the end of the step."""
    moved_mib: float
    """Copied to the host. Replays of graphs are not counted."""
    loaded_mib: float
    """Copied from the host; the last groups of a forward pass are still on the device when restored."""
    put_ms: float | None = None
    """Mean time of a copy to the host."""
    load_ms: float | None = None
    """Mean time of a copy from the host."""
    load_gb_per_s: float | None = None
    """Speed of the copies from the host, in 10^9 bytes a second."""
    hidden: float | None = None
    """Share of the time of copies from the host for which computation did not wait."""
    compute_ms: float | None = None
    """Median time between two restores: the computation that one copy can hide under."""

    @property
    def cannot_pay(self) -> str | None:
        """Reason why copies cannot hide under computation; None if they can, or nothing is known."""
        if self.load_ms is None or self.compute_ms is None or self.load_ms <= self.compute_ms:
            return None
        return f"a copy back takes {self.load_ms:.2f} ms, and what it could hide under takes {self.compute_ms:.2f} ms"


class _Timed(NamedTuple):
    begin: Any
    end: Any


class _StepTimes:
    """Events of one step."""

    def __init__(self) -> None:
        self.to_host: list[_Timed] = []
        self.from_host: list[_Timed] = []
        self.waits: list[_Timed] = []
        self.bytes_to_host = 0
        self.bytes_from_host = 0
        self.buffers = 0


class CopyTimer:
    """Timer of one step's copies by events in the streams; nothing of a capture is timed.

    Call `begin`, queue the copy or the wait, and then call `copied_to_host`, `copied_from_host` or
    `waited`.
    """

    def __init__(self, streams: OffloadStreams) -> None:
        self._streams = streams
        self.figures: OffloadFigures | None = None
        """Figures of the last step whose times are known; None where nothing was copied, or by
        replays alone.
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
        """Read the step before, and return the bytes copied to the host in this one.

        One step late, because the events of this step are not done: asking for their times now
        would make the host wait for the device.
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
        """Forget all events since the last step: they belong to a warm-up."""
        self._now = _StepTimes()

    def _read(self, step: _StepTimes) -> None:
        # The last event of each kind: streams run in order, so the earlier ones are done as well.
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
            gaps = [(before.end, after.begin) for before, after in zip(step.waits, step.waits[1:])]
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
        return sum(self._streams.milliseconds(*one) for one in timed)
