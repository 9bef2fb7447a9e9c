"""Writes the pages of measurements in `docs/measurements` from `benchmarks/results/*.json`.

    python benchmarks/tables.py [--check]

Every page has a template in `benchmarks/measurement_pages`. The template begins with two lines for
the list of pages, ``summary:`` and ``deciding:``, and ``measured:`` for a page without tables. It
continues with the text of the page:

- ``{{NAME}}`` on a separate line is replaced by a table.
- ``{{NAME | COLUMN=CELL | COLUMN}}`` is replaced by one number of a table.
- ``{{chart NAME | TEXT}}`` on a separate line is replaced by an image with this alternative text.
  The image is written next to the pages.
- ``{{circumstances}}`` is replaced by the command, device, date and versions of the results that
  the page uses, and by their kernels that are no longer the default (`kernel_dates.py`).

``--check`` writes nothing and fails if a page differs from its template and results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import beside_flash_qla
import beside_megatron
import capacity_cost
import doubled_beta
import elementwise
import expert_gradients
import expert_graphs
import full_step
import gated_delta_rule
import generation
import gradient_sums
import graph_runs
import graph_step
import harness
import kernel_dates
import layouts
import lora_expand
import memory_peaks
import metadata_sync
import offload
import op_backends
import optimizer_step
import packed_vs_padded
import packing_report
import plan_rates
import real_sizes
import recipe_mfu
import repeatability
import ssd
import state_precision
import step_edge
import step_times
import train_real
import tune_prediction

DOCS = Path(__file__).parent.parent / "docs" / "measurements"
TEMPLATES = Path(__file__).parent / "measurement_pages"
PLACE = re.compile(r"\{\{(.+?)\}\}")
Rows = list[dict[str, object]]


class Table(NamedTuple):
    script: str
    """Script of benchmarks/ that writes the results."""
    result: str | tuple[str, ...]
    """Name of the result file without suffix, or the names of all files that the table reads."""
    rows: Callable[..., Rows]
    """Function that makes rows from the results of each file."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the result files."""
        return (self.result,) if isinstance(self.result, str) else self.result


def model_step_rows(results: dict[str, Any]) -> Rows:
    """Return a row for each configuration and each path (megatron-core, eager, one CUDA graph)."""
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
    """Return shares as percentages, separated by commas. A share that is None becomes empty."""
    return ", ".join("" if share is None else f"{100 * share:.1f} %" for share in shares).strip(
        ", "
    )


def replay_rows(results: dict[str, Any]) -> Rows:
    """Return a row for each packing on which one captured forward and backward was replayed."""
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
    """Return a row for each op and backend."""
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
    """Return `bitwise`, or the results of a replay that differ and by how much."""
    if not found["differ"]:
        return "bitwise"
    return f"{', '.join(found['differ'])} by {found['max_relative']:.1e}"


def why_not(text: str) -> str:
    """Shorten the reason why a backend refused its inputs or failed.

    The description of the inputs is left out; at most 120 characters of the reason remain.
    """
    kind, _, reason = text.partition(": ")
    if "NoBackendError" in reason:
        kind = "refused"
    reason = reason.rsplit("): ", 1)[-1]
    return f"{kind}: {reason[:120]}".replace("|", "/").replace("\n", " ")


def same_numbers_rows(results: dict[str, Any]) -> Rows:
    """Return a row for each pair of runs that could run on the machine, with their differences."""
    return [
        {"run": name, "differences": "; ".join(found) or "none"}
        for name, found in results["differences"].items()
        if found is not None
    ]


def preprocess_rows(results: list[dict[str, Any]]) -> Rows:
    """Return a row for each tokenizer and input."""
    return [
        {
            "tokenizer": found["tokenizer"],
            "input": found["input"],
            "processes": found["workers"],
            "lines": f"{found['lines']:,}",
            "bad lines": f"{found['bad']:,}",
            "tokens": f"{found['tokens']:,}",
            "seconds": found["seconds"],
            "lines/s": f"{found['lines_per_second']:,}",
            "MB/s": found["mb_per_second"],
        }
        for found in results
    ]


def of_all(rows: Callable[[dict[str, Any]], Rows]) -> Callable[..., Rows]:
    """Return a function of several result files, whose rows are those of ``rows`` for each file."""
    return lambda *files: [row for results in files for row in rows(results)]


MODEL_STEPS = memory_peaks.MODEL_STEPS
PACKERS = ("packing_report.py", "packing_report")
TABLES = {
    "model_step": Table("model_step.py", MODEL_STEPS, of_all(model_step_rows)),
    "model_step_replay": Table("model_step.py", MODEL_STEPS, of_all(replay_rows)),
    **{
        name: Table("expert_graphs.py", name, expert_graphs.rows_of)
        for name in (
            "expert_graphs",
            *memory_peaks.SMALL_PACKS,
            "expert_graphs_shared_overlap",
        )
    },
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
        for model in layouts.IN_ALL_LAYOUTS
        for suffix, rows in (("", layouts.rows_of), ("_graphs", layouts.graph_rows_of))
    },
    **{
        f"layouts_{axis}_overlap{suffix}": Table(
            "layouts.py", f"layouts_2_hybrid1b_{axis}_overlap", rows
        )
        for axis in ("tp", "cp")
        for suffix, rows in (("", layouts.graph_rows_of), ("_exposed", layouts.exposed_rows_of))
    },
    **{
        f"layouts_cp_{name}{suffix}": Table("layouts.py", f"layouts_2_hybrid1b_cp_{name}", rows)
        for name in ("state", "contiguous", "zero")
        for suffix, rows in (("", layouts.graph_rows_of), ("_exposed", layouts.exposed_rows_of))
    },
    **{
        f"layouts_delta{suffix}": Table("layouts.py", "layouts_2_hybrid1b_delta", rows)
        for suffix, rows in (("", layouts.graph_rows_of), ("_exposed", layouts.exposed_rows_of))
    },
    **{
        f"layouts_tp_rows{suffix}": Table("layouts.py", "layouts_4_hybrid1b_tp_rows", rows)
        for suffix, rows in (("", layouts.graph_rows_of), ("_exposed", layouts.exposed_rows_of))
    },
    **{
        f"layouts_kinds_{model}{suffix}": Table("layouts.py", f"layouts_2_{model}_kinds", rows)
        for model in layouts.IN_ALL_LAYOUTS
        for suffix, rows in (("", layouts.rows_of), ("_graphs", layouts.graph_rows_of))
    },
    "layouts_scaling": Table(
        "layouts.py",
        tuple(
            f"layouts_{world}_{model}"
            for world in layouts.LAYOUTS
            for model in layouts.IN_ALL_LAYOUTS
        ),
        layouts.scaling_rows_of,
    ),
    "capacity_cost": Table("capacity_cost.py", "capacity_cost", capacity_cost.rows_of),
    "capacity_cost_mamba": Table("capacity_cost.py", "capacity_cost", capacity_cost.mamba_rows_of),
    "offload": Table("offload.py", "offload", offload.rows_of),
    "offload_copies": Table("offload.py", "offload", offload.copy_rows_of),
    "offload_graphs": Table("offload.py", "offload", offload.graph_rows_of),
    "memory_peaks": Table("memory_peaks.py", memory_peaks.RESULTS, memory_peaks.rows_of),
    "step_times": Table("step_times.py", step_times.RESULTS, step_times.rows_of),
    "plan_rates": Table("plan_rates.py", (), plan_rates.rows_of),
    "repeatability": Table("repeatability.py", "repeatability", repeatability.rows_of),
    "op_backends": Table("op_backends.py", "op_backends", op_rows),
    "metadata_sync": Table("metadata_sync.py", "metadata_sync", metadata_sync.rows_of),
    "metadata_sync_equal": Table(
        "metadata_sync.py", "metadata_sync", metadata_sync.equality_rows_of
    ),
    "generation": Table("generation.py", "generation", generation.rows_of),
    "elementwise": Table("elementwise.py", "elementwise", elementwise.rows_of),
    "step_edge": Table("step_edge.py", "step_edge", step_edge.rows_of),
    "step_edge_gaps": Table("step_edge.py", "step_edge", step_edge.gap_rows_of),
    "beside_flash_qla": Table("beside_flash_qla.py", "beside_flash_qla", beside_flash_qla.rows_of),
    "doubled_beta_errors": Table(
        "doubled_beta.py", "doubled_beta_errors", doubled_beta.error_rows_of
    ),
    "gated_delta_rule": Table("gated_delta_rule.py", "gated_delta_rule", gated_delta_rule.rows_of),
    "gated_delta_rule_long": Table(
        "gated_delta_rule.py", "gated_delta_rule", gated_delta_rule.long_rows_of
    ),
    "gated_delta_rule_ratios": Table(
        "gated_delta_rule.py", "gated_delta_rule", gated_delta_rule.ratio_rows_of
    ),
    "expert_gradients": Table("expert_gradients.py", "expert_gradients", expert_gradients.rows_of),
    "gradient_sums": Table("gradient_sums.py", "gradient_sums", gradient_sums.rows_of),
    "lora_expand": Table("lora_expand.py", "lora_expand", lora_expand.rows_of),
    "optimizer_step": Table("optimizer_step.py", "optimizer_step", optimizer_step.rows_of),
    "real_sizes": Table("real_sizes.py", "real_sizes", real_sizes.rows_of),
    **{name: Table("real_sizes.py", name, real_sizes.rows_of) for name in real_sizes.RESULTS},
    **{name: Table("recipe_mfu.py", name, recipe_mfu.rows_of) for name in memory_peaks.RECIPES},
    "state_precision": Table("state_precision.py", "state_precision", state_precision.rows_of),
    "ssd": Table("ssd.py", "ssd", ssd.rows_of),
    "ssd_errors": Table("ssd.py", "ssd", ssd.error_rows_of),
    "ssd_two_tiles": Table("ssd.py", "ssd_two_tiles", ssd.rows_of),
    "beside_megatron": Table("beside_megatron.py", "beside_megatron", beside_megatron.rows_of),
    "packed_vs_padded": Table("packed_vs_padded.py", "packed_vs_padded", packed_vs_padded.rows_of),
    "packed_vs_padded_data": Table(
        "packed_vs_padded.py", "packed_vs_padded", packed_vs_padded.data_rows_of
    ),
    "train_real": Table("train_real.py", "train_real", train_real.rows_of),
    "packing_report": Table(*PACKERS, packing_report.rows_of),
    "packing_tokens": Table(*PACKERS, packing_report.token_rows_of),
    "packing_capacities": Table(*PACKERS, packing_report.capacity_rows_of),
    "preprocess_speed": Table("preprocess_speed.py", "preprocess_speed", preprocess_rows),
    "same_numbers": Table("../tools/same_numbers.py", "same_numbers", same_numbers_rows),
    "same_numbers_gpu": Table("../tools/same_numbers.py", "same_numbers_gpu", same_numbers_rows),
    "two_checkouts": Table("two_checkouts.py", "two_checkouts", list),
    "tune_prediction": Table("tune_prediction.py", "tune_prediction", tune_prediction.rows_of),
}

CHARTS: dict[str, Callable[[dict[str, Any]], str]] = {"beside_megatron": beside_megatron.chart_of}
"""Functions that draw an SVG image from a result file, by the name of the file."""


class Results:
    """Result files of a folder, and the rows of tables made from them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, Rows | None] = {}

    def file(self, name: str) -> dict[str, Any] | None:
        """Return a result file, or None if it does not exist."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def rows(self, name: str) -> Rows | None:
        """Return the rows of a table, or None if one of its result files does not exist.

        Raises:
            SystemExit: a template names a table that is not in `TABLES`.
        """
        if name not in TABLES:
            raise SystemExit(f"no table {name}; choose from {', '.join(TABLES)}")
        if name not in self._rows:
            files = [self.file(result) for result in TABLES[name].files]
            present = [file["results"] for file in files if file]
            complete = len(present) == len(files)
            self._rows[name] = TABLES[name].rows(*present) if complete else None
        return self._rows[name]

    def table(self, name: str) -> str:
        """Return a table in Markdown, or a sentence that names the script to run."""
        rows = self.rows(name)
        if rows is None:
            written = ", ".join(f"`benchmarks/results/{file}.json`" for file in TABLES[name].files)
            return f"Not measured yet: `python benchmarks/{TABLES[name].script}` writes {written}."
        return harness.markdown(rows)

    def chart(self, name: str, text: str) -> str:
        """Return an image in Markdown; empty if its result file does not exist."""
        return f"![{text}]({name}.svg)" if self.file(name) else ""

    def cell(self, name: str, *conditions: str) -> str:
        """Return the number in one cell, without its percentiles.

        Args:
            conditions: ``COLUMN=CELL`` selects rows; any number of them may come first. The last entry is
                the column to read. ``lowest``, ``highest`` or ``count`` directly before the column
                combines all selected rows.
        Raises:
            SystemExit: no row or several rows are selected, or the column does not exist.
        """
        rows = self.rows(name)
        if rows is None:
            return "(not measured yet)"
        *conditions_of_row, column = conditions
        choice = None
        for condition in conditions_of_row:
            key, equals, value = condition.partition("=")
            if equals:
                rows = [row for row in rows if str(row.get(key)) == value]
            else:
                choice = condition
        cells = [str(row[column]) for row in rows if column in row]
        if choice == "count":
            return str(len(cells))
        if choice is not None:
            cells = [{"lowest": min, "highest": max}[choice](cells, key=number)]
        if len(cells) != 1:
            raise SystemExit(
                f"{name} | {' | '.join(conditions)} selects {len(cells)} cells; it must be one"
            )
        return cells[0].split(" [")[0]

    def circumstances(self, names: Iterable[str]) -> str:
        """Return command, device, date and versions of all result files of the tables."""
        lines = ["Source of the numbers:", ""]
        for name in dict.fromkeys(file for table in names for file in TABLES[table].files):
            if document := self.file(name):
                versions = ", ".join(
                    f"{key} {value}" for key, value in document["versions"].items()
                )
                lines.append(
                    f"- `{name}.json`: `{document['command']}` on {document['device']}, "
                    f"{document['date']}. Versions: {versions}.{old_kernels_text(name, document)}"
                )
        return "\n".join(lines)

    def measured(self, names: Iterable[str]) -> str:
        """Return the dates of the results of tables, and which of them have older kernels."""
        texts: dict[str, None] = {}
        for name in dict.fromkeys(file for table in names for file in TABLES[table].files):
            if document := self.file(name):
                old = kernel_dates.old_kernels(name, document)
                texts[document["date"].split()[0] + " with older kernels" * bool(old)] = None
        return ", ".join(sorted(texts))


def old_kernels_text(result: str, document: dict[str, Any]) -> str:
    """Return a list of the kernels of a result that are no longer the default, or an empty text."""
    lines = [
        f"\n    - {one.title}: {one.kernels}, now {one.now}"
        for one in kernel_dates.old_kernels(result, document)
    ]
    return " Kernels that are no longer the default:" * bool(lines) + "".join(lines)


def number(cell: str) -> float:
    return float(cell.split()[0])


def tables_of(template: Path) -> list[str]:
    """Return the names of all tables that a template uses, also for single numbers and charts."""
    places = [place.split(" | ")[0] for place in PLACE.findall(template.read_text())]
    return [name for place in places if (name := place.removeprefix("chart ")) in TABLES]


class Page(NamedTuple):
    """Page of measurements, filled in from its template."""

    name: str
    title: str
    summary: str
    """Content of the page in one line."""
    deciding: str
    """Sentence with the most important number of the page."""
    measured: str
    """Dates of the results."""
    text: str

    @classmethod
    def of(cls, template: Path, results: Results) -> Page:
        """Build the page of a template.

        Raises:
            SystemExit: the template does not begin with ``summary:`` and ``deciding:``.
        """
        head, _, body = template.read_text().partition("\n\n")
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if set(fields) - {"measured"} != {"summary", "deciding"}:
            raise SystemExit(
                f"{template.name} must begin with a 'summary:' line and a 'deciding:' line."
            )
        tables = [found for found in PLACE.findall(body) if found in TABLES]

        def filled(match: re.Match[str]) -> str:
            name, *conditions = match[1].split(" | ")
            if name == "circumstances":
                return results.circumstances(tables)
            if name.startswith("chart "):
                return results.chart(name.removeprefix("chart "), *conditions)
            return results.cell(name, *conditions) if conditions else results.table(name)

        note = f"<!-- Written by benchmarks/tables.py from measurement_pages/{template.name}. -->"
        return cls(
            name=template.stem,
            title=body.splitlines()[0].removeprefix("# "),
            summary=fields["summary"],
            deciding=PLACE.sub(filled, fields["deciding"]),
            measured=fields.get("measured") or results.measured(tables_of(template)),
            text=f"{note}\n\n{PLACE.sub(filled, body)}\n[All measurements](README.md)\n",
        )


INDEX = """<!-- Written by benchmarks/tables.py. -->

# Measurements

Every number about speed and memory in this documentation is on one of these pages, with its
command, device, date and versions. `python benchmarks/tables.py` writes the pages from
`benchmarks/results`. [Benchmarks](../benchmarks.md) explains how to run the scripts and which rules
they follow.

A cell `1.9 [1.7, 2.4]` has the median, and in brackets the 10th and 90th percentile.

The last column has the dates. *Older kernels* are kernels that are no longer the default; each page names them.

| page | content | deciding number | measured |
|---|---|---|---|
"""


def pages_of(templates: Path, folder: Path) -> dict[str, str]:
    """Return the text of each page, of each chart, and of the list of pages, by file name."""
    results = Results(folder)
    pages = [Page.of(template, results) for template in sorted(templates.glob("*.md"))]
    rows = [
        f"| [{page.title}]({page.name}.md) | {page.summary} | {page.deciding} | {page.measured} |"
        for page in pages
    ]
    texts = {f"{page.name}.md": page.text for page in pages}
    for name, draw in CHARTS.items():
        if document := results.file(name):
            texts[f"{name}.svg"] = draw(document["results"])
    return {"README.md": INDEX + "\n".join(rows) + "\n", **texts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is out of date"
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the generated pages")
    parser.add_argument(
        "--templates", type=Path, default=TEMPLATES, help="folder of the templates of these pages"
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    texts = pages_of(arguments.templates, arguments.results)
    old = {
        page.name: page.read_text()
        for page in arguments.docs.glob("*")
        if page.suffix in (".md", ".svg")
    }
    stale = sorted(name for name in {*texts, *old} if texts.get(name) != old.get(name))
    if not arguments.check:
        arguments.docs.mkdir(parents=True, exist_ok=True)
        for name in stale:
            if name in texts:
                (arguments.docs / name).write_text(texts[name])
            else:
                (arguments.docs / name).unlink()
    print(f"{'out of date' if arguments.check else 'written'}: {', '.join(stale) or 'nothing'}")
    if arguments.check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
