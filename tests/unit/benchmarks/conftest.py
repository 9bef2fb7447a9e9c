"""Make the benchmark scripts importable by name, as they import each other."""

import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture
def without_profiler(monkeypatch):
    """Replace measurements that need a GPU's profile by numbers, but still call the functions."""
    import graph_step
    import harness
    from harness import Busy, Row, Spread, WallAndBusy

    ticks = count(1)

    def busy(function, *, calls):
        for _ in range(calls):
            function()
        return Busy(float(next(ticks)), 7.0, [])

    def both(function, *, calls, rounds):
        assert rounds == 1
        value = busy(function, calls=calls).milliseconds
        return WallAndBusy(*(Spread.of([1e-3 * x]) for x in (2 * value, value, 0.002)))

    def row(function, *, calls):
        value = busy(function, calls=calls).milliseconds
        return Row(3 * value, value, 2.5 * value)

    monkeypatch.setattr(harness, "row", row)
    monkeypatch.setattr(harness, "gpu_busy", busy)
    monkeypatch.setattr(harness, "wall_and_busy", both)
    monkeypatch.setattr(graph_step, "host_launches", lambda function, calls: 42.0)
