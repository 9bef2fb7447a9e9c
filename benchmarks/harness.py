"""Shared by the benchmarks: warm timing, GPU-busy time, and results with their circumstances.

GPU-busy time is the union of the kernels' intervals in a profile, so overlapping streams are not counted twice.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = (
    "torch", "triton", "transformer-engine", "flash-attn", "flash-attn-4", "mamba-ssm", "causal-conv1d", "megatron-core"
)  # fmt: skip


class Spread(NamedTuple):
    """Milliseconds over repeated, warm calls."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ms = sorted(1e3 * value for value in seconds)
        return cls(round(statistics.median(ms), 4), round(ms[len(ms) // 10], 4), round(ms[-1 - len(ms) // 10], 4))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall(function: Callable[[], object], *, warm: int = 5, repeats: int = 20) -> Spread:
    """Wall-clock of ``function`` with the device drained before and after each call: median, 10th, 90th percentile."""
    for _ in range(warm):
        function()
    seconds = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Spread.of(seconds)


def interleaved(functions: dict[str, Callable[[], object]], *, warm: int = 5, repeats: int = 20) -> dict[str, Spread]:
    """`wall` of several functions taking turns, so that a drift of the machine reaches all alike."""
    for function in functions.values():
        for _ in range(warm):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: Spread.of(values) for name, values in seconds.items()}


def device_time(function: Callable[[], object], *, warm: int = 10, repeats: int = 50) -> Spread:
    """Time between CUDA events around each call: for single ops whose launch time would drown the kernel."""
    for _ in range(warm):
        function()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return Spread.of([start.elapsed_time(end) / 1e3 for start, end in pairs])


class Busy(NamedTuple):
    """What the GPU did during some calls, per call."""

    milliseconds: float
    launches: float
    kernels: list[tuple[str, float]]
    """Name and milliseconds per call, longest first."""


def gpu_busy(function: Callable[[], object], *, calls: int = 3) -> Busy:
    """Union of the device intervals of ``calls`` calls, per call. Call after warm-up."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        if stop > end:
            busy += stop - max(start, end)
            end = stop
    totals: dict[str, float] = {}
    for event in events:
        totals[event.name] = totals.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / calls
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    return Busy(busy / 1e3 / calls, len(events) / calls, ranked)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _LIBRARIES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def save(name: str, results: object, *, folder: Path | None = None) -> Path:
    """Writes ``results/<name>.json`` with the command, versions, device and date."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(),
        "versions": versions(),
        "results": results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows of equal keys as an aligned text table."""
    header = list(rows[0])
    cells = [header] + [[str(row.get(key, "")) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)
