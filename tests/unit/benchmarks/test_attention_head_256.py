"""`benchmarks/attention_head_256.py` on the CPU: its errors, its failures and its result file."""

import json
import sys

import torch

import attention_head_256 as benchmark
import harness


def test_documents_fill_the_pack_and_one_is_longer_than_the_window():
    for tokens in (256, 8192):
        lengths = benchmark.lengths_of(tokens)
        assert len(lengths) == 12 and min(lengths) > 0 and sum(lengths) == tokens
    assert max(lengths) > 4096


def test_the_script_writes_times_errors_and_reasons(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["attention_head_256.py", "--quick", "--device", "cpu", "--results", str(tmp_path)],
    )
    benchmark.main()
    whole, limited = json.loads((tmp_path / "attention_head_256.json").read_text())["results"]
    assert (whole["window"], limited["window"]) == (None, 8)
    right, absent = (whole["backends"][name] for name in ("reference", "flash_attn_4"))
    assert set(right["ratios"]) == {"output", "dq", "dk", "dv"} and not right["refused"]
    assert max(right["ratios"].values()) <= 2 and right["forward_ms"][0] > 0
    assert absent["refused"] and "Error" in absent["failed"] and "forward_ms" not in absent
    assert "reference" in capsys.readouterr().out


def test_a_wrong_kernel_has_a_large_ratio(monkeypatch):
    """A backend that ignores the window is seen."""
    size = benchmark.Size(256, 4, 2, 16, 8)
    right = benchmark.Case(size, torch.device("cpu"))
    wrong = benchmark.Case(benchmark.Size(256, 4, 2, 16, None), torch.device("cpu"))
    forward = right.forward

    def ignoring(backend, leaves):
        return (wrong.forward if backend.name == "sdpa" else forward)(backend, leaves)

    monkeypatch.setattr(right, "forward", ignoring)
    found = benchmark.measure(right, lambda function: harness.Spread(1.0, 1.0, 1.0))
    assert max(found["sdpa"]["ratios"].values()) > 10 > max(found["reference"]["ratios"].values())
