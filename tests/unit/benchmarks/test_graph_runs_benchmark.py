"""`benchmarks/graph_runs.py`: the runs start and are compared, and faulty results are reported."""

import copy
import json
import sys

import pytest

import graph_runs
import prepare_real
from support.benchmark_inputs import conversations, with_python, write_jsonl

EQUAL = {
    "steps_that_differ": 0,
    "validations_that_differ": 0,
    "steps_counted_wrongly": 0,
    "replays": 300,
    "fallbacks": 100,
    "micro_batches": 400,
    "audits": ["audit at step 50"],
}
EPOCHS = {
    "fallbacks_by_epoch": [0, 0, 0],
    "epochs": [0, 1, 2],
    "replays": 900,
    "in_all": "CUDA graphs: 1,000 micro-batches replayed, 0 run eagerly (hit rate 100.0 %)",
}
SOUND = {"equal": {"set": EQUAL}, "epochs": {"set 8192": EPOCHS}}


def test_runs_are_compared_and_a_run_without_graphs_fails(tmp_path, monkeypatch, quick_programs):
    """On a CPU both runs agree, and the script fails because nothing was captured and replayed."""
    monkeypatch.setattr(graph_runs, "command_line", with_python(quick_programs / "python"))
    write_jsonl(tmp_path / "chat.jsonl.gz", conversations(40))
    write_jsonl(tmp_path / "chat.valid.jsonl", conversations(20, 100))
    words = [
        "--set",
        "sgd_chat",
        tmp_path / "chat.jsonl.gz",
        tmp_path / "chat.valid.jsonl",
        "--vocab-size",
        "320",
    ]
    monkeypatch.setattr(
        sys, "argv", ["prepare_real.py", str(tmp_path / "real.zip"), *map(str, words)]
    )
    prepare_real.main()
    argv = [
        "graph_runs.py",
        str(tmp_path / "real.zip"),
        "--quick",
        "--device",
        "cpu",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(graph_runs, "STRIDE", 1)
    with pytest.raises(SystemExit, match="replays plus fallbacks differ from the micro-batches"):
        graph_runs.main()
    results = json.loads((tmp_path / "graph_runs.json").read_text())["results"]
    found = results["equal"]["sgd_chat"]
    assert (
        found["steps"] == 4 and found["steps_that_differ"] == found["validations_that_differ"] == 0
    )
    assert found["micro_batches"] == 8 and found["replays"] == 0
    (run,) = results["epochs"].values()
    assert run["epochs"][:3] == [0, 1, 2] and run["validations"] >= 2


def test_sound_results_have_no_problems_and_tables():
    assert graph_runs.problems_of(SOUND) == []


@pytest.mark.parametrize(
    "part, name, change",
    [
        ("equal", "set", {"steps_that_differ": 1}),
        ("equal", "set", {"validations_that_differ": 1}),
        ("equal", "set", {"steps_counted_wrongly": 2}),
        ("equal", "set", {"replays": 299}),
        ("equal", "set", {"audits": []}),
        ("epochs", "set 8192", {"fallbacks_by_epoch": [0, 1, 0]}),
        ("epochs", "set 8192", {"epochs": [0, 1]}),
        (
            "epochs",
            "set 8192",
            {"in_all": "CUDA graphs: 999 micro-batches replayed, 1 run eagerly (hit rate 99.9 %)"},
        ),
    ],
)
def test_what_fails_it(part, name, change):
    results = copy.deepcopy(SOUND)
    results[part][name].update(change)
    assert len(graph_runs.problems_of(results)) == 1
