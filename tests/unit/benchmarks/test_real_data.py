"""`prepare_real.py`, `train_real.py` and `graph_runs.py` of the benchmarks on small sets."""

import json
import zipfile

import pytest

import graph_runs
import prepare_real
import train_real
from support.benchmark_inputs import with_python
from support.json_lines import read_json
from train_real import largest_over_running_median


def test_archive_holds_two_parts_of_each_set(archive, tmp_path):
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "out")
    train, valid = (
        prepare_real.read(tmp_path / "out/docs_longtail" / name)
        for name in ("train.jsonl.gz", "valid.jsonl.gz")
    )
    assert (len(train), len(valid)) == (47, 3)
    assert sorted(train + valid) == sorted(prepare_real.read(tmp_path / "text.jsonl"))
    assert len(prepare_real.read(tmp_path / "out/sgd_chat/train.jsonl.gz")) == 80
    tokenizer = read_json(tmp_path / "out/sgd_chat/tokenizer/tokenizer.json")
    assert 300 < len(tokenizer["model"]["vocab"]) <= 320


def test_the_real_script_trains_and_its_log_is_read(
    archive, run_script, tmp_path, monkeypatch, quick_programs
):
    monkeypatch.setattr(train_real, "command_line", with_python(quick_programs / "python"))
    document = run_script("train_real", archive, "sgd_chat", "--quick", "--device", "cpu")
    found = document["results"]["sgd_chat"]
    assert len(found["loss"]) == 6 and found["loss"][-1] < found["loss"][0]
    assert [iteration for iteration, _ in found["valid_loss"]] == [3, 6]
    assert 0 < found["unigram_entropy"] < 6
    assert found["parameters"] > 10000 and "--sft" in found["command"]
    # The results contain no path of the machine.
    assert str(tmp_path.parent) not in json.dumps(document)


def test_running_median_sees_a_spike():
    assert largest_over_running_median([4.0, 4.0, 4.0, 6.4, 4.0]) == pytest.approx(1.6)
    assert largest_over_running_median([4.0, 3.0, 2.0]) < 1
    assert largest_over_running_median([9.0] * 30 + [2.0] * 30 + [4.0]) == pytest.approx(
        2.0
    )  # Only recent steps count.


def test_runs_are_compared_and_a_run_without_graphs_fails(
    archive, run_script, tmp_path, monkeypatch, quick_programs
):
    """On a CPU both runs agree, and the script fails because nothing was captured and replayed."""
    monkeypatch.setattr(graph_runs, "command_line", with_python(quick_programs / "python"))
    monkeypatch.setattr(graph_runs, "STRIDE", 1)
    with pytest.raises(SystemExit, match="replays plus fallbacks differ from the micro-batches"):
        run_script("graph_runs", archive, "sgd_chat", "--quick", "--device", "cpu")
    results = read_json(tmp_path / "graph_runs.json")["results"]
    found = results["equal"]["sgd_chat"]
    assert (
        found["steps"] == 4 and found["steps_that_differ"] == found["validations_that_differ"] == 0
    )
    assert found["micro_batches"] == 8 and found["replays"] == 0
    (run,) = results["epochs"].values()
    assert run["epochs"][:3] == [0, 1, 2] and run["validations"] >= 2
