"""`benchmarks/rope_bench.py` on the CPU: all paths rotate by the same angles, and the script runs."""

import json
import sys

import pytest
import torch

import rope_bench
from rope_bench import Size, all_paths, leaves

SIZE = Size(48, 4, 2, 16)


def test_paths_agree_and_positions_restart():
    paths = all_paths(SIZE, torch.float32, torch.device("cpu"))
    inputs = leaves(SIZE, torch.float32, torch.device("cpu"))
    expected = paths.pop("reference")(*inputs)
    assert "torch index" in paths
    for rotate in paths.values():
        for found, right in zip(rotate(*inputs), expected):
            torch.testing.assert_close(found, right, rtol=0, atol=5e-7)
    starts = rope_bench.packed_of(48, torch.device("cpu")).position_ids == 0
    assert starts.sum() > 2
    assert torch.equal(expected[0][starts], inputs[0][starts])  # position 0 is not rotated


def test_bytes_moved_counts_each_element_in_and_out():
    assert Size(8192, 32, 8, 128).bytes_moved(torch.bfloat16) == 2 * 8192 * 40 * 128 * 2


def test_the_script_writes_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rope_bench.py", "--quick", "--results", str(tmp_path)])
    rope_bench.main()
    results = json.loads((tmp_path / "rope.json").read_text())["results"]
    assert results["errors"]["torch index, torch.float32"]["forward"]["max"] < 5e-7
    assert [size["tokens"] for size in results["sizes"]] == [32, 64]
    eager = results["sizes"][0]["paths"]["reference"]["eager_forward_backward_ms"]
    assert eager[1] <= eager[0] <= eager[2] and eager[0] > 0


def test_errors_see_a_wrong_rotation(monkeypatch):
    right = rope_bench.torch_index

    def shifted(packed, cos_PR, sin_PR, dtype):
        return right(packed, cos_PR.roll(1, 0), sin_PR, dtype)

    monkeypatch.setattr(rope_bench, "torch_index", shifted)
    found = rope_bench.errors(SIZE, torch.device("cpu"))
    assert found["torch index, torch.float32"]["forward"]["max"] > 1e-3
    assert found["reference, torch.float32"]["forward"]["max"] == pytest.approx(0, abs=5e-7)
