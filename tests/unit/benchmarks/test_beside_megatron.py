"""`benchmarks/beside_megatron.py`: differences of two curves, the check, the image, the printed
steps, and curves of an earlier call.
"""

import json
import re
import sys
import zipfile
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import beside_megatron
import harness
from beside_megatron import (
    chart_of,
    compared,
    problems_of,
    rows_of,
    run_ours,
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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("largest_loss_difference", 0.0031, "0.31%"),
        ("largest_loss_difference", float("nan"), "losses differ"),
        ("learning_rate", [0.0, 0.1, 0.2, 0.31], "learning rates"),
        ("fallbacks", 1, "and 1 ran eagerly"),
        ("replays", 0, "0 micro-batches were replayed"),
    ],
)
def test_the_check_fails(results, key, value, words):
    (results if key in results else results["megatron_packed"])[key] = value
    (problem,) = problems_of(results)
    assert words in problem


def test_sides_of_different_length_are_an_error(results):
    del results["megatron_core"]["loss"][-1]
    with pytest.raises(ValueError, match="shorter"):
        compared(results)


def test_image_draws_both_curves_within_its_limits(results):
    image = ElementTree.fromstring(chart_of(harness.plain(results)))
    *_, width, height = map(float, image.get("viewBox").split())
    curves = image.findall("{*}polyline")
    assert len({curve.get("stroke") for curve in curves}) == 2
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
        assert len(points) == 4 and points == sorted(points)  # a falling loss goes down the image
        assert all(50 <= x <= width - 10 and 10 <= y <= height - 40 for x, y in points)
    names = [text.text for text in image.findall("{*}text")]
    assert {"megatron_packed, graphs", "megatron-core, eager"} <= set(names)
    assert [text for text in names if re.fullmatch(r"\d\.\d\d", text)][::4] == ["1.00", "8.00"]


class LogBeingWritten:
    """A run that writes half a line between two looks at its log, and ends after the last look."""

    def __init__(self, log, parts):
        self.log, self._parts = log, iter(parts)
        self._left = len(parts)

    def running(self):
        if self._left:
            self._left -= 1
            with self.log.open("a") as file:
                file.write(next(self._parts))
        return self._left > 0

    def result(self):
        assert self._left == 0


def record(number, **fields):
    fields = {"lm_loss": 9.0 - number, "grad_norm": 1.0, "learning_rate": 0.1, **fields}
    return json.dumps({"iteration": number, "step_time_ms": 5.0, "plan_hash": "abc", **fields})


def test_steps_are_printed_while_the_log_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beside_megatron, "POLL", 0.0)
    lines = "".join(record(number, graph_replays=2) + "\n" for number in range(1, 21))
    validation = json.dumps({"iteration": 20, "valid_loss": 1.0}) + "\n"
    run = LogBeingWritten(
        tmp_path / "log", ["", lines[:40], lines[40:900], lines[900:], validation]
    )
    found = run_ours(run)
    assert found["plan_hash"] == "abc" and found["megatron_packed"]["replays"] == 40
    assert found["megatron_packed"]["loss"] == [9.0 - number for number in range(1, 21)]
    printed = [line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        f"megatron_packed, graphs: step {number}, loss {9 - number:.4f}" for number in (1, 10, 20)
    ]


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


@pytest.fixture
def sides_called(tmp_path, monkeypatch):
    """Replace both sides by curves, and return a function that runs the script and tells which
    sides have trained.
    """
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("set/train.jsonl.gz", "")
    called = []

    def ours(run):
        called.append("ours")
        found = {**side(steps([8.0, 4.0], 5.0)), "replays": 4, "fallbacks": 0}
        return {"plan_hash": "abc", "megatron_packed": found}

    def theirs(config, data, device):
        called.append("theirs")
        assert (tmp_path / "beside_megatron_ours.json").exists()
        return side(steps([8.0, 4.0], 15.0))

    plan = SimpleNamespace(hash="abc")
    data = SimpleNamespace(train=SimpleNamespace(plan=plan), close=lambda: None)
    for name, double in {
        "device_from": torch.device,
        "Run": lambda *words: None,
        "run_ours": ours,
        "run_theirs": theirs,
        "begin_alone": lambda port: called.append("begin"),
        "build_data": lambda *words: data,
        "parse": lambda *words: None,
    }.items():
        monkeypatch.setattr(beside_megatron, name, double)

    def run(*words):
        called.clear()
        argv = ["beside_megatron.py", tmp_path / "one.zip", "--device", "cuda", *words]
        monkeypatch.setattr(sys, "argv", [*map(str, argv), "--results", str(tmp_path)])
        beside_megatron.main()
        return list(called)

    return SimpleNamespace(run=run, plan=plan)


def test_second_call_trains_only_megatron_core(sides_called, tmp_path):
    ours = tmp_path / "beside_megatron_ours.json"
    # The process of megatron-core begins its work after the end of the other side.
    assert sides_called.run() == ["ours", "begin", "theirs"]
    both = json.loads((tmp_path / "beside_megatron.json").read_text())["results"]
    assert sides_called.run("--ours", ours) == ["begin", "theirs"]
    resumed = json.loads((tmp_path / "beside_megatron.json").read_text())["results"]
    assert resumed.pop("megatron_packed_date")
    assert resumed == both and both["step_ratio"] == 3.0
    sides_called.plan.hash = "def"
    with pytest.raises(SystemExit, match="pack plans abc and def"):
        sides_called.run("--ours", ours)
