"""Fills the tables of docs/support_matrix.md from what tests and benchmarks have run.

    python docs/support_matrix.py

They are in docs/support/*.json, which ``pytest --record-shown`` writes (tests/support/shown.py), and in the
layouts of benchmarks/results. What is refused is asked of the configuration itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.extend(
    str(Path(__file__).parents[1] / folder) for folder in ("", "tests", "benchmarks", "docs")
)

from coming_from_megatron import markdown

import layouts
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.run import SECTIONS, RunConfig
from support.shown import AXES, COLUMNS, GRAPHS, OPTIONS, OTHERS, ROWS, axes_of

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "support_matrix.md", ROOT / "docs" / "support"
BEGIN, END = "<!-- begin: matrix -->", "<!-- end -->"
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
    """Something that was to run."""

    outcome: str
    label: str
    """Of the machine, and how it ran."""
    link: str
    shows: Mapping[str, list[str]]
    """Column -> rows."""


def records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


def everything() -> Iterator[Seen]:
    """Of tests, those with the fewest claims first, and then of benchmarks."""
    tests = [(r["machine"].split()[-1], *test) for r in records() for test in r["tests"].items()]
    for machine, name, entry in sorted(
        tests, key=lambda test: (test[0], sum(map(len, test[2]["shows"].values())))
    ):
        yield Seen(entry["outcome"], machine, f"../{name.split('::')[0]}", entry["shows"])
    for path in sorted((ROOT / "benchmarks" / "results").glob("layouts_*.json")):
        file = json.loads(path.read_text())
        for result in file["results"].values():
            yield from benchmarked(f"{file['device'].split()[-1]} benchmark", result)


def benchmarked(label: str, result: Mapping[str, Any]) -> Iterator[Seen]:
    """Layouts whose losses are those of one process, and graphs that replayed everything."""
    for name, found in result["layouts"].items():
        if layouts.problems_of({"": {"layouts": {name: found}}}):
            continue
        one = name == layouts.ONE
        rows = axes_of(
            1 if one else result["processes"],
            {} if one else layouts.LAYOUTS[result["processes"]][name],
        )
        columns = [
            "eager",
            *(f"graphs: {graphs}" for graphs, by in found["graphs"].items() if not by["fallbacks"]),
        ]
        yield Seen("passed", label, "measurements/layouts.md", dict.fromkeys(columns, rows))


def refusal(*features: Mapping[str, Any]) -> str:
    """Why features do not go together, on GPUs; empty if they do."""
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
    """Texts of cells, and the refusals that they number."""

    def __init__(self) -> None:
        self._seen, self.refusals = list(everything()), list[str]()

    def __call__(self, column: str, *rows: str) -> str:
        """Return where ``rows`` were seen together: each machine once, by a test that passed if there is
        one.
        """
        here = [seen for seen in self._seen if {*rows} <= {*seen.shows.get(column, ())}]
        texts = {}
        for outcome, text in (
            ("failed", "**{} fails**"),
            ("passed", "{}"),
            ("skipped", "*{} skipped*"),
            ("not run", "*{} not run*"),
        ):
            for seen in here:
                stand_in = " stand-in" * (seen.label == "CPU" and column in GRAPHS)
                if seen.outcome == outcome:
                    texts.setdefault(
                        seen.label.split()[0],
                        f"[{text.format(seen.label + stand_in)}]({seen.link})",
                    )
        refused = refusal(COLUMNS.get(column, {}), *(OPTIONS.get(row, {}) for row in rows))
        if refused:
            self.refusals += [refused] * (refused not in self.refusals)
            otherwise = "else " * bool(texts)
            texts["refused"] = f"{otherwise}[refused {self.refusals.index(refused) + 1}](#refused)"
        return ", ".join(texts.values()) or "-"


def tables() -> str:
    cell, axes = Cells(), list(AXES)[2:]
    outcomes = ("passed", "failed", "skipped", "not run")

    def apart(row: str, column: str) -> bool:
        """Two axes that are not two values of one option."""
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
                    for row in ROWS
                ),
            ),
            "## Parallelism together",
            markdown(("", *axes), together),
            "## Data, tokenizers and the rest",
            markdown(
                ("", "", "seen on"),
                (
                    (kind, name, cell(kind, name))
                    for kind, names in OTHERS.items()
                    for name in names
                ),
            ),
            "## Refused",
            "\n".join(f"{number}. {text}" for number, text in enumerate(cell.refusals, 1)),
            "## What ran where",
            markdown(("machine", "Python", "torch", *outcomes), ran),
        ]
    )


def filled(text: str) -> str:
    """The page with its tables."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
