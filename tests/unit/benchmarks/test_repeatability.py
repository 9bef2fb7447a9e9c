"""`benchmarks/repeatability.py` on the CPU, with a stand-in for capture, and its judgement."""

import json

import pytest
import torch

import harness
import repeatability
from repeatability import EXACT, PADDED, REPLAY, Outcome, checksums, judged, rows_of
from support import stand_in
from support.benchmark_inputs import TINY

CPU = torch.device("cpu")
USUAL = Outcome((4.0, 2.0), (1.0, 8.0), (10, 20, 30), 7)
OTHER = Outcome((4.0, 2.5), (1.0, 8.0), (10, 20, 31), 8)
RESULTS = ("full_step", "repeatability")
NAMES = ["embedding", "layers.0", "layers.1"]


def test_every_path_runs_the_same_steps():
    found = repeatability.run(TINY, "fastest", 2, 2, CPU, stand_in.RecordingBackend)
    assert list(found["paths"]) == [EXACT, PADDED, REPLAY] and found["steps"] == 4
    assert {"varlen_attention", "causal_conv1d", "ssd"} <= set(found["backends"])
    assert found["backends"].pop("adamw") == "torch" and set(found["backends"].values()) == {
        "reference"
    }
    for one in found["paths"].values():
        assert (one["outcomes"], one["first_gradients"], one["as_eager_ever"]) == ([2], [2], 2)
        assert (
            one["norm_apart"] == one["loss_apart"] == [0.0] * 4 and one["different_gradients"] == []
        )
    rows = rows_of(harness.plain({"tiny": {"fastest": found}}))
    assert [row["path"] for row in rows] == [EXACT, PADDED, REPLAY]


def test_outcomes_that_differ_are_counted_apart():
    found = judged(
        {PADDED: [USUAL, USUAL, OTHER], REPLAY: [OTHER, replace_weights(USUAL)], EXACT: [USUAL]},
        NAMES,
    )
    assert (found[PADDED]["outcomes"], found[PADDED]["as_eager_usually"]) == ([2, 1], 2)
    assert found[PADDED]["loss_apart"] == [0.0, 0.25] and found[PADDED]["norm_apart"] == [0.0, 0.0]
    assert found[PADDED]["different_gradients"] == ["layers.1"]
    replay = found[REPLAY]
    assert (replay["outcomes"], replay["as_eager_usually"], replay["as_eager_ever"]) == (
        [1, 1],
        0,
        1,
    )
    assert found[EXACT]["as_eager_usually"] == 1 and found[EXACT]["different_gradients"] == []


def replace_weights(outcome):
    return outcome._replace(weights=outcome.weights + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_one_bit_and_where_it_is(dtype):
    one = torch.arange(6, dtype=dtype).reshape(2, 3)
    moved, bit = one.clone(), one.clone()
    moved[0, 1], moved[0, 2] = one[0, 2], one[0, 1]
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    bit.view(kind)[1, 2] ^= 1
    sums = checksums([one, moved, bit, one.clone()]).tolist()
    assert len(set(sums)) == 3 and sums[0] == sums[3]


def test_what_the_documentation_says_of_an_h200_was_measured():
    """The committed results support the statements of the documentation about an H200."""
    measured = json.loads((harness.RESULTS / "repeatability.json").read_text())
    assert "H200" in measured["device"]
    for choices in measured["results"].values():
        fastest, attention, scan, everything = (
            choices[name]["paths"] for name in repeatability.KERNELS
        )
        for paths in (attention, everything):
            for one in paths.values():
                assert one["outcomes"] == [one["repeats"]] and one["repeats"] >= 20
                assert one["as_eager_usually"] == one["repeats"]
        for paths in (fastest, scan):
            assert all(len(one["outcomes"]) == one["repeats"] for one in paths.values())


def test_whole_steps_differed_from_eager_ones_by_no_more_than_these_from_each_other():
    """In the committed results, replay differs from eager no more than eager repeats differ.

    The repeats are of the first four steps of two micro-batches; differences grow from step to step.
    """
    whole, again = (
        json.loads((harness.RESULTS / f"{of}.json").read_text())["results"] for of in RESULTS
    )
    counts = whole["shard8b"]["micro_batches"]
    assert sum(len(found["comparisons"]) for found in counts.values()) == 14
    compared = counts["2"]["comparisons"]
    assert len(compared) == 4
    paths = again["shard8b"]["fastest"]["paths"]
    for value, apart in (("loss", "loss_apart"), ("grad_norm", "norm_apart")):
        pairs = [(one[f"{value}_replay"], one[f"{value}_eager"]) for one in compared]
        eager = max(*paths[EXACT][apart], *paths[PADDED][apart])
        assert 0 < max(abs(found - wanted) / wanted for found, wanted in pairs) <= eager
