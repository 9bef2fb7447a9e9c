"""`benchmarks/gated_delta_rule.py` on the CPU: the script runs, and names what it cannot measure."""

import json
import sys

import gated_delta_rule


def test_documents_fill_the_pack():
    lengths = gated_delta_rule.lengths_of(gated_delta_rule.FULL)
    assert len(lengths) == 12 and sum(lengths) == 8192 and min(lengths) > 0


def test_the_script_writes_its_results(tmp_path, monkeypatch):
    arguments = ["--quick", "--device", "cpu", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gated_delta_rule.py", *arguments])
    gated_delta_rule.main()
    results = json.loads((tmp_path / "gated_delta_rule.json").read_text())["results"]
    assert "CUDA device" in results["times"]["triton"]
    assert results["times"]["reference, capacity 12"]["backward_ms"][0] > 0
    assert max(results["errors"]["reference"].values()) < 1e-5
