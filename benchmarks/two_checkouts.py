"""Compares `model_step.py` of this checkout with that of another checkout.

    git worktree add ../before <commit>
    python benchmarks/two_checkouts.py ../before [shard8b] [hybrid1b]

The script compares time, launches, memory, loss and gradient norm, and writes
``results/two_checkouts.json``. Each checkout measures its own code in separate processes, and the
checkouts take turns. Each ratio compares two consecutive measurements. A ratio of 1 is no
difference; below 1 this checkout needs less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).resolve().parents[1]
NAME = "two_checkouts"
PATHS = {"eager": "megatron_packed", "one CUDA graph": "graph"}


def measured(checkout: Path, configs: list[str]) -> dict[str, Any]:
    """Return the results of `model_step.py` by configuration.

    The measurement runs in a process that imports the package of ``checkout``.
    """
    side = f"{NAME}_side"
    command = [
        sys.executable,
        "benchmarks/model_step.py",
        *configs,
        "--skip-megatron",
        "--kernels",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(
        [*command, "--name", side],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    path = checkout / "benchmarks" / "results" / f"{side}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    path.unlink()
    return results


def rows_of(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, object]]:
    """Return a row for each configuration and path.

    Args:
        rounds: results of this checkout and of the other checkout, for each round.
    """
    rows = []
    for config in rounds[0][0]:
        for path, key in PATHS.items():
            pairs = [(here[config][key], other[config][key]) for here, other in rounds]

            def ratio(name: str, pairs: list[tuple[Any, Any]] = pairs) -> str:
                sides = [[_number(one[name]) for one in side] for side in zip(*pairs)]
                return harness.shown(harness.Spread.of_ratios(*sides))

            here, other = pairs[0]
            eager = path == "eager"
            same = (
                {name: here[name] == other[name] for name in ("loss", "grad_norm")} if eager else {}
            )
            rows.append(
                {
                    "config": config,
                    "path": path,
                    "wall ms": f"{_number(here['wall_ms']):.2f}",
                    "other's wall ms": f"{_number(other['wall_ms']):.2f}",
                    "wall": ratio("wall_ms"),
                    "GPU-busy": ratio("busy_ms"),
                    "launches": ratio("launches") if eager else "",
                    "peak GiB": ratio("peak_gib") if eager else "",
                    **{f"same {name}": same.get(name, "") for name in ("loss", "grad_norm")},
                }
            )
    return rows


def _number(value: Any) -> float:
    """Return the median of a `Spread`, or the value itself."""
    return float(value[0] if isinstance(value, list) else value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("configs", nargs="*", help="configurations of model_step.py (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each checkout"
    )
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        sides = [HERE, arguments.other.resolve()]
        order = sides if number % 2 == 0 else sides[::-1]
        found = {checkout: measured(checkout, arguments.configs) for checkout in order}
        rounds.append((found[sides[0]], found[sides[1]]))
        rows = rows_of(rounds)
        harness.save(NAME, rows)
        print(harness.table(rows), flush=True)


if __name__ == "__main__":
    main()
