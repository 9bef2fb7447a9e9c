"""Callbacks of a run from Python: hooks, added metrics, requests to stop, and refused arguments."""

from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed import Callback, train
from megatron_packed.checkpoint.run_metadata import metadata_problem
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.resume.callback_state import CallbackError
from megatron_packed.training.callback import HOOKS, StepMetrics
from support.json_lines import read_lines, write_texts

MODEL = "--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of a run of four steps with a validation, which saves and logs in its folder."""
    for name in ("train", "valid"):
        write_texts(tmp_path / f"{name}.jsonl", (f"{n:02d} {name}" for n in range(40)))
    folder = tmp_path / "run"
    data = f"--train-data-path {tmp_path}/train.jsonl --valid-data-path {tmp_path}/valid.jsonl"
    places = f"--save {folder} --load {folder} --log-jsonl {tmp_path}/log.jsonl"
    return f"{MODEL} {data} {places} --lr 1e-2 --train-iters 4 --eval-interval 4".split()


class Recorder(Callback):
    """Callback that records its calls, and adds a metric."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_start(self, trainer: Any) -> None:
        assert trainer.model is trainer.step.model and trainer.config.optim.lr == 1e-2
        self.calls.append(("start", trainer.progress.iteration))

    def on_step_end(self, trainer: Any, step: int) -> None:
        assert bool(trainer.update_applied == 1)
        self.calls.append(("step", step))

    def on_metrics(self, trainer: Any, metrics: Any) -> None:
        self.calls.append(("metrics", metrics["iteration"]))
        metrics["twice_loss"] = np.float32(2) * metrics["lm_loss"]

    def on_validation_end(self, trainer: Any, metrics: Any) -> None:
        self.calls.append(("validation", metrics["valid_loss"] > 0))

    def on_save(self, trainer: Any, checkpoint: Path) -> None:
        self.calls.append(("save", checkpoint.name))

    def on_train_end(self, trainer: Any) -> None:
        self.calls.append(("end", trainer.exit_code))


def test_hooks_run_in_the_order_of_the_loop(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    assert train(flags, callbacks=[recorder]) is ExitCode.DONE
    late = [entry for step in (2, 3, 4) for entry in (("metrics", step - 1), ("step", step))]
    assert recorder.calls == [
        ("start", 0),
        ("step", 1),
        *late,
        ("metrics", 4),
        ("validation", True),
        ("save", "step_00000004"),
        ("end", ExitCode.DONE),
    ]
    steps = read_lines(tmp_path / "log.jsonl")
    losses = [(record["lm_loss"], record["twice_loss"]) for record in steps if "lm_loss" in record]
    assert len(losses) == 4 and all(twice == pytest.approx(2 * loss) for loss, twice in losses)
    assert f" | twice_loss {losses[3][1]:.4g}" in capsys.readouterr().out


class Stop(Callback):
    def on_train_start(self, trainer: Any) -> None:
        trainer.request_stop()


def test_a_callback_stops_the_run_with_a_save(flags: list[str], tmp_path: Path) -> None:
    assert train(flags, callbacks=[Stop()], quiet=True) is ExitCode.PREEMPTED
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("hook", ["on_step_ends", "on_validate", "on_epoch"])
def test_an_unknown_hook_is_refused(hook: str) -> None:
    with pytest.raises(TypeError, match=f"Wrong.{hook} is no hook of a callback; did you mean on_"):
        type("Wrong", (Callback,), {hook: lambda self, trainer: None})
    assert len(HOOKS) == 6


@pytest.mark.parametrize(
    ("callbacks", "problem"),
    [
        ([print], "pass objects of subclasses of megatron_packed.Callback"),
        ([Stop], "callbacks has the class Stop; pass an object of it"),
        ([Stop(), Stop()], "two callbacks have the name Stop"),
    ],
)
def test_unusable_callbacks_are_refused(callbacks: Any, problem: str, flags: list[str]) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        train(flags, callbacks=callbacks)


@pytest.mark.parametrize(
    ("name", "number", "problem"),
    [
        ("lm_loss", 1.0, "is a field of the log"),
        ("valid_mine", 1.0, "is a field of the log"),
        ("mine", torch.ones(()), "a metric is a number of the host"),
        ("mine", "text", "a metric is a number of the host"),
        ("", 1.0, "it must be a text"),
    ],
)
def test_metrics_that_the_log_cannot_hold_are_refused(name: str, number: Any, problem: str) -> None:
    metrics = StepMetrics({"lm_loss": 2.0})
    with pytest.raises((TypeError, ValueError), match=problem):
        metrics[name] = number
    metrics["mine"] = True
    assert dict(metrics) == {"lm_loss": 2.0, "mine": 1} and len(metrics) == 2


class State(Callback):
    """Callback with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state or {"count": 1, "nested": {"list": [1, None]}}
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Other(State):
    pass


def test_a_state_is_restored_and_a_missing_one_is_a_warning(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"count": 1, "nested": {"list": [1, None], "numbers": torch.arange(3)}}
    train(flags, callbacks=[State(state)], train_iters=2, eval_interval=2)
    resumed, other = State(), Other()
    train(flags, callbacks=[resumed, other], train_iters=3, eval_interval=3)
    console = capsys.readouterr().out
    assert "WARNING: the checkpoint has no state of the callback Other" in console
    numbers = resumed.loaded["nested"].pop("numbers")
    assert torch.equal(numbers, torch.arange(3)) and other.loaded is None
    assert resumed.loaded == {"count": 1, "nested": {"list": [1, None]}}
    train(flags, callbacks=[other])
    console = capsys.readouterr().out
    assert "WARNING: the checkpoint has state of the callback State, which this run" in console
    assert other.loaded["count"] == 1


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": (1, 2)}, "a is of type tuple; a state has values of JSON"),
        ({"a": float("inf")}, "ValueError"),
        ({1: 2}, "the key 1 of the state is no text"),
        ({"a": torch.tensor([1.0, float("nan")])}, "a has a value that is not finite"),
        ({"a b": torch.ones(1)}, "the key 'a b' of a tensor has other characters"),
        ({"a": object()}, "a is of type object; a state has values of JSON"),
    ],
)
def test_a_state_that_no_checkpoint_stores_is_refused(
    state: Any, problem: str, flags: list[str]
) -> None:
    with pytest.raises(CallbackError, match=f"callback State, state_dict: .*{problem}"):
        train(flags, callbacks=[State(state)], train_iters=1, eval_interval=1, quiet=True)


def test_metadata_of_callbacks_is_checked() -> None:
    record = {"values": {"a": {}}, "parameters": {"a/w": "device"}, "tensors": {"n": "host"}}
    damage: list[Function[[dict[str, Any]], Any]] = [
        lambda states: states.update(State=[]),
        lambda states: states.update(State={}),
        lambda states: states.update(State=[{**record, "values": 1}]),
        lambda states: states.update(State=[{**record, "parameters": {"b/w": "device"}}]),
        lambda states: states.update(State=[{**record, "tensors": {"n": "disk"}}]),
        lambda states: states.update(State=[{"values": {}}]),
    ]
    for change in (*damage, lambda states: None):
        states = {"State": [record, None]}
        change(states)
        problem = metadata_problem({"callbacks": states}) or ""
        assert ("callbacks.State" in problem) == (change in damage)


class SaveAfterStep(Callback):
    """Callback that saves after step 2, with or without a pause."""

    def __init__(self, pauses: bool) -> None:
        self.pauses = pauses

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2 and (not self.pauses or trainer.pause()):
            trainer.save()


def test_a_callback_saves_in_a_pause_alone(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"only if trainer\.pause\(\) returns True"):
        train(flags, callbacks=[SaveAfterStep(False)], quiet=True)
    assert not list(tmp_path.glob("run/step_*"))
    assert train(flags, callbacks=[SaveAfterStep(True)], quiet=True) == ExitCode.DONE
    saved = {path.name for path in tmp_path.glob("run/step_*")}
    assert saved == {"step_00000002", "step_00000004"}
