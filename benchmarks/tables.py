"""Fills the tables of the documentation from `benchmarks/results/*.json`.

    python benchmarks/tables.py [--check]

A page of docs/ says where a table goes with ``<!-- begin: table NAME -->`` and ``<!-- end -->``. A
table whose results are not there yet says how to get them. ``--check`` writes nothing and fails if
a page is not what the results give.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import capacity_cost
import full_step
import graph_runs
import graph_step
import harness
import layouts
import metadata_sync
import offload
import op_backends
import packed_vs_padded
import plan_peaks
import repeatability
import rope_bench
import train_real
import tune_prediction

DOCS = Path(__file__).parent.parent / "docs"
MARKER = re.compile(r"<!-- begin: table (\S+) -->")
END = "<!-- end -->"
Rows = list[dict[str, object]]


class Table(NamedTuple):
    script: str
    """Which script of benchmarks/ writes the results."""
    result: str | tuple[str, ...]
    """Name of the result file, without suffix; of several, where a table is made from all."""
    rows: Callable[..., Rows]


def model_step_rows(results: dict[str, Any]) -> Rows:
    rows = []
    for config, result in results.items():
        for path in ("megatron_core", "megatron_packed", "graph"):
            if path not in result:
                continue
            found = result[path]
            rows.append(
                {
                    "config": config,
                    "path": {"graph": "megatron_packed, one CUDA graph"}.get(
                        path, f"{path}, eager"
                    ),
                    "wall ms": harness.shown(found["wall_ms"]),
                    "GPU-busy ms": harness.shown(found["busy_ms"]),
                    "wall / busy": harness.shown(found["wall_over_busy"])
                    if path == "graph"
                    else found["wall_over_busy"],
                    "busy / megatron_core's": harness.shown(result.get("busy_ratio"))
                    if path == "megatron_packed"
                    else "",
                    "MFU of wall, busy": percentages(
                        found.get("mfu_of_wall"), found.get("mfu_of_busy")
                    ),
                    "launches": f"{found['launches']:.0f}" if "launches" in found else "",
                    "peak GiB": found.get("peak_gib", ""),
                    "loss": f"{found['loss']:.5f}" if "loss" in found else "",
                    "gradient norm": f"{found['grad_norm']:.5f}" if "grad_norm" in found else "",
                    "plan": result["plan_hash"],
                }
            )
    return rows


def percentages(*shares: float | None) -> str:
    return ", ".join("" if share is None else f"{100 * share:.1f} %" for share in shares).strip(
        ", "
    )


def replay_rows(results: dict[str, Any]) -> Rows:
    """One captured forward + backward, replayed over packings that it was not captured on."""
    return [
        {
            "config": config,
            "packing": one["packing"],
            "loss: replay, eager": f"{one['loss_replay']:.6f}, {one['loss_eager']:.6f}",
            "gradients: replay to eager": f"{one['grad_difference']:.1e}",
            "gradients: eager to eager": f"{one['eager_against_eager']:.1e}",
            "finite": one["finite"],
        }
        for config, result in results.items()
        for one in result["graph"]["packings"]
    ]


def op_rows(results: dict[str, Any]) -> Rows:
    rows: Rows = []
    for op, backends in results.items():
        for backend, found in backends.items():
            row: dict[str, object] = dict.fromkeys(OP_COLUMNS, "")
            row |= {"op": op, "backend": backend}
            if isinstance(found, str):
                row["isolation"] = why_not(found)
            else:
                again = found.get("replay", "not measured")
                measured = isinstance(again, dict)
                row |= {
                    "error / plain bf16's": f"{found['worst_ratio']:.2f}",
                    "isolation": op_backends.isolation_summary(found["isolation"]),
                    "run to run": ", ".join(found["run_to_run_differ"]) or "bitwise",
                    "replay = eager": replay_text(again) if measured else why_not(again),
                    "forward + backward ms": harness.shown(again["forward_backward_ms"])
                    if measured
                    else "",
                }
            rows.append(row)
    return rows


OP_COLUMNS = (
    "op",
    "backend",
    "error / plain bf16's",
    "isolation",
    "run to run",
    "replay = eager",
    "forward + backward ms",
)


def replay_text(found: dict[str, Any]) -> str:
    if not found["differ"]:
        return "bitwise"
    return f"{', '.join(found['differ'])} by {found['max_relative']:.1e}"


def why_not(text: str) -> str:
    """A refusal or failure in a few words: what stands behind the last description of the inputs."""
    kind, _, reason = text.partition(": ")
    if "NoBackendError" in reason:
        kind = "refused"
    reason = reason.rsplit("): ", 1)[-1]
    return f"{kind}: {reason[:120]}".replace("|", "/").replace("\n", " ")


TABLES = {
    "model_step": Table("model_step.py", "model_step", model_step_rows),
    "model_step_replay": Table("model_step.py", "model_step", replay_rows),
    "graph_step": Table("graph_step.py", "graph_step", graph_step.rows_of),
    "graph_step_sizes": Table("graph_step.py", "graph_step", graph_step.size_rows_of),
    "graph_step_memory": Table("graph_step.py", "graph_step", graph_step.memory_rows_of),
    "full_step": Table("full_step.py", "full_step", full_step.rows_of),
    "full_step_memory": Table("full_step.py", "full_step", full_step.memory_rows_of),
    "graph_runs_equal": Table("graph_runs.py", "graph_runs", graph_runs.equal_rows_of),
    "graph_runs_epochs": Table("graph_runs.py", "graph_runs", graph_runs.epoch_rows_of),
    **{
        f"layouts_{world}_{model}{suffix}": Table("layouts.py", f"layouts_{world}_{model}", rows)
        for world in layouts.LAYOUTS
        for model in layouts.MODELS
        for suffix, rows in (("", layouts.rows_of), ("_graphs", layouts.graph_rows_of))
    },
    "layouts_scaling": Table(
        "layouts.py",
        tuple(f"layouts_{world}_{model}" for world in layouts.LAYOUTS for model in layouts.MODELS),
        layouts.scaling_rows_of,
    ),
    "capacity_cost": Table("capacity_cost.py", "capacity_cost", capacity_cost.rows_of),
    "capacity_cost_mamba": Table("capacity_cost.py", "capacity_cost", capacity_cost.mamba_rows_of),
    "offload": Table("offload.py", "offload", offload.rows_of),
    "offload_copies": Table("offload.py", "offload", offload.copy_rows_of),
    "offload_graphs": Table("offload.py", "offload", offload.graph_rows_of),
    "plan_peaks": Table("plan_peaks.py", "plan_peaks", plan_peaks.rows_of),
    "repeatability": Table("repeatability.py", "repeatability", repeatability.rows_of),
    "op_backends": Table("op_backends.py", "op_backends", op_rows),
    "metadata_sync": Table("metadata_sync.py", "metadata_sync", metadata_sync.rows_of),
    "metadata_sync_equal": Table(
        "metadata_sync.py", "metadata_sync", metadata_sync.equality_rows_of
    ),
    "rope": Table("rope_bench.py", "rope", rope_bench.rows_of),
    "rope_errors": Table("rope_bench.py", "rope", rope_bench.error_rows_of),
    "packed_vs_padded": Table("packed_vs_padded.py", "packed_vs_padded", packed_vs_padded.rows_of),
    "packed_vs_padded_data": Table(
        "packed_vs_padded.py", "packed_vs_padded", packed_vs_padded.data_rows_of
    ),
    "train_real": Table("train_real.py", "train_real", train_real.rows_of),
    "two_checkouts": Table("two_checkouts.py", "two_checkouts", list),
    "tune_prediction": Table("tune_prediction.py", "tune_prediction", tune_prediction.rows_of),
}


def content_of(name: str, folder: Path) -> str:
    """A table with its circumstances, or how to get it.

    Raises:
        SystemExit: a page asks for a table that no script makes.
    """
    if name not in TABLES:
        raise SystemExit(f"no table {name}; there are {', '.join(TABLES)}")
    wanted = TABLES[name]
    if isinstance(wanted.result, tuple):  # whose circumstances stand above the tables of each
        paths = [path for result in wanted.result if (path := folder / f"{result}.json").exists()]
        rows = wanted.rows(*(json.loads(path.read_text())["results"] for path in paths))
        return harness.markdown(rows) if rows else "Not measured yet."
    path = folder / f"{wanted.result}.json"
    if not path.exists():
        return f"Not measured yet: `python benchmarks/{wanted.script}` writes `benchmarks/results/{path.name}`."
    document = json.loads(path.read_text())
    versions = ", ".join(
        f"{library} {version}" for library, version in document["versions"].items()
    )
    circumstances = (
        f"{document['device']}, {document['date']}, `{document['command']}`; {versions}."
    )
    return f"{circumstances}\n\n{harness.markdown(wanted.rows(document['results']))}"


def filled(text: str, folder: Path) -> str:
    """A page with all its tables."""
    for marker in MARKER.finditer(text):
        text = harness.between_markers(text, marker[0], END, content_of(marker[1], folder))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is out of date"
    )
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    stale = []
    for page in sorted(arguments.docs.glob("*.md")):
        text = page.read_text()
        new = filled(text, arguments.results)
        if new != text:
            stale.append(page.name)
            if not arguments.check:
                page.write_text(new)
    print(f"{'out of date' if arguments.check else 'written'}: {', '.join(stale) or 'nothing'}")
    if arguments.check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
