"""`benchmarks/ssd.py` on the CPU: the script runs, and its sizes are those that it promises."""

import json
import sys

import ssd


def test_documents_fill_the_pack():
    assert len(ssd.SIZES) == 12
    for size in ssd.SIZES.values():
        lengths = ssd.lengths_of(size.tokens)
        assert sum(lengths) == size.tokens and min(lengths) > 0 and len(lengths) > 1


def test_the_script_writes_its_results(tmp_path, monkeypatch):
    arguments = ["--quick", "--device", "cpu", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ssd.py", *arguments])
    ssd.main()
    results = json.loads((tmp_path / "ssd.json").read_text())["results"]
    assert results["sizes"]["quick"]["heads"] == 2
    assert results["errors"]["quick"] == {}  # no kernel runs on a CPU


def test_rows_have_the_median_of_each_pass():
    spreads = {"triton": [1.0, 0.9, 1.1], "mamba_ssm": [2.0, 1.9, 2.1], "ratio": [0.5, 0.4, 0.6]}
    results = {"times": {"a size": {"forward": spreads, "forward + backward": spreads}}}
    (row,) = ssd.rows_of(results)
    assert row["size"] == "a size" and row["forward, ratio"] == "0.5 [0.4, 0.6]"
