"""Generator of the tables in docs/support_matrix.md, from recorded runs of tests and benchmarks.

    python docs/support_matrix.py

The records of tests are docs/support/*.json; ``pytest --record-shown`` writes them (see
tests/support/shown.py). The records of benchmarks are the layouts in benchmarks/results; a result
with kernels that are no longer the default counts as not run. The checks of the configuration
decide which combinations are refused. The first paragraph of a test file says what it compares.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.extend(
    str(Path(__file__).parents[1] / folder) for folder in ("", "tests", "benchmarks", "docs")
)

from coming_from_megatron import markdown

import kernel_dates
import layouts
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.run import SECTIONS, RunConfig
from support.shown import (
    AXES,
    COLUMNS,
    GRAPHS,
    LAYERS,
    MODES,
    OPTIONS,
    OTHERS,
    ROWS,
    axes_of,
    layers_of,
)

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "support_matrix.md", ROOT / "docs" / "support"
BEGIN, END = "<!-- begin: matrix -->", "<!-- end -->"
BENCHMARK_PAGE = "measurements/layouts.md"
BASE = {
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_num_groups": 2,
    "add_bias_linear": False,
    "train_data_path": ("none.jsonl",),
    "seq_length": 64,
    "global_batch_size": 2,
    "lr": 1e-3,
    "train_iters": 2,
    "device": "cuda",
    "bf16": True,
}


class Seen(NamedTuple):
    """Test or benchmark of a record."""

    outcome: str
    label: str
    """Name of the machine, and ``benchmark`` for a benchmark."""
    source: str
    """Path of the test file, or the page of the benchmark relative to docs/."""
    shows: Mapping[str, list[str]]
    """Column -> rows that the test or benchmark fills."""


def records() -> list[dict[str, Any]]:
    """Return the records of all machines."""
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


def everything() -> Iterator[Seen]:
    """Yield all tests, those that fill the fewest cells first, and then all benchmarks."""
    tests = [(short(r["machine"]), *test) for r in records() for test in r["tests"].items()]
    for machine, name, entry in sorted(
        tests, key=lambda test: (test[0], sum(map(len, test[2]["shows"].values())))
    ):
        yield Seen(entry["outcome"], machine, name.split("::")[0], entry["shows"])
    for path in sorted((ROOT / "benchmarks" / "results").glob("layouts_*.json")):
        file = json.loads(path.read_text())
        for model, result in file["results"].items():
            pattern = {"hybrid_layer_pattern": layouts.MODELS[model]["pattern"]}
            old = kernel_dates.old_kernels(path.stem, file)
            yield from benchmarked(
                f"{short(file['device'])} benchmark",
                result,
                pattern,
                outcome="not run" if old else "passed",
            )


def short(machine: str) -> str:
    """Return the model of a GPU: H100 for "NVIDIA H100 80GB HBM3"; CPU for a CPU."""
    return machine.removeprefix("NVIDIA ").split()[0]


def benchmarked(
    label: str, result: Mapping[str, Any], model: Mapping[str, Any], outcome: str = "passed"
) -> Iterator[Seen]:
    """Yield layouts with the losses of one process; graphs count if they replayed everything.

    Args:
        outcome: outcome of all layouts of the result.
    """
    for name, found in result["layouts"].items():
        if layouts.problems_of({"": {"layouts": {name: found}}}):
            continue
        one = name == layouts.ONE
        rows = axes_of(
            1 if one else result["processes"],
            {} if one else layouts.recorded_layouts(result["processes"])[name],
        )
        rows += layers_of(model)
        columns = [
            "eager",
            *(f"graphs: {graphs}" for graphs, by in found["graphs"].items() if not by["fallbacks"]),
        ]
        yield Seen(outcome, label, BENCHMARK_PAGE, dict.fromkeys(columns, rows))


def refusal(*features: Mapping[str, Any]) -> str:
    """Return the reason why features cannot be combined on GPUs; empty if they can."""
    options = dict(BASE)
    for feature in features:
        options |= feature
    try:
        RunConfig(
            **{
                name: section(
                    **{
                        key: options[key]
                        for key in section.__dataclass_fields__.keys() & options.keys()
                    }
                )
                for name, section in SECTIONS.items()
            }
        )
    except ConfigError as error:
        return str(error.problems[0])
    return ""


class Cells:
    """Texts of cells, and the refusals and test files that the cells number."""

    def __init__(self) -> None:
        self._seen = list(everything())
        self.refusals = list[str]()
        self.files = list[str]()

    def __call__(self, columns: str | Sequence[str], *rows: str) -> str:
        """Return the machines that ran ``rows`` together, each once.

        A test that passed is preferred to other tests, and the first of several columns.
        """
        columns = [columns] if isinstance(columns, str) else columns
        here = [
            (column, seen)
            for column in columns
            for seen in self._seen
            if {*rows} <= {*seen.shows.get(column, ())}
        ]
        texts = {}
        for outcome, text in (
            ("failed", "**{} fails**"),
            ("passed", "{}"),
            ("skipped", "*{} skipped*"),
            ("not run", "*{} not run*"),
        ):
            for column, seen in here:
                stand_in = " stand-in" * (seen.label == "CPU" and column in GRAPHS)
                if seen.outcome == outcome:
                    machine = seen.label.split()[0]
                    if machine not in texts:
                        texts[machine] = self._link(text.format(seen.label + stand_in), seen.source)
        refused = refusal(COLUMNS.get(columns[0], {}), *(OPTIONS.get(row, {}) for row in rows))
        if refused:
            otherwise = "else " * bool(texts)
            texts["refused"] = f"{otherwise}[refused {_number(refused, self.refusals)}](#refused)"
        return ", ".join(texts.values()) or "-"

    def _link(self, text: str, source: str) -> str:
        """Return a link to a page in docs/, or to the number of a test file in the list of tests."""
        if source == BENCHMARK_PAGE:
            return f"[{text}]({source})"
        return f"[{text} {_number(source, self.files)}](#tests)"


def _number(text: str, numbered: list[str]) -> int:
    """Return the number of ``text`` in a list, from 1; append the text if it is new."""
    if text not in numbered:
        numbered.append(text)
    return numbered.index(text) + 1


def compared_by(path: Path) -> str:
    """Return what the tests of a file compare: the first paragraph of its docstring.

    Raises:
        ValueError: the file has no docstring.
    """
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(
            f"{path} has no docstring; its first paragraph says what the tests compare."
        )
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def runs_of(path: str) -> str:
    """Return the runs whose results of a test file are recorded: machine, day and commit."""
    runs = {
        (short(record["machine"]), entry["date"].split()[0], entry["commit"])
        for record in records()
        for name, entry in record["tests"].items()
        if name.split("::")[0] == path and "commit" in entry
    }
    return ", ".join(" ".join(run) for run in sorted(runs)) or "-"


def tables() -> str:
    """Return all generated sections of the page."""
    cell, axes = Cells(), list(AXES)[2:]
    outcomes = ("passed", "failed", "skipped", "not run")

    def apart(row: str, column: str) -> bool:
        """Return whether two axes are not two values of one option."""
        return all(
            ROWS[row][name] == ROWS[column][name] for name in ROWS[row].keys() & ROWS[column].keys()
        )

    together = (
        (
            f"**{row}**",
            *(
                cell("eager", row, column) if at < after and apart(row, column) else ""
                for after, column in enumerate(axes)
            ),
        )
        for at, row in enumerate(axes)
    )
    ran = (
        (
            *(str(record.get(name, "-")) for name in ("machine", "python", "torch")),
            *(
                str([entry["outcome"] for entry in record["tests"].values()].count(outcome))
                for outcome in outcomes
            ),
        )
        for record in records()
    )
    return "\n\n".join(
        [
            "## Parallelism and modes",
            markdown(
                ("", *COLUMNS),
                (
                    (
                        f"**{row}**",
                        *(cell(column, row) if column != row else "" for column in COLUMNS),
                    )
                    for row in (*AXES, *MODES)
                ),
            ),
            "## Parallelism together",
            markdown(("", *axes), together),
            "## Layers",
            markdown(
                ("", *COLUMNS),
                ((f"**{row}**", *(cell(column, row) for column in COLUMNS)) for row in LAYERS),
            ),
            "## Layers in parallel layouts",
            markdown(
                ("", *axes),
                (
                    (f"**{row}**", *(cell(["eager", *GRAPHS], row, axis) for axis in axes))
                    for row in LAYERS
                ),
            ),
            "## Data, tokenizers and the rest",
            markdown(
                ("kind", "feature", "shown on"),
                (
                    (kind, name, cell(kind, name))
                    for kind, names in OTHERS.items()
                    for name in names
                ),
            ),
            "## Refused",
            "\n".join(f"{number}. {text}" for number, text in enumerate(cell.refusals, 1)),
            "## Tests",
            markdown(
                ("", "file", "what its tests compare", "runs on record"),
                (
                    (str(number), f"`{path}`", compared_by(ROOT / path), runs_of(path))
                    for number, path in enumerate(cell.files, 1)
                ),
            ),
            "## Machines",
            markdown(("machine", "Python", "torch", *outcomes), ran),
        ]
    )


def filled(text: str) -> str:
    """Return the page ``text`` with new tables."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
