"""`benchmarks/tables.py`: the pages say what the result files say."""

import json
import sys

import pytest

import harness
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
            "replay": "failed: NoBackendError: attention: backend 'exact' cannot serve Inputs(a=1): exact: big",
        },
        "none": "refused: attention: backend 'none' cannot serve Inputs(a=(1, 2), b=2): none: no | flag",
    }
}


def write(folder, name, results):
    (folder / f"{name}.json").write_text(json.dumps({**CIRCUMSTANCES, "results": results}))


def run(monkeypatch, tmp_path, *options):
    argv = ["tables.py", "--docs", str(tmp_path), "--results", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", argv)
    tables.main()


def test_pages_follow_the_results(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "above\n<!-- begin: table model_step -->\nold\n<!-- end -->\n"
        "between\n<!-- begin: table rope -->\n<!-- end -->\n"
    )
    write(tmp_path, "model_step", MODEL_STEP)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--check")
    assert "old" in page.read_text()
    run(monkeypatch, tmp_path)
    text = page.read_text()
    assert "old" not in text and text.startswith("above\n") and "\nbetween\n" in text
    assert "a GPU, 2026-01-01 00:00 UTC, `python benchmarks/x.py`; torch 2.11." in text
    assert (
        "| one | megatron_packed, eager | 6 [5, 7] | 3 [2.9, 3.1] | 2.0 | 0.75 [0.74, 0.76] |"
        in text
    )
    assert "Not measured yet: `python benchmarks/rope_bench.py`" in text
    run(monkeypatch, tmp_path, "--check")
    MODEL_STEP["one"]["graph"]["busy_ms"] = [2.9, 2.9, 2.9]
    write(tmp_path, "model_step", MODEL_STEP)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--check")


def test_a_page_that_asks_for_an_unknown_table_is_refused(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- begin: table speeed -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="no table speeed"):
        run(monkeypatch, tmp_path)


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


def test_committed_pages_are_what_the_committed_results_give():
    for page in tables.DOCS.glob("*.md"):
        text = page.read_text()
        assert tables.filled(text, harness.RESULTS) == text, (
            f"run python benchmarks/tables.py ({page.name})"
        )
