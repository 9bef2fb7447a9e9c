"""`benchmarks/capacity_cost.py` on the CPU: the cases that run, the refused cases, and the tables."""

import pytest
import torch

import capacity_cost
from capacity_cost import (
    Size,
    attention_cost,
    long_tailed,
    rows_of,
)

CPU = torch.device("cpu")
SIZE = Size("shard8b", 128)


@pytest.mark.parametrize("tokens", [128, 4096, 8192])
def test_lengths_fill_the_pack_and_have_a_long_tail(tokens):
    lengths = long_tailed(tokens)
    assert len(lengths) == 12 and sum(lengths) == tokens and min(lengths) >= 1
    assert tokens < 4096 or max(lengths) > 4 * sorted(lengths)[6]


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
