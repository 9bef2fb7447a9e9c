"""Comparison of the runs of examples/slurm/sweep_capacities.sbatch.

    python examples/slurm/capacities.py RUN_FOLDER

It prints a line for each capacity, with medians over the second half of its log. The column
``graph_hit_rate`` is the share of micro-batches that graphs replayed.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

FIGURES = (
    "step_time_ms",
    "tokens_per_second",
    "docs_per_pack",
    "pack_fill",
    "graph_hit_rate",
    "graph_memory_mib",
)


def medians(log: Path) -> dict[str, float]:
    """Return the median of each figure in the log, over the second half of its steps."""
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if "lm_loss" in line]
    half = steps[len(steps) // 2 :]
    return {
        name: statistics.median(line[name] for line in half)
        for name in FIGURES
        if half and name in half[0]
    }


def table(folder: Path) -> str:
    """Return the table of all runs in a folder, with the fastest run first."""
    runs = {
        log.parent.name.partition("_")[2]: medians(log)
        for log in folder.glob("capacity_*/log.jsonl")
    }
    if not runs:
        raise SystemExit(
            f"{folder} contains no capacity_*/log.jsonl; pass the folder of the sweep."
        )
    lines = [" ".join(["capacity".ljust(12), *(name.rjust(17) for name in FIGURES)])]
    for capacity, found in sorted(
        runs.items(), key=lambda item: -item[1].get("tokens_per_second", 0.0)
    ):
        cells = (f"{found[name]:.2f}" if name in found else "-" for name in FIGURES)
        lines.append(" ".join([capacity.ljust(12), *(cell.rjust(17) for cell in cells)]))
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(table(Path(sys.argv[1])))
