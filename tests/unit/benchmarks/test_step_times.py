"""Computed times of steps against steps that the benchmarks measured on H200. Nothing runs on a GPU."""

import json
from pathlib import Path

import pytest

import plan_rates
import step_times
from megatron_packed.models.estimate.gpu_rates import TABLE
from support import commands

ROOT = Path(__file__).parents[3]
FEWEST = 15


@pytest.fixture(scope="module")
def rows():
    return step_times.compared()


def test_computed_times_are_within_a_tenth_on_one_two_and_four_gpus(rows):
    wrong = [row for row in rows if abs(row.ratio - 1) > step_times.TOLERANCE]
    assert wrong == [] and len(rows) >= FEWEST
    assert {row.gpus for row in rows} == {1, 2, 4}


def test_the_table_of_rates_is_what_the_results_give():
    assert json.loads(TABLE.read_text()) == json.loads(json.dumps(plan_rates.table()))


def test_documents_quote_the_largest_differences(rows):
    differences = [100 * (row.ratio - 1) for row in rows]
    sentence = (
        f"differs by {min(differences):+.1f} to {max(differences):+.1f} % from {len(rows)} steps measured "
        "on one, two and four H200"
    )
    row = f"[{min(differences):+.1f} % to {max(differences):+.1f} %](docs/measurements/step_times.md) from {len(rows)}"
    assert row in (ROOT / "README.md").read_text()
    guide = " ".join((ROOT / "docs/memory.md").read_text().split())
    assert sentence in guide


@pytest.mark.parametrize("model, gpus, layouts", [("hybrid1b, ", 2, 5), ("hybrid_1b, ", 4, 4)])
def test_the_fastest_measured_layout_has_the_shortest_computed_time(model, gpus, layouts, rows):
    alike = [row for row in rows if row.name.startswith(model) and row.gpus == gpus]
    assert len(alike) == layouts
    fastest = min(alike, key=lambda row: row.measured)
    assert fastest == min(alike, key=lambda row: row.computed)


def test_a_search_lists_the_fastest_of_the_measured_layouts(capsys):
    """Four layouts of hybrid_1b on four GPUs were measured: DP4 takes 206 ms, the others more."""
    model = f"@{ROOT / 'examples/recipes/models/hybrid_1b.args'}"
    run = [model, "--bf16", "--seq-length", "8192", "--global-batch-size", "8"]
    found = commands.report(capsys, "plan", *run, "--world-size", "4", "--search")["layouts"]
    assert found[0]["flags"] == "--use-distributed-optimizer"
    assert any("--tensor-model-parallel-size 4" in layout["flags"] for layout in found)
