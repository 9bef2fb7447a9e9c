"""Timers, GPU profiles, host-wait counters and result files for the benchmarks.

GPU-busy time is the union of the kernels' intervals in a profile, so kernels that overlap on
several streams are counted once. To drain the device means to wait until all queued work is done. A
result file also stores the command, date, device and library versions.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import pkgutil
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

# lets the scripts run from a checkout that is not installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from megatron_packed.config.environment_variables import assembler_variables

for _name, _value in assembler_variables().items():  # kernels are compiled as in a run
    os.environ.setdefault(_name, _value)

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = (
    "torch",
    "triton",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "quack-kernels",
    "mamba-ssm",
    "causal-conv1d",
    "megatron-core",
    "fla-core",
    "flash-qla",
    "tilelang",
)


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of repeated calls after warm-up, in milliseconds or as
    ratios.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of durations in seconds, converted to milliseconds."""
        return cls._of_values([1e3 * value for value in seconds])

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Return the spread of the ratios of two series, pair by pair.

        The n-th values of both series come from the same round of calls.
        """
        return cls._of_values([a / b for a, b in zip(numerators, denominators)])

    @classmethod
    def _of_values(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return cls(round(statistics.median(ordered), 4), round(low, 4), round(high, 4))


def shown(spread: Sequence[float] | None) -> str:
    """Format a `Spread`, or its list from a result file, as 'median [10th, 90th percentile]'.

    None becomes an empty string.
    """
    if spread is None:
        return ""
    median, low, high = spread
    return f"{median:.4g} [{low:.4g}, {high:.4g}]"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tune_over(tilings: int | None) -> None:
    """Limit the autotuning of Triton kernels to about ``tilings`` tilings of each kernel.

    The limit covers the kernels of megatron_packed and of mamba-ssm and makes the first step take
    seconds. None keeps all tilings.
    """
    if tilings is None:
        return
    for package in ("megatron_packed.ops", "mamba_ssm.ops.triton"):
        if find_spec(package.split(".")[0]) is None:
            continue
        root = import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            with suppress(ImportError):  # skips backends whose library is not installed
                for kernel in vars(import_module(module.name)).values():
                    configs = getattr(kernel, "configs", None)
                    if isinstance(configs, list) and len(configs) > tilings:
                        step = -(-len(configs) // tilings)
                        kernel.configs = configs[::step]


def free_memory() -> None:
    """Free the memory of models that nothing references any more.

    Their hooks form reference cycles, so a garbage collection comes first.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wall(function: Callable[[], object], *, warm: int = 5, repeats: int = 20) -> Spread:
    """Return the wall-clock time of ``function``: median, 10th and 90th percentile.

    The device is drained before and after each call.
    """
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


def interleaved(
    functions: dict[str, Callable[[], object]], *, warm: int = 5, repeats: int = 20
) -> dict[str, Spread]:
    """Return the `wall` times of several functions that take turns.

    Taking turns spreads a drift of the machine's speed evenly over all functions.
    """
    samples = interleaved_seconds(functions, warm=warm, repeats=repeats)
    return {name: Spread.of(seconds) for name, seconds in samples.items()}


def interleaved_seconds(
    functions: dict[str, Callable[[], object]], *, warm: int = 5, repeats: int = 20
) -> dict[str, list[float]]:
    """Return the seconds of every call of `interleaved`, by function.

    The n-th entries of all functions come from the same round. Every second round runs the
    functions in reverse order.
    """
    for function in functions.values():
        for _ in range(warm):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(repeats):
        for name in list(functions) if number % 2 == 0 else reversed(functions):
            synchronize()
            start = time.perf_counter()
            functions[name]()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def device_time(function: Callable[[], object], *, warm: int = 10, repeats: int = 50) -> Spread:
    """Return the time between CUDA events around each call.

    For single ops: their launch time on the host would hide the kernel in a wall-clock time.
    """
    for _ in range(warm):
        function()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return Spread.of([start.elapsed_time(end) / 1e3 for start, end in pairs])


class Busy(NamedTuple):
    """GPU work of some calls in a profile, as a mean per call."""

    milliseconds: float
    launches: float
    kernels: list[tuple[str, float]]
    """Name and milliseconds per call of each kernel, longest first."""


def gpu_busy(function: Callable[[], object], *, calls: int = 3) -> Busy:
    """Return the GPU-busy time, the launches and the kernels of ``calls`` calls, per call.

    Warm the function up first.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    events = device_events(profiler)
    totals: dict[str, float] = {}
    for event in events:
        totals[event.name] = (
            totals.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / calls
        )
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    return Busy(union_ms(events) / calls, len(events) / calls, ranked)


class WallAndBusy(NamedTuple):
    """Wall-clock milliseconds, GPU-busy milliseconds and their ratio, for one call.

    The ratio pairs the two times of each round.
    """

    wall: Spread
    busy: Spread
    ratio: Spread


def wall_and_busy(replay: Callable[[], object], *, calls: int = 8, rounds: int = 5) -> WallAndBusy:
    """Return the wall-clock and GPU-busy time of a graph's replay, measured at the same GPU clocks.

    A GPU runs at lower clocks under load than after a rest, and starting a profiler lets the GPU
    rest. So in every round the timed calls, and the profiled calls, directly follow the same number
    of calls that are not counted. The device is drained after each call, as in `wall`.
    """
    from torch.profiler import ProfilerActivity, profile

    def drained(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            replay()
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    walls, busies = [], []
    for _ in range(rounds):
        drained(calls)
        walls.append(drained(calls))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            drained(2 * calls)
        events = device_events(profiler)
        if len(events) % (2 * calls):
            raise RuntimeError(
                f"the profiler lost events: it recorded {len(events)} for {2 * calls} equal calls; "
                "run the benchmark again"
            )
        busies.append(union_ms(events[len(events) // 2 :]) / calls / 1e3)
    return WallAndBusy(Spread.of(walls), Spread.of(busies), Spread.of_ratios(walls, busies))


class Row(NamedTuple):
    """Milliseconds per call of a row of calls. The device is drained only at the end of the row."""

    wall: float
    busy: float
    """GPU-busy time in a second row of calls, which runs under a profiler."""
    span: float
    """Time from the start of the first kernel to the end of the last, in the same profile.

    The gaps between kernels are ``span`` minus ``busy``, at the same clocks. The profiler may add
    to the gaps.
    """


def row(function: Callable[[], object], *, calls: int) -> Row:
    """Measure a row of calls.

    Each measured row directly follows a row that is not counted, as in `wall_and_busy`.
    """
    from torch.profiler import ProfilerActivity, profile

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            function()
        synchronize()
        return (time.perf_counter() - start) / count

    run(calls)
    wall = run(calls)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(2 * calls)
    events = device_events(profiler)
    if len(events) % (2 * calls):
        raise RuntimeError(
            f"the profiler lost events: it recorded {len(events)} for {2 * calls} equal calls; "
            "run the benchmark again"
        )
    settled = events[len(events) // 2 :]
    span = max(event.time_range.end for event in settled) - settled[0].time_range.start
    return Row(1e3 * wall, union_ms(settled) / calls, span / 1e3 / calls)


def device_events(profiler: Any) -> list[Any]:
    """Return the kernels, copies and memsets of a profile, sorted by their start."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(events, key=lambda event: event.time_range.start)


def union_ms(events: Sequence[Any]) -> float:
    """Return the milliseconds in which at least one of the events was running.

    The events must be sorted by their start.
    """
    busy, end = 0.0, float("-inf")
    for event in events:
        start, stop = event.time_range.start, event.time_range.end
        if stop > end:
            busy += stop - max(start, end)
            end = stop
    return busy / 1e3


SYNCHRONISING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cuMemcpyDtoH_v2",
)
"""CUDA calls in a profile that make the host wait."""


class HostWaits(NamedTuple):
    """Number of times that one call made the host wait for the device, counted in two ways."""

    torch_warnings: int
    """Synchronising operations of torch, from ``torch.cuda.set_sync_debug_mode``. The mode does not
    see calls inside other libraries.
    """
    runtime_calls: int
    """Synchronising calls of the CUDA runtime and driver in a profile, from torch and all other
    libraries.
    """
    copies_to_host: int
    """Copies from the device to the host in the profile that counts ``runtime_calls``."""


def host_waits(function: Callable[[], object]) -> HostWaits | None:
    """Count the host waits of one call. Return None without a GPU.

    Warm the function up first.
    """
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile, record_function

    synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("counted_call"):
            function()
        synchronize()
    events = profiler.events()
    window = next(e for e in events if e.name == "counted_call").time_range
    inside = [
        e.name
        for e in events
        if window.start <= e.time_range.start and e.time_range.end <= window.end
    ]
    return HostWaits(
        torch_warnings=sum("called a synchronizing" in str(warning.message) for warning in caught),
        runtime_calls=sum(name in SYNCHRONISING for name in inside),
        copies_to_host=sum(name.startswith("Memcpy DtoH") for name in inside),
    )


def peak_gib(function: Callable[[], object]) -> float | None:
    """Return the peak GPU memory allocated during one call, in GiB, or None without a GPU.

    The peak includes the weights.
    """
    if not torch.cuda.is_available():
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    synchronize()
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)


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
    return (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    )


def command() -> str:
    """Return the command line as typed in the checkout.

    Absolute paths are cut to their last part, so that result files name no folder of the machine.
    """
    script, *rest = sys.argv
    path, root = Path(script).resolve(), Path(__file__).resolve().parents[1]
    shown = path.relative_to(root) if path.is_relative_to(root) else f"benchmarks/{path.name}"
    return " ".join(["python", str(shown), *(_without_folder(text) for text in rest)])


def _without_folder(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark that runs on both GPU and CPU."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few repeats; checks that the benchmark works, times are not reliable",
    )
    parser.add_argument(
        "--device", default="auto", help="auto (the GPU if there is one), cuda or cpu"
    )
    parser.add_argument(
        "--results", type=Path, help="folder of the result file (default: benchmarks/results)"
    )


def tilings_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option whose value `tune_over` takes."""
    parser.add_argument(
        "--tilings",
        type=int,
        help="number of tilings over which each Triton kernel is tuned (default: all)",
    )


def save(name: str, results: object, *, folder: Path | None = None) -> Path:
    """Write ``results/<name>.json`` with the command, versions, device and date.

    Scripts save after each of their cases. If the machine is lost, the finished cases are kept.
    """
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(),
        "versions": versions(),
        "results": results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def plain(results: Any) -> Any:
    """Convert ``results`` to the form that a result file gives back. Tables are made only from this
    form.
    """
    return json.loads(json.dumps(results))


def markdown(rows: Sequence[dict[str, object]]) -> str:
    """Format rows with the same keys as a Markdown table."""
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, object]]) -> str:
    """Format rows with the same keys as an aligned text table."""
    header = list(rows[0])
    cells = [header] + [[str(row.get(key, "")) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells
    )
