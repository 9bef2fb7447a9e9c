"""Shared by the benchmarks: warm timing, GPU-busy time, host waits, and results with their
circumstances.

GPU-busy time is the union of the kernels' intervals in a profile, so overlapping streams are not
counted twice.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # a checkout that is not installed

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = (
    "torch",
    "triton",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "mamba-ssm",
    "causal-conv1d",
    "megatron-core",
)


class Spread(NamedTuple):
    """Median, 10th and 90th percentile over repeated, warm calls: milliseconds, or ratios of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Milliseconds."""
        return cls._of_values([1e3 * value for value in seconds])

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """Ratios of calls that took turns, pair by pair."""
        return cls._of_values([a / b for a, b in zip(numerators, denominators)])

    @classmethod
    def _of_values(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return cls(round(statistics.median(ordered), 4), round(low, 4), round(high, 4))


def shown(spread: Sequence[float] | None) -> str:
    """'median [10th, 90th percentile]' of a `Spread` or of what JSON made of it; nothing for None."""
    if spread is None:
        return ""
    median, low, high = spread
    return f"{median:.4g} [{low:.4g}, {high:.4g}]"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tune_over(tilings: int | None) -> None:
    """Triton kernels, ours and mamba-ssm's, are tuned over so many of their tilings: a first step
    in seconds. None leaves all of them.
    """
    if tilings is None:
        return
    for package in ("megatron_packed.ops", "mamba_ssm.ops.triton"):
        if find_spec(package.split(".")[0]) is None:
            continue
        root = import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            with suppress(ImportError):  # backends whose library is not there
                for kernel in vars(import_module(module.name)).values():
                    configs = getattr(kernel, "configs", None)
                    if isinstance(configs, list) and len(configs) > tilings:
                        step = -(-len(configs) // tilings)
                        kernel.configs = configs[::step]


def free_memory() -> None:
    """Free the memory of models that are not referenced any more (their hooks make cycles)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wall(function: Callable[[], object], *, warm: int = 5, repeats: int = 20) -> Spread:
    """Wall-clock of ``function`` with the device drained before and after each call: median, 10th,
    90th percentile.
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
    """`wall` of several functions taking turns, so that a drift of the machine reaches all alike."""
    samples = interleaved_seconds(functions, warm=warm, repeats=repeats)
    return {name: Spread.of(seconds) for name, seconds in samples.items()}


def interleaved_seconds(
    functions: dict[str, Callable[[], object]], *, warm: int = 5, repeats: int = 20
) -> dict[str, list[float]]:
    """Seconds of every call of `interleaved`; the n-th entries belong together. Every other round
    runs backwards.
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
    """Time between CUDA events around each call: for single ops whose launch time would drown the
    kernel.
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
    events = device_events(profiler)
    totals: dict[str, float] = {}
    for event in events:
        totals[event.name] = (
            totals.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / calls
        )
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    return Busy(union_ms(events) / calls, len(events) / calls, ranked)


class WallAndBusy(NamedTuple):
    """Of one call: wall-clock and GPU-busy milliseconds, and their ratio, round by round."""

    wall: Spread
    busy: Spread
    ratio: Spread


def wall_and_busy(replay: Callable[[], object], *, calls: int = 8, rounds: int = 5) -> WallAndBusy:
    """Wall-clock of a graph's replay over its GPU-busy time, the GPU being at the same clocks for
    both.

    Under load a GPU settles at lower clocks than after a rest, and a profiler gives it a rest
    before it starts. So in every round the calls that are timed, and those that are profiled, come
    right after as many that do not count. The device is drained after each call, as `wall` does.
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
                f"{len(events)} device events of {2 * calls} equal calls: the profiler lost some"
            )
        busies.append(union_ms(events[len(events) // 2 :]) / calls / 1e3)
    return WallAndBusy(Spread.of(walls), Spread.of(busies), Spread.of_ratios(walls, busies))


class Row(NamedTuple):
    """Milliseconds of one call among many in a row, which are drained at the end only."""

    wall: float
    busy: float
    """Under a profiler, in a row like that: the kernels' union."""
    span: float
    """In the same profile: from the start of the first kernel to the end of the last. Gaps between
    kernels are what it has beyond ``busy``, at the very same clocks; the profiler may add to them.
    """


def row(function: Callable[[], object], *, calls: int) -> Row:
    """Each row comes right after one that does not count, as in `wall_and_busy`."""
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
            f"{len(events)} device events of {2 * calls} equal calls: the profiler lost some"
        )
    settled = events[len(events) // 2 :]
    span = max(event.time_range.end for event in settled) - settled[0].time_range.start
    return Row(1e3 * wall, union_ms(settled) / calls, span / 1e3 / calls)


def device_events(profiler: Any) -> list[Any]:
    """Kernels, copies and memsets in the order of their starts."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(events, key=lambda event: event.time_range.start)


def union_ms(events: Sequence[Any]) -> float:
    """Milliseconds in which at least one of the events, given in the order of their starts, was
    running.
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
"""Calls in a profile that make the host wait."""


class HostWaits(NamedTuple):
    """How often one call made the host wait for the device, seen in two ways."""

    torch_warnings: int
    """Synchronising operations of torch, by ``torch.cuda.set_sync_debug_mode``; it does not see
    inside libraries.
    """
    runtime_calls: int
    """Synchronising calls of the CUDA runtime and driver in a profile, whoever made them."""
    copies_to_host: int
    """Copies from device to host in that profile."""


def host_waits(function: Callable[[], object]) -> HostWaits | None:
    """Counts the waits of one call; None without a GPU. Call after warm-up."""
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
    """Most GPU memory allocated during one call, in GiB, weights included; None without a GPU."""
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
    """The command line as one types it in the checkout: folders of this machine left out."""
    script, *rest = sys.argv
    path, root = Path(script).resolve(), Path(__file__).resolve().parents[1]
    shown = path.relative_to(root) if path.is_relative_to(root) else f"benchmarks/{path.name}"
    return " ".join(["python", str(shown), *(_without_folder(text) for text in rest)])


def _without_folder(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark that runs on either device."""
    parser.add_argument(
        "--quick", action="store_true", help="few repeats: shows that it works, times nothing well"
    )
    parser.add_argument(
        "--device", default="auto", help="auto (the GPU when there is one), cuda or cpu"
    )
    parser.add_argument(
        "--results", type=Path, help="folder of the result file (default: benchmarks/results)"
    )


def tilings_argument(parser: argparse.ArgumentParser) -> None:
    """The option whose value `tune_over` takes."""
    parser.add_argument(
        "--tilings", type=int, help="tune Triton kernels over so many tilings (default: all)"
    )


def save(name: str, results: object, *, folder: Path | None = None) -> Path:
    """Writes ``results/<name>.json`` with the command, versions, device and date.

    Scripts save after each of their cases: a machine that is taken away leaves what was measured.
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
    """``results`` as they come back from a result file: tables are made of this form alone."""
    return json.loads(json.dumps(results))


def markdown(rows: Sequence[dict[str, object]]) -> str:
    """Rows of equal keys as a Markdown table."""
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows of equal keys as an aligned text table."""
    header = list(rows[0])
    cells = [header] + [[str(row.get(key, "")) for key in header] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells
    )
