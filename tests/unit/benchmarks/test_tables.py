"""`benchmarks/tables.py`: the pages of measurements are built from templates and result files."""

import json
import sys

import pytest

import tables

CIRCUMSTANCES = {
    "command": "python benchmarks/x.py",
    "date": "2026-01-01 00:00 UTC",
    "device": "a GPU",
    "versions": {"torch": "2.11"},
}
MODEL_STEP = {
    "one": {
        "plan_hash": "abc",
        "busy_ratio": [0.75, 0.74, 0.76],
        "megatron_core": {
            "wall_ms": [9.0, 8.0, 10.0],
            "busy_ms": [4.0, 3.9, 4.1],
            "wall_over_busy": 2.25,
            "launches": 70.0,
            "mfu_of_wall": 0.1,
            "mfu_of_busy": 0.225,
            "loss": 1.0,
            "grad_norm": 2.0,
        },
        "megatron_packed": {
            "wall_ms": [6.0, 5.0, 7.0],
            "busy_ms": [3.0, 2.9, 3.1],
            "wall_over_busy": 2.0,
            "launches": 50.0,
            "mfu_of_wall": None,
            "mfu_of_busy": None,
            "loss": 1.0,
            "grad_norm": 2.0,
        },
        "graph": {
            "wall_ms": [3.1, 3.0, 3.2],
            "busy_ms": [3.0, 2.9, 3.1],
            "wall_over_busy": [1.03, 1.02, 1.04],
            "packings": [],
        },
    }
}
CELL = {"perturbed": {"rows": 0, "max_abs": 0.0}, "same_input_again": {"rows": 0, "max_abs": 0.0}}
MOVED = {
    "perturbed": {"rows": 2, "max_abs": 1e-3},
    "same_input_again": {"rows": 1, "max_abs": 2e-3},
}
OPS = {
    "attention": {
        "fast": {
            "worst_ratio": 1.5,
            "isolation": {"output": CELL, "d_q": MOVED},
            "run_to_run_differ": ["d_q"],
            "replay": {
                "differ": ["d_q"],
                "max_relative": 1e-5,
                "forward_backward_ms": [0.2, 0.1, 0.3],
            },
        },
        "exact": {
            "worst_ratio": 1.0,
            "isolation": {"output": CELL},
            "run_to_run_differ": [],
            "replay": "failed: NoBackendError: attention: backend 'exact' does not support Inputs(a=1): exact: big",
        },
        "none": "refused: attention: backend 'none' does not support Inputs(a=(1, 2), b=2): none: no | flag",
    }
}


def write(folder, name, results):
    (folder / f"{name}.json").write_text(json.dumps({**CIRCUMSTANCES, "results": results}))


HEAD = "summary: One micro-batch.\ndeciding: {{model_step | path=megatron_packed, eager | wall ms}} ms.\n\n"
PAGE = "# One step\n\nText.\n\n{{circumstances}}\n\n{{model_step}}\n\n{{ssd}}\n"


def run(monkeypatch, tmp_path, *options):
    folders = {name: str(tmp_path / name) for name in ("docs", "templates", "results")}
    argv = [word for name, folder in folders.items() for word in (f"--{name}", folder)]
    monkeypatch.setattr(sys, "argv", ["tables.py", *argv, *options])
    tables.main()


@pytest.fixture
def folders(tmp_path):
    for name in ("docs", "templates", "results"):
        (tmp_path / name).mkdir()
    write(tmp_path / "results", "model_step_shard8b", MODEL_STEP)
    write(tmp_path / "results", "model_step_hybrid1b", {})
    (tmp_path / "templates" / "one_step.md").write_text(HEAD + PAGE)
    return tmp_path


def test_pages_follow_the_results(folders, monkeypatch):
    """Pages are written from template and results, and the check fails after either changes."""
    page, index = folders / "docs" / "one_step.md", folders / "docs" / "README.md"
    with pytest.raises(SystemExit):
        run(monkeypatch, folders, "--check")
    assert not page.exists()
    (folders / "docs" / "page_without_template.md").write_text("old")
    run(monkeypatch, folders)
    assert {path.name for path in index.parent.iterdir()} == {"one_step.md", "README.md"}
    text = page.read_text()
    assert "a GPU, 2026-01-01 00:00 UTC" in text and "`python benchmarks/x.py`" in text
    assert "Versions: torch 2.11." in text
    assert (
        "| one | megatron_packed, eager | 6 [5, 7] | 3 [2.9, 3.1] | 2.0 | 0.75 [0.74, 0.76] |"
        in text
    )
    assert "Not measured yet: `python benchmarks/ssd.py`" in text
    row = "| [One step](one_step.md) | One micro-batch. | 6 ms. | 2026-01-01 with older kernels |"
    assert row in index.read_text()
    run(monkeypatch, folders, "--check")
    MODEL_STEP["one"]["graph"]["busy_ms"] = [2.9, 2.9, 2.9]
    write(folders / "results", "model_step_shard8b", MODEL_STEP)
    with pytest.raises(SystemExit):
        run(monkeypatch, folders, "--check")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{{speeed}}", "no table speeed"),
        ("{{model_step | config=one | wall ms}}", "selects 3 cells; it must be one"),
        ("{{model_step | config=two | wall ms}}", "selects 0 cells; it must be one"),
    ],
)
def test_a_place_without_a_table_or_with_several_cells_is_refused(
    folders, monkeypatch, place, said
):
    """A template that names an unknown table, or selects no cell or several, is an error."""
    (folders / "templates" / "one_step.md").write_text(HEAD + PAGE + place)
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, folders)


def test_lowest_highest_and_count_of_a_column(folders):
    """A template can select the smallest or largest cell of a column, or the number of its cells."""
    results = tables.Results(folders / "results")
    column = "wall ms"
    assert results.cell("model_step", "lowest", column) == "3.1"
    assert results.cell("model_step", "highest", column) == "9"
    assert results.cell("model_step", "count", column) == "3"


def test_ops_say_bitwise_a_number_or_why_not():
    fast, exact, none = tables.op_rows(OPS)
    assert (
        fast["isolation"] == "d_q 1e-03 (by itself 2e-03)"
        and fast["replay = eager"] == "d_q by 1.0e-05"
    )
    assert exact["isolation"] == exact["run to run"] == "bitwise"
    assert exact["replay = eager"] == "refused: exact: big"
    assert none["isolation"] == "refused: none: no / flag"
    assert {tuple(row) for row in (fast, exact, none)} == {tables.OP_COLUMNS}
