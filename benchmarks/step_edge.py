"""Wall-clock time over GPU-busy time of a whole training run, and the gaps between kernels.

    python benchmarks/step_edge.py runs/real.zip docs_longtail [--graphs full_iteration local]

The archive comes from `prepare_real.py`. One process trains the model of a recipe on real documents,
with 8 packs of 8,192 tokens a step. Some steps run under a profiler, the others measure the
wall-clock time. The GPU is busy while at least one kernel or copy runs. The table lists where the GPU
waits longest: the time between the end of a kernel and the start of the next one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import recipe_mfu
from workloads import device_from

LONG_GAP_US = 5.0
SHOWN = 12
"""Pairs of kernels in the table."""
KERNELS_STORED = 60
"""Kernels whose times are in the result file."""
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that occupy the GPU."""
FIRST_PROFILED, LAST_PROFILED, STEPS = 8, 11, 20
"""The profiled steps come after the first and up to the last of these numbers."""


class Span(NamedTuple):
    """Kernel or copy on the GPU; times in microseconds."""

    start: float
    end: float
    name: str


class Gap(NamedTuple):
    """Time in which the GPU waits between two kernels."""

    microseconds: float
    before: str
    after: str


def spans_of(trace: Path) -> list[Span]:
    """Return the kernels and copies of a Chrome trace, sorted by their start."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted(
        Span(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ON_THE_GPU
    )


def busy_and_gaps(spans: Sequence[Span]) -> tuple[float, list[Gap]]:
    """Return the microseconds in which a kernel runs, and the gaps between them."""
    busy, gaps, last = 0.0, [], spans[0]
    end = spans[0].start
    for span in spans:
        if span.start > end:
            gaps.append(Gap(span.start - end, last.name, span.name))
        busy += max(0.0, span.end - max(span.start, end))
        if span.end >= end:
            end, last = span.end, span
    return busy, gaps


def total_us(gaps: Iterable[Gap]) -> float:
    return sum(gap.microseconds for gap in gaps)


def by_pair(gaps: Iterable[Gap], steps: int) -> list[dict[str, Any]]:
    """Return the gaps added up per pair of kernels and per step, the longest first."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for gap in gaps:
        pairs.setdefault((gap.before[:70], gap.after[:70]), []).append(gap.microseconds)
    rows = [
        {
            "before": before,
            "after": after,
            "us_per_step": round(sum(found) / steps, 1),
            "per_step": round(len(found) / steps, 2),
            "longest_us": round(max(found), 1),
        }
        for (before, after), found in pairs.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])


def by_name(spans: Iterable[Span], steps: int) -> list[tuple[str, float, float]]:
    """Return name, milliseconds per step and launches per step of each kernel, slowest first."""
    totals: dict[str, list[float]] = {}
    for span in spans:
        totals.setdefault(span.name[:120], []).append(span.end - span.start)
    rows = [
        (name, round(sum(times) / steps / 1e3, 4), round(len(times) / steps, 2))
        for name, times in totals.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def measure(folder: Path, name: str, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a process, and return wall-clock time, GPU-busy time and gaps per step."""
    found = recipe_mfu.run(folder, name, recipe, options)
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    # A quarter of the steps warms up. The step after the profiled ones begins on an idle GPU.
    walls = [
        record["step_time_ms"]
        for record in records
        if "lm_loss" in record and record["iteration"] > LAST_PROFILED + 1
    ]
    result: dict[str, Any] = {
        "kernels": found["kernels"],
        "plan_hash": found["plan_hash"],
        "mfu": found["mfu"],
        "tokens_per_second": found["tokens_per_second"],
        "wall_ms": harness.Spread.of([value / 1e3 for value in walls]),
    }
    spans = spans_of(folder / "profile" / "trace_rank0.json.gz")
    if not spans:
        return result
    steps = LAST_PROFILED - FIRST_PROFILED
    busy, gaps = busy_and_gaps(spans)
    long = [gap for gap in gaps if gap.microseconds > LONG_GAP_US]
    return result | {
        "busy_ms": round(busy / steps / 1e3, 3),
        "wall_over_busy": round(statistics.median(walls) * 1e3 * steps / busy, 4),
        "launches": round(len(spans) / steps),
        "short_gaps_ms": round((total_us(gaps) - total_us(long)) / steps / 1e3, 3),
        "long_gaps_ms": round(total_us(long) / steps / 1e3, 3),
        "all_gaps": by_pair(gaps, steps)[:SHOWN],
        "long_gaps": by_pair(long, steps)[:SHOWN],
        "kernel_ms": by_name(spans, steps)[:KERNELS_STORED],
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each kind of graphs, from results in the form of a result file."""
    return [
        {
            "graphs": name,
            "step ms": harness.shown(found["wall_ms"]),
            "GPU-busy ms": found.get("busy_ms", ""),
            "wall / busy": found.get("wall_over_busy", ""),
            "kernels": found.get("launches", ""),
            "gaps above 5 us, ms": found.get("long_gaps_ms", ""),
            "other gaps, ms": found.get("short_gaps_ms", ""),
            "MFU": harness.shown(found["mfu"]) if found["mfu"] else "",
            "plan": found["plan_hash"][:12],
        }
        for name, found in results["runs"].items()
    ]


def gap_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each pair of kernels with long gaps between them."""
    return [
        {
            "graphs": name,
            "us a step": row["us_per_step"],
            "gaps a step": row["per_step"],
            "longest us": row["longest_us"],
            "kernel before": f"`{row['before']}`",
            "kernel after": f"`{row['after']}`",
        }
        for name, found in results["runs"].items()
        for row in found.get("long_gaps", [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="file made by prepare_real.py")
    parser.add_argument("set", help="name of a set in the archive")
    parser.add_argument("--recipe", default="hybrid_1b", help="model in examples/recipes")
    parser.add_argument(
        "--graphs", nargs="+", default=recipe_mfu.GRAPHS[:2], choices=recipe_mfu.GRAPHS
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    on_gpu = device_from(arguments.device).type == "cuda"
    options: dict[str, Any] = {
        **(recipe_mfu.QUICK if arguments.quick else {**recipe_mfu.RUN, "global-batch-size": 8}),
        "train-iters": STEPS,
        "device": arguments.device,
        "profile": True,
        "use-pytorch-profiler": True,
        "profile-step-start": FIRST_PROFILED,
        "profile-step-end": LAST_PROFILED,
    }
    results: dict[str, Any] = {"recipe": arguments.recipe, "set": arguments.set, "runs": {}}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(arguments.archive) as archive:
        archive.extractall(folder)
        place = Path(folder) / arguments.set
        for name in arguments.graphs if on_gpu else ("none",):
            chosen = options | {"cuda-graph-impl": name}
            results["runs"][name] = measure(place, arguments.set, arguments.recipe, chosen)
            path = harness.save("step_edge", results, folder=arguments.results)
    plain = harness.plain(results)
    print(harness.table(rows_of(plain)))
    if gap_rows := gap_rows_of(plain):
        print(harness.table(gap_rows))
    print(path)


if __name__ == "__main__":
    main()
