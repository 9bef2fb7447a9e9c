"""`benchmarks/beside_megatron.py`: differences of two curves, and curves of an earlier call."""

import json

import pytest

import beside_megatron
import harness
from beside_megatron import (
    compared,
    problems_of,
    rows_of,
    side,
    stored_ours,
)


def steps(losses, milliseconds):
    return [
        {
            "loss": loss,
            "grad_norm": 2 * loss,
            "learning_rate": 0.1 * number,
            "step_time_ms": 1e4 if number < len(losses) // 4 else milliseconds,
        }
        for number, loss in enumerate(losses)
    ]


@pytest.fixture
def results():
    sides = {
        "megatron_packed": {
            **side(steps([8.0, 4.0, 2.002, 1.0], 5.0)),
            "replays": 8,
            "fallbacks": 0,
        },
        "megatron_core": side(steps([8.0, 4.004, 2.0, 1.0], 15.0)),
    }
    return {"plan_hash": "0123456789abcdef", **sides, **compared(sides)}


def test_difference_of_every_step_and_of_the_settled_times(results):
    assert results["loss_difference"] == [0.0, 0.000999, 0.001, 0.0]
    assert results["largest_loss_difference"] == pytest.approx(0.001)
    assert results["step_ratio"] == 3.0  # without the first step, which compiles
    assert problems_of(results) == []
    ours, theirs = rows_of(harness.plain(results))
    assert ours["last loss"] == 1.0
    assert (ours["step ms"], theirs["step ms"]) == ("5 [5, 5]", "15 [15, 15]")
    assert ours["loss differs by at most"] == "0.100 %" and theirs["plan"] == "0123456789ab"


def test_sides_of_different_length_are_an_error(results):
    del results["megatron_core"]["loss"][-1]
    with pytest.raises(ValueError, match="shorter"):
        compared(results)


def test_stored_curves_are_taken_for_the_same_run_only(tmp_path, monkeypatch):
    options = {"lr": 0.1, "bf16": True}
    ours = {"plan_hash": "abc", "megatron_packed": side(steps([8.0, 4.0], 5.0))}
    path = harness.save(beside_megatron.OURS_FILE, {"flags": options, **ours}, folder=tmp_path)
    taken = stored_ours(path, options)
    assert taken.pop("megatron_packed_date") == json.loads(path.read_text())["date"]
    assert taken == harness.plain(ours)
    with pytest.raises(SystemExit, match=r"other flags.*Leave out --ours"):
        stored_ours(path, {**options, "lr": 0.2})
    monkeypatch.setattr(harness, "device_name", lambda: "another GPU")
    with pytest.raises(SystemExit, match=r"other device.*here: another GPU"):
        stored_ours(path, options)
