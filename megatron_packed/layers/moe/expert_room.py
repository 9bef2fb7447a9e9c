"""Bound of the rows that E layers reserve for experts on other ranks.

[Note: bounds of expert buffers]
Only the device knows how many rows the experts of a rank need. A CUDA graph needs buffers of a fixed
size, so the sizes are bounds that the host chooses before a capture. On two H200, steps with whole
layers in graphs run 2.44 times as fast as eager ones with packs of 4,096 tokens, and 1.25 times with
8,192 (`alltoall`, 2026-11-28). The bounds:

* rows of a rank: all rows that the experts of one rank process.
* rows of a peer (`alltoall`): the rows that one rank sends to the experts of one other rank.

A bound is a factor times an even share. With T tokens on each of e ranks and K experts per token, an
even share is ``T K`` rows of a rank and ``T K / e`` rows of a peer. No bound exceeds the worst case.

If the routing needs more rows, the surplus rows are left out and an overflow is set on the device, so
the step must be repeated. See [Note: steps that are done again] in ``training/train_step.py``.

A bound never changes a result. Used rows come first and in the same order for every bound. Unused
rows are zeros that no sum reads. The grouped product of a GPU chooses its tiles by the number of
rows of the buffer, divided by the number of experts: up to 128 rows, or more. So
`ExpertRoom.same_tiles` keeps all buffers on the same side of this border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_packed.config.kinds.experts import MEASURE

PLANNED_FACTOR = 1.5
"""Factor of both bounds before any routing is observed."""
HEAD_ROOM = 1.2
"""Factor between observed rows and a new bound."""
ROWS_OF_LARGE_TILES = 129
"""Smallest number of rows per expert for which the grouped product of a GPU uses its large tiles."""


class Load(NamedTuple):
    """Largest numbers of rows that a routing needs, as factors of even shares."""

    rank: float
    peer: float


@dataclass(kw_only=True)
class ExpertRoom:
    """Bounds of the expert buffers of all E layers of a model; values of the host.

    Every rank has equal values. See [Note: bounds of expert buffers].
    """

    bounds: Load | None
    """Factors of the bounds; None without bounds: buffers have the worst-case size, or the sizes
    follow the routing.
    """
    measured: bool
    """True if the bounds follow the observed routing."""
    rows_per_expert: int = 0
    """Rows per expert that every buffer has at least, unless the worst case has fewer."""
    even: Load = field(default_factory=lambda: Load(1.0, 1.0))
    """Rows of the even shares of a pack of the run."""
    exact: bool = False
    """True makes every bounded buffer as large as the routing needs. The host asks the device for
    this size once per layer, so no CUDA graph can be captured.
    """
    observed: bool = False
    """True after routing was observed, in this process or before its checkpoint was written."""
    largest: Load = field(default_factory=lambda: Load(0.0, 0.0))
    """Largest load of the steps of this process."""
    repeats: int = 0
    """Steps of the run that were repeated after an overflow."""

    @classmethod
    def from_factor(cls, factor: float | str | None) -> ExpertRoom:
        """Return the room for a value of ``--moe-expert-rank-capacity-factor``."""
        if factor is None:
            return cls(bounds=None, measured=False)
        if factor == MEASURE:
            return cls(bounds=Load(PLANNED_FACTOR, PLANNED_FACTOR), measured=True)
        return cls(bounds=Load(float(factor), float(factor)), measured=False)

    @property
    def fixed(self) -> bool:
        """True if the next buffers have the sizes of the bounds."""
        return self.bounds is not None and not self.exact

    def same_tiles(self, rows: int, num_experts: int, worst: int) -> int:
        """Return the rows of a buffer, raised until its tiles are those of the worst case.

        Args:
            rows: number of rows that a bound or a routing requires.
            num_experts: number of experts of the rank.
            worst: number of rows of the worst case.
        """
        return min(worst, max(rows, self.rows_per_expert * num_experts))

    def load_of(self, rows: Sequence[float]) -> Load:
        """Return the load for the most rows of a rank and of a peer."""
        return Load(rows[0] / self.even.rank, rows[1] / self.even.peer)

    def see(self, load: Load) -> None:
        """Include the load of a step in ``largest``."""
        self.largest = Load(*map(max, load, self.largest))

    def fit(self, load: Load) -> None:
        """Set the bounds to an observed load with head room."""
        self.bounds = Load(*(HEAD_ROOM * factor for factor in load))
        self.observed = True

    def raise_to(self, load: Load) -> None:
        """Raise the bounds that a load exceeds, with head room."""
        assert self.bounds is not None, "only bounded buffers overflow"
        self.bounds = Load(
            *(
                bound if factor <= bound else HEAD_ROOM * factor
                for factor, bound in zip(load, self.bounds, strict=True)
            )
        )
        self.observed = True

    def state(self, ep_size: int) -> dict[str, float] | None:
        """Return the values that checkpoints keep; None without observed bounds."""
        if self.bounds is None or not (self.observed or self.repeats):
            return None
        return {"ep_size": ep_size, **self.bounds._asdict(), "repeats": self.repeats}

    def load_state(self, state: Mapping[str, float], ep_size: int, *, sends_parts: bool) -> None:
        """Take over the bounds of a checkpoint.

        Given bounds are kept. Bounds of another number of expert-parallel ranks are ignored, because
        the loads of those ranks differ. So are bounds of the other dispatcher: only `alltoall` has a
        bound of its parts, and other checkpoints store 0 for it.
        """
        if self.bounds is None:
            return
        self.repeats = int(state["repeats"])
        # Factors of even shares are kept, so packs of another size get bounds of their size.
        same = state["ep_size"] == ep_size and (state["peer"] > 0) == sends_parts
        if self.measured and same:
            self.bounds = Load(state["rank"], state["peer"])
            self.observed = True

    def sentences(self) -> list[str]:
        """Return the bounds, the largest load and the repeated steps in words; empty without bounds."""
        if self.bounds is None:
            return []
        source = "follow the observed routing" if self.measured else "are given"
        peer = (
            f", and {self.bounds.peer:.2f} of an even part (largest {self.largest.peer:.2f})"
            if self.largest.peer
            else ""
        )
        return [
            f"expert buffers: bounds {source}: {self.bounds.rank:.2f} of an even share of rows "
            f"(largest load {self.largest.rank:.2f}){peer}; repeated steps: {self.repeats:,}"
        ]


def bounded_rows(even: float, factor: float, worst: int) -> int:
    """Return ``factor`` times an even share of rows, rounded up; at least 1, at most the worst case.

    A bound of 0 rows is observed if no token of the first packs is routed.

    Example:
        even share 100.5, factor 1.25: 126 rows if the worst case has more.
    """
    return min(worst, max(1, math.ceil(even * factor)))
