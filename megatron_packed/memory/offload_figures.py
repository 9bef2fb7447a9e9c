"""What offload costs and how much of it lies under computation, measured on the device and read one
step late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed.memory.streams import Streams

ENOUGH = 4
"""Loads without which a step says nothing about hiding them."""


@dataclass(frozen=True, kw_only=True)
class OffloadFigures:
    """Of one step on one rank. Times are means of single copies, by the device's clock; None where
    it has none.
    """

    buffers: int
    """Device buffers at the end of the step."""
    moved_mib: float
    """To the host. Nothing for replayed graphs: these are not counted."""
    loaded_mib: float
    """And back; the last bundles of a forward pass are still on the device when they are asked for."""
    put_ms: float | None = None
    """A copy to the host."""
    load_ms: float | None = None
    """A copy back."""
    load_gb_per_s: float | None = None
    """10^9 bytes in a second of it."""
    hidden: float | None = None
    """Share of the time of copies back for which computation did not wait."""
    compute_ms: float | None = None
    """Between two bundles that were asked for: what one copy can hide under (median)."""

    @property
    def cannot_pay(self) -> str | None:
        """Why copies cannot hide under computation; None if they can, or nothing is known."""
        if self.load_ms is None or self.compute_ms is None or self.load_ms <= self.compute_ms:
            return None
        return f"a copy back takes {self.load_ms:.2f} ms, and what it could hide under takes {self.compute_ms:.2f} ms"


class _Timed(NamedTuple):
    begin: Any
    end: Any


class _Page:
    """What is noted of one step."""

    def __init__(self) -> None:
        self.puts: list[_Timed] = []
        self.loads: list[_Timed] = []
        self.waits: list[_Timed] = []
        self.moved = self.loaded = 0
        self.buffers = 0


class Stopwatch:
    """Times of one step, taken as marks in the streams; nothing of a capture is timed.

    Use: `begin`, then the copy or the wait, then what it was: `put`, `loaded`, `waited`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.figures: OffloadFigures | None = None
        """Of the last step whose times are known; None where nothing was moved, or by replays
        alone.
        """
        self._page, self._before = _Page(), _Page()

    def begin(self) -> Any:
        return self._streams.clock()

    def put(self, begin: Any, num_bytes: int) -> None:
        self._note(self._page.puts, begin)
        self._page.moved += 0 if self._streams.capturing() else num_bytes

    def loaded(self, begin: Any, num_bytes: int) -> None:
        self._note(self._page.loads, begin)
        self._page.loaded += 0 if self._streams.capturing() else num_bytes

    def waited(self, begin: Any) -> None:
        self._note(self._page.waits, begin)

    def _note(self, where: list[_Timed], begin: Any) -> None:
        if begin is not None:
            where.append(_Timed(begin, self._streams.clock()))

    def end_step(self, buffers: int) -> int:
        """Turns the page, and reads the one before, where the device should be through; bytes put
        away in the step.
        """
        self._page.buffers = buffers
        if self._before.moved:
            self._read(self._before)
        else:
            self.figures = None
        self._before, self._page = self._page, _Page()
        return self._before.moved

    def forget(self) -> None:
        """What was noted since the last step is of none."""
        self._page = _Page()

    def _read(self, page: _Page) -> None:
        last = (*page.puts[-1:], *page.loads[-1:], *page.waits[-1:])
        if not all(self._streams.done(timed.end) for timed in last):
            return
        times: dict[str, float] = {}
        if page.puts:
            times["put_ms"] = self._sum(page.puts) / len(page.puts)
        if page.loads:
            total, waited = self._sum(page.loads), self._sum(page.waits)
            times["load_ms"] = total / len(page.loads)
            times["load_gb_per_s"] = page.loaded / max(total, 1e-6) / 1e6
            times["hidden"] = max(0.0, 1 - waited / max(total, 1e-6))
        if len(page.waits) > ENOUGH:
            gaps = [(before.end, after.begin) for before, after in zip(page.waits, page.waits[1:])]
            times["compute_ms"] = sorted(self._streams.milliseconds(*gap) for gap in gaps)[
                len(gaps) // 2
            ]
        self.figures = OffloadFigures(
            buffers=page.buffers,
            moved_mib=page.moved / 2**20,
            loaded_mib=page.loaded / 2**20,
            **times,
        )

    def _sum(self, timed: Sequence[_Timed]) -> float:
        return sum(self._streams.milliseconds(*one) for one in timed)
