"""Benchmarks that measure on a GPU: the parts that run on a CPU."""

import json

import torch

import harness
import model_step
import op_backends
import two_checkouts
import workloads


def test_packings_of_model_step_fill_the_pack():
    rows = model_step.packings(4096, 4)
    assert [len(row) for row in rows] == [model_step.DOCUMENTS] * 4 and all(
        sum(row) == 4096 for row in rows
    )
    assert min(map(min, rows)) > 0 and len({tuple(row) for row in rows}) == 4


def test_model_step_copies_every_parameter():
    """The names in `model_step.py` cover every parameter of megatron_packed's model.

    `copy_weights` itself refuses names that are left over.
    """
    shape = workloads.SHAPES["hybrid1b"].shrunk()
    pattern = model_step.CONFIGS["hybrid1b"]["pattern"]
    assert shape.pattern == pattern
    model = workloads.build_model(shape, torch.device("cpu"), max_positions=64)
    names = {
        name.split(".", 2)[2] for name, _ in model.named_parameters() if name.startswith("layers.")
    }
    pairs = {mine for symbol in set(pattern) for mine in model_step._LAYER_NAMES[symbol]}
    biases = {"norm.bias", *(f"mixer.{name}.bias" for name in ("qkv", "proj", "fc1", "fc2"))}
    assert pairs == names | biases and not names & biases


def test_two_checkouts_take_turns_and_are_compared_pair_by_pair(
    run_script, tmp_path, monkeypatch, capsys
):
    runs = []

    def model_step_of(command, *, cwd, env, **options):
        assert env["PYTHONPATH"] == str(cwd)
        assert command[-4:] == ["--kernels", "0", "--name", "two_checkouts_side"]
        runs.append(cwd)
        slow = 2.0 if cwd == tmp_path else 1.0
        eager = {
            "wall_ms": [slow * 3, 0, 9],
            "busy_ms": [slow, 0, 9],
            "launches": 10,
            "peak_gib": slow,
            "loss": 1.5,
            "grad_norm": slow,
        }
        found = {
            "shard8b": {
                "megatron_packed": eager,
                "graph": {"wall_ms": [4.0, 0, 9], "busy_ms": [4.0, 0, 9]},
            }
        }
        results = cwd / "benchmarks" / "results"
        results.mkdir(parents=True, exist_ok=True)
        (results / "two_checkouts_side.json").write_text(json.dumps({"results": found}))

    here = tmp_path / "here"
    monkeypatch.setattr(two_checkouts, "HERE", here)
    monkeypatch.setattr(two_checkouts.subprocess, "run", model_step_of)
    run_script("two_checkouts", tmp_path, "shard8b", "--rounds", "2")
    assert runs == [here, tmp_path, tmp_path, here]
    *_, eager, graph = (line.split() for line in capsys.readouterr().out.splitlines())
    half = "0.5 [0.5, 0.5]"
    assert eager == f"shard8b eager 3.00 6.00 {half} {half} 1 [1, 1] {half} True False".split()
    assert graph == [
        "shard8b",
        "one",
        "CUDA",
        "graph",
        "4.00",
        "4.00",
        "1",
        "[1,",
        "1]",
        "1",
        "[1,",
        "1]",
    ]


def test_op_backends_measures_an_op(monkeypatch):
    case = op_backends.cases()["rms_norm"]
    found = op_backends.measure(case, "reference", "cpu")
    assert (
        op_backends.isolation_summary(found["isolation"]) == "bitwise"
        and found["run_to_run_differ"] == []
    )
    assert found["worst_ratio"] <= 1.0

    def leaking(backend, t, packed):
        return case.call(backend, t, packed) + t["x"].sum()

    leak = op_backends.Case(case.op, case.rows, case.weights, leaking)
    assert "output" in op_backends.isolation_summary(
        op_backends.isolation(leak, "reference", torch.float32, "cpu")
    )


def test_spreads_and_ratios():
    assert harness.Spread.of([0.001 * value for value in range(1, 12)]) == (6.0, 2.0, 10.0)
    assert harness.Spread.of_ratios([2.0, 3.0, 8.0], [1.0, 1.0, 2.0]).median == 3.0
    assert harness.shown([1.23456, 1.0, 2.0]) == "1.235 [1, 2]" and harness.shown(None) == ""


def test_functions_take_turns():
    calls = []
    seconds = harness.interleaved_seconds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, warm=1, repeats=2
    )
    assert "".join(calls) == "ab" + "ab" + "ba"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
