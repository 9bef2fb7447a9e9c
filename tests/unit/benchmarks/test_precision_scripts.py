"""`state_precision.py` and `expert_gradients.py` of the benchmarks: the parts that run on a CPU."""

import argparse
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

import expert_gradients
import harness
import state_precision
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.training.from_python import train


@pytest.fixture
def data(tmp_path):
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "documents", np.uint16) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 300, int(random.integers(5, 60))))
    return tmp_path / "documents"


def contents(prefix):
    source = IndexedFile(prefix)
    return [source.tokens(*part).tolist() for part in pairwise(source.document_starts().tolist())]


def test_another_order_has_the_same_documents(data, tmp_path):
    orders = []
    for order in (1, 2):
        state_precision.write_reordered(data, tmp_path / str(order), order)
        orders.append(contents(tmp_path / str(order)))
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(contents(data))
    assert orders[0] != orders[1]


def test_a_run_with_bf16_state_is_compared_with_one_in_float32(data, monkeypatch):
    """In this process in place of one for each run."""
    monkeypatch.setattr(
        state_precision, "launch", lambda words, gpu: "failed" if train(words, str) else ""
    )
    arguments = argparse.Namespace(data=data, steps=4, quick=True)
    gpus = SimpleQueue()
    gpus.put("0")
    names = ("fp32", "bf16 moments, stochastic")
    runs = {name: state_precision.run(name, arguments, "cpu", gpus) for name in names}
    assert [found["steps"] for found in runs.values()] == [4, 4]
    first, second = (found["mean_loss"] for found in runs.values())
    assert 0 < abs(second / first - 1) < 0.01  # another state, and the same documents
    compared = state_precision.compared(runs)
    assert compared["difference"][names[1]] == pytest.approx(second / first - 1, abs=1e-6)
    rows = state_precision.rows_of({"runs": harness.plain(runs), "compared": compared})
    assert [row["run"] for row in rows] == list(names) and rows[0]["difference"] == "+0.000%"


def test_the_spread_is_that_of_the_runs_in_float32():
    means = dict(zip(state_precision.RUNS, (2.0, 2.002, 1.998, 2.01, 1.99), strict=True))
    found = state_precision.compared({name: {"mean_loss": mean} for name, mean in means.items()})
    assert found["spread"] == 0.002
    assert list(found["difference"].values()) == [0, 0.001, -0.001, 0.005, -0.005]
    assert state_precision.compared({"fp32": {"failed": "no memory"}}) == {}


def test_rows_of_expert_gradients():
    spread = [2.0, 1.9, 2.1]
    found = dict.fromkeys(expert_gradients.SUMS, spread)
    found |= {"tflops": dict.fromkeys(expert_gradients.SUMS, 224), "ratio": spread}
    (row,) = expert_gradients.rows_of({"times": {"Nano": found}})
    assert row["TFLOP/s"] == "224, 224, 224" and row["fp32 / bf16"] == "2 [1.9, 2.1]"
