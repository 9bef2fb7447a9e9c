"""Cost of a micro-batch, from a table of measured times.

The time of a captured micro-batch depends on the capacity N of its graph, in documents. The time of
attention depends on the squared lengths of the rows, including the tail. At each measured capacity
the times of a few packs give a line ``ms = base + slope * sum of squares``. Between measured
capacities, base and slope are interpolated. Outside the measured range, the nearest measured
capacity is used; so `measure_capacities` measures the smallest and the largest requested capacity.
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
from megatron_packed.files.regular_files import open_regular
from megatron_packed.files.written_files import resolve_output, write_file
from megatron_packed.packed.array_types import Float64Array, IntegerArray

_FORMAT = "megatron_packed step costs 1"
_LARGEST = 1e300
"""Bound of times and sums of squares, which become float64."""
_LARGEST_COUNT = 2**63
_MOST_BYTES = 64 << 20
"""Bytes of a table that are read; a table of a thousand packs has 100 kB."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Measured time of one pack."""

    capacity: int | None
    """Capacity in documents of the replayed graph; None for an eager run, in which the pack has no
    unused document slots.
    """
    documents: int
    squares: float
    """Sum of the squared lengths of the documents of the pack and of its unused tail, in
    tokens^2."""
    ms: float
    """Time of forward and backward, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Table of measured times of one model on one device.

    Raises:
        ValueError: no graph was measured, or a time is not above 0.
    """

    tokens: int
    """Token slots of a pack."""
    update_ms: float
    """Time of a step outside its micro-batches, in ms: reductions, norm, update, metrics."""
    packs: tuple[Timed, ...]
    device: str
    model: dict[str, Any] = field(default_factory=dict)
    """Options that affect the times: options of the model, the precision, the kernels and the
    graphs."""
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = [
            self.update_ms,
            *(number for pack in self.packs for number in (pack.squares, pack.ms)),
        ]
        counts = [self.tokens, *(pack.documents for pack in self.packs), *self.capacities]
        if not all(map(_is_finite, times)) or not all(
            type(count) is int and 0 <= count < _LARGEST_COUNT for count in counts
        ):
            raise ValueError(
                "the table of step costs has a time or a count that is no number; measure the "
                "costs again."
            )
        if not self.capacities:
            raise ValueError(
                "the table of step costs has no pack that was measured with a CUDA graph; "
                "measure the costs with CUDA graphs on."
            )
        if min(pack.ms for pack in self.packs) <= 0 or self.update_ms < 0:
            raise ValueError(
                "the table of step costs has a time that is not above 0; measure the costs again."
            )

    @property
    def capacities(self) -> tuple[int, ...]:
        """Measured capacities in documents, smallest first."""
        return tuple(sorted({pack.capacity for pack in self.packs if pack.capacity is not None}))

    @property
    def knows_eager(self) -> bool:
        """True if the table has times of packs that ran eagerly."""
        return any(pack.capacity is None for pack in self.packs)

    def milliseconds(self, capacity: IntegerArray, squares: NDArray[np.number]) -> Float64Array:
        """Return the time of forward and backward of each pack, in milliseconds.

        Args:
            capacity: ``(P,)`` capacity of the graph that each pack replays; 0 for a pack that runs
                eagerly.
            squares: ``(P,)`` sum of the squared lengths of each pack's rows, including the tail.
        Raises:
            ValueError: a pack runs eagerly, and no eager time was measured.
        """
        lines = np.array(
            [
                _line([p for p in self.packs if p.capacity == measured])
                for measured in self.capacities
            ]
        )
        base = np.interp(capacity, self.capacities, lines[:, 0])
        slope = np.interp(capacity, self.capacities, lines[:, 1])
        eager = np.asarray(capacity) == 0
        if eager.any():
            if not self.knows_eager:
                raise ValueError("some packs run eagerly, but the table has no eager time.")
            base_eager, slope_eager = _line([pack for pack in self.packs if pack.capacity is None])
            base, slope = np.where(eager, base_eager, base), np.where(eager, slope_eager, slope)
        times: Float64Array = base + slope * np.asarray(squares, dtype=np.float64)
        return times

    def document_cost(self) -> float | None:
        """Return the cost of one more document of capacity, as a share of a pack's time.

        Return None if only one capacity was measured.
        """
        least, most = self.capacities[0], self.capacities[-1]
        if least == most:
            return None
        squares = np.full(2, np.mean([pack.squares for pack in self.packs]))
        low, high = self.milliseconds(np.array([least, most]), squares)
        return max(float(high - low) / float(low) / (most - least), 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a JSON file."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(resolve_output(path), f"{text}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepCosts:
        """Read the file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or is no table of step costs.
        """
        try:
            with open_regular(path) as file:
                fields = json.loads(file.read(_MOST_BYTES))
            if fields.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            packs = tuple(Timed(**pack) for pack in fields.pop("packs"))
            return cls(packs=packs, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a table of step costs written by `tune {flags.MEASURE}`: {error}"
            ) from None


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _line(packs: Sequence[Timed]) -> tuple[float, float]:
    """Fit ``ms = base + slope * squares`` by least squares and return base and slope.

    The slope is at least 0. If all packs have the same sum of squares, the slope is 0.
    """
    squares, times = (
        np.array([getattr(pack, name) for pack in packs], float) for name in ("squares", "ms")
    )
    spread = squares - squares.mean()
    slope = max(float(spread @ times) / float(spread @ spread), 0.0) if spread.any() else 0.0
    return float(times.mean() - slope * squares.mean()), slope
