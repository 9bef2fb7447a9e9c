"""Cost of a micro-batch, from a table of measured times: by the room of its graph and by the
work of attention.

A captured micro-batch takes time for the room that it has (a capacity N in documents), and
attention takes time for the squared lengths of its rows, the tail included. At each measured
capacity the times of a few packs give a line ``ms = base + slope * sum of squares``; between
capacities base and slope are interpolated. Outside of the measured capacities the nearest counts:
`measure_capacities` includes the smallest and the largest that are asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags

FORMAT = "megatron_packed step costs 1"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One pack."""

    capacity: int | None
    """Documents of the graph that was replayed; None for an eager run, with room for its own
    documents alone.
    """
    documents: int
    squares: float
    """Sum of the squared lengths of its rows, the tail included, in tokens^2."""
    ms: float
    """Milliseconds of forward and backward."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Times of one model on one device.

    Raises:
        ValueError: no graph was timed, or a time is not above 0.
    """

    tokens: int
    """Token slots of a pack."""
    update_ms: float
    """Time of a step beside its micro-batches: sums, norm, update, metrics."""
    packs: tuple[Timed, ...]
    device: str
    model: dict[str, Any] = field(default_factory=dict)
    """Options that decide the times: of the model, precision, kernels and graphs."""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.capacities:
            raise ValueError("a table of step costs needs a pack that was timed at some capacity.")
        if min(pack.ms for pack in self.packs) <= 0 or self.update_ms < 0:
            raise ValueError("a table of step costs has a time that is not above 0.")

    @property
    def capacities(self) -> tuple[int, ...]:
        """That were measured, smallest first."""
        return tuple(sorted({pack.capacity for pack in self.packs if pack.capacity is not None}))

    @property
    def knows_eager(self) -> bool:
        """True if packs that no graph holds have a price."""
        return any(pack.capacity is None for pack in self.packs)

    def milliseconds(
        self, capacity: NDArray[np.integer], squares: NDArray[np.number]
    ) -> NDArray[np.float64]:
        """Return the cost of forward and backward of each pack.

        Args:
            capacity: ``(P,)`` of the graph that each pack replays; 0 for a pack that runs eagerly.
            squares: ``(P,)`` sums of squared lengths, the tail included.
        Raises:
            ValueError: a pack runs eagerly, and no eager time was measured.
        """
        lines = np.array(
            [_line([p for p in self.packs if p.capacity == one]) for one in self.capacities]
        )
        base = np.interp(capacity, self.capacities, lines[:, 0])
        slope = np.interp(capacity, self.capacities, lines[:, 1])
        eager = np.asarray(capacity) == 0
        if eager.any():
            if not self.knows_eager:
                raise ValueError("packs would run eagerly, and the table has no eager time.")
            base_eager, slope_eager = _line([pack for pack in self.packs if pack.capacity is None])
            base, slope = np.where(eager, base_eager, base), np.where(eager, slope_eager, slope)
        found: NDArray[np.float64] = base + slope * np.asarray(squares, dtype=np.float64)
        return found

    def document_cost(self) -> float | None:
        """Cost of room for one more document as a share of a pack's time; None where one capacity
        was measured.
        """
        least, most = self.capacities[0], self.capacities[-1]
        if least == most:
            return None
        squares = np.full(2, np.mean([pack.squares for pack in self.packs]))
        low, high = self.milliseconds(np.array([least, most]), squares)
        return max(float(high - low) / float(low) / (most - least), 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepCosts:
        """Read the file that `save` wrote.

        Raises:
            OSError: it cannot be read. ValueError: it is something else, or damaged.
        """
        try:
            kept = json.loads(Path(path).read_text())
            if kept.pop("format") != FORMAT:
                raise ValueError("of another format")
            packs = tuple(Timed(**pack) for pack in kept.pop("packs"))
            return cls(packs=packs, **kept)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is no table of step costs that tune {flags.MEASURE} wrote: {error}"
            ) from None


def _line(packs: Sequence[Timed]) -> tuple[float, float]:
    """Base and slope (not below 0) of least squares; a single amount of work has slope 0."""
    squares, times = (
        np.array([getattr(pack, name) for pack in packs], float) for name in ("squares", "ms")
    )
    spread = squares - squares.mean()
    slope = max(float(spread @ times) / float(spread @ spread), 0.0) if spread.any() else 0.0
    return float(times.mean() - slope * squares.mean()), slope
