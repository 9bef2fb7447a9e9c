"""`benchmarks/capacity_cost.py` on the CPU: the cases that run, the refused cases, and the tables."""

import json
import sys

import pytest
import torch

import capacity_cost
from capacity_cost import (
    EXACT,
    Size,
    attention_cost,
    long_tailed,
    mamba_cost,
    mamba_rows_of,
    rows_of,
)

CPU = torch.device("cpu")
SIZE = Size("shard8b", 128)


@pytest.mark.parametrize("tokens", [128, 4096, 8192])
def test_lengths_fill_the_pack_and_have_a_long_tail(tokens):
    lengths = long_tailed(tokens)
    assert len(lengths) == 12 and sum(lengths) == tokens and min(lengths) >= 1
    assert tokens < 4096 or max(lengths) > 4 * sorted(lengths)[6]


def test_sizes_that_a_backend_refuses_are_reported_beside_the_others():
    found = attention_cost(SIZE, long_tailed(128), ["reference", "flash_attn_4"], [16, 64], CPU, 2)
    assert set(found["reference"]) == {"longest", "T"}
    for entries in found["reference"].values():
        assert set(entries) == {EXACT, "16", "64"} and all(
            entry["ms"].median > 0 for entry in entries.values()
        )
    assert found["reference"]["longest"][EXACT]["over"] == (1.0, 1.0, 1.0)
    assert all(text.startswith("refused: ") for text in found["flash_attn_4"]["T"].values())
    rows = rows_of({"x": {"attention": found}})
    assert [row["backend"] for row in rows] == ["reference"] * 2 + ["flash_attn_4"] * 2
    assert [row["max_seqlen"] for row in rows] == ["longest row", "T"] * 2
    assert (
        "does not import" in rows[2][EXACT]
        and rows[2]["64"] == "refused"
        and rows[2]["exact ms"] == ""
    )


def test_a_failure_of_one_size_leaves_the_rest(monkeypatch):
    true = capacity_cost.attention

    def fragile(backend, leaves, upstream, packed):
        if packed.capacity == 16:
            raise RuntimeError("no kernel for 16 | documents")
        return true(backend, leaves, upstream, packed)

    monkeypatch.setattr(capacity_cost, "attention", fragile)
    found = attention_cost(SIZE, long_tailed(128), ["reference"], [16, 64], CPU, 1)
    assert found["reference"]["T"]["16"] == "failed: RuntimeError: no kernel for 16 | documents"
    assert found["reference"]["T"]["64"]["ms"].median > 0
    assert (
        rows_of({"x": {"attention": found}})[0]["16"]
        == "failed: RuntimeError: no kernel for 16 / documents"
    )


def test_attention_runs_forward_and_backward_at_the_capacity(monkeypatch):
    seen = []
    true = capacity_cost.varlen_attention

    def watched(*args, **options):
        seen.append((args[3].shape[0] - 2, args[4]))
        return true(*args, **options)

    monkeypatch.setattr(capacity_cost, "varlen_attention", watched)
    lengths = long_tailed(128)
    attention_cost(SIZE, lengths, ["reference"], [32], CPU, 1)
    assert set(seen) == {(12, max(lengths)), (32, max(lengths)), (12, 128), (32, 128)}


def test_the_mamba_layer_is_measured_at_every_capacity():
    found = mamba_cost(SIZE, long_tailed(128), [16, 512], CPU, 2)
    assert set(found) == {EXACT, "16", "512"} and found[EXACT]["over"] == (1.0, 1.0, 1.0)
    (row,) = mamba_rows_of({"x": {"mamba": found}})
    assert list(row)[:3] == ["size", "exact ms", EXACT]


def test_the_script_writes_its_results(tmp_path, monkeypatch, capsys):
    options = [
        "shard8b_4096",
        "--quick",
        "--device",
        "cpu",
        "--capacities",
        "64",
        "16",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["capacity_cost.py", *options])
    capacity_cost.main()
    result = json.loads((tmp_path / "capacity_cost.json").read_text())["results"]["shard8b_4096"]
    assert (
        list(result["attention"]["reference"]["T"]) == list(result["mamba"]) == [EXACT, "16", "64"]
    )
    assert sum(result["lengths"]) == result["tokens"]
    monkeypatch.setattr(sys, "argv", ["capacity_cost.py", "--capacities", "8"])
    with pytest.raises(SystemExit):
        capacity_cost.main()
