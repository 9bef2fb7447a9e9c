"""Tracking services get every metric, also after a resume, and cannot disturb a run."""

import math
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters
from megatron_packed.layers.moe.expert_room import ExpertRoom, Load
from megatron_packed.memory.offload_figures import OffloadFigures
from megatron_packed.reporting import experiment_trackers as trackers
from megatron_packed.reporting import metric_names
from megatron_packed.reporting.curves import read_jsonl
from megatron_packed.reporting.experiment_trackers import TrackerWriter, services
from megatron_packed.reporting.log_file import LogFile
from megatron_packed.reporting.run_writers import writers_of
from megatron_packed.reporting.step_record import ExpertFigures, GraphFigures
from support import step_records

LINES = [
    {"iteration": step, "lm_loss": 3.0 - step, "plan_hash": "f00", "mfu": None}
    for step in (1, 2, 3)
]


SAMPLES = {"iteration": 3, "samples": [{"prompt": "a?", "answer": "b"}]}


class Service:
    """Service that waits or fails as a test requires."""

    name = "Fake"
    error = "the line is dead."

    def __init__(self, fails_at: str = "", gate: threading.Event | None = None) -> None:
        self.fails_at, self.gate, self.calls = fails_at, gate, []

    def _call(self, name: str, value: object = None) -> str:
        if self.gate is not None:
            self.gate.wait()
        if name == self.fails_at:
            raise ConnectionError(self.error)
        self.calls.append((name, value))
        return "somewhere"

    def start(self) -> str:
        return self._call("start")

    def log(self, records) -> None:
        for record in records:
            self._call("log", record)

    def finish(self, *, failed: bool) -> None:
        self._call("finish", failed)


def written(service: Service, *, failed: bool = False) -> tuple[list[str], list[str]]:
    said, warned = [], []
    writer = TrackerWriter(service, say=said.append, warn=warned.append)
    for line in LINES:
        writer.write(line)
    writer.close(failed=failed)
    return said, warned


@pytest.mark.parametrize("failed", [False, True])
def test_all_lines_arrive_in_order_and_the_end_says_how_it_went(failed: bool) -> None:
    service = Service()
    assert written(service, failed=failed) == (["Fake: somewhere"], [])
    assert service.calls == [
        ("start", None),
        *(("log", line) for line in LINES),
        ("finish", failed),
    ]


@pytest.mark.parametrize("at", ["start", "log", "finish"])
def test_a_failure_is_said_once_and_ends_nothing(at: str) -> None:
    assert written(Service(at))[1] == ["Fake: the line is dead; the run goes on without it."]


def test_a_long_error_is_cut_and_its_control_characters_are_escaped() -> None:
    """A service may answer with a page of 10 MB."""
    service = Service(fails_at="log")
    service.error = "\x1b[31m" + "x" * 10**7
    [warned] = written(service)[1]
    assert len(warned) < 1200 and warned.isprintable()
    assert warned.startswith("Fake: \\x1b[31mxxx") and "the run goes on without it." in warned


def test_lines_that_come_while_others_are_sent_arrive_too() -> None:
    service, sent = Service(), threading.Semaphore(0)
    log = service.log
    service.log = lambda records: (log(records), sent.release())
    writer = TrackerWriter(service, say=lambda text: None, warn=lambda text: None)
    for line in LINES:
        writer.write(line)
        assert sent.acquire(timeout=5)
    writer.close()
    assert [value for name, value in service.calls if name == "log"] == LINES


def test_lines_that_a_slow_service_never_got_are_counted(monkeypatch) -> None:
    monkeypatch.setattr(trackers, "QUEUED_RECORDS", 2)
    warned, gate = [], threading.Event()
    writer = TrackerWriter(Service(gate=gate), say=lambda text: None, warn=warned.append)
    for line in LINES:
        writer.write(line)
    gate.set()
    writer.close()
    assert warned == ["Fake was too slow, so it lacks 1 log lines."]


@pytest.mark.parametrize("failed", [False, True])
def test_a_service_that_hangs_is_not_waited_for(failed: bool, monkeypatch) -> None:
    """A failed run waits for a hanging service for a shorter time than a finished run."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 10 if failed else 0.05)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS_AFTER_FAILURE", 0.05 if failed else 10)
    monkeypatch.setattr(trackers, "QUEUED_RECORDS", 2)
    gate, begun = threading.Event(), time.monotonic()
    _, warned = written(Service(gate=gate), failed=failed)
    assert warned == ["Fake does not answer, so it may lack the last numbers."]
    assert time.monotonic() - begun < 2
    gate.set()


class FakeWandb(SimpleNamespace):
    """Stand-in for the used part of wandb; ``kept`` holds what the service would store of each
    run.
    """

    def __init__(self) -> None:
        super().__init__(kept={}, inits=[], Settings=lambda **values: values, Table=dict)

    def init(self, **options):
        self.inits.append(options)
        kept = self.kept.setdefault(options["id"], [])
        return SimpleNamespace(
            url="https://there",
            offline=False,
            define_metric=lambda *a, **k: None,
            log=kept.append,
            finish=lambda exit_code: kept.append(exit_code),
        )


def test_wandb_goes_on_in_the_same_run(monkeypatch, tmp_path) -> None:
    library = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    options = LoggingConfig(wandb_project="p", wandb_exp_name="n", wandb_entity="e")
    for failed in (False, True):  # the second run resumes the first
        [service] = services(
            options,
            save=str(tmp_path / "run"),
            run_id="abc",
            config={"optim": {"lr": 1}},
            flags=["--lr 1", "--sft"],
        )
        assert written(service, failed=failed) == (["W&B: https://there"], [])
    lines = [{"iteration": line["iteration"], "train/loss": line["lm_loss"]} for line in LINES]
    assert library.kept == {"abc": [*lines, 0, *lines, 1]}
    first = library.inits[0]
    assert (first["project"], first["name"], first["entity"], first["resume"]) == (
        "p",
        "n",
        "e",
        "allow",
    )
    assert first["dir"] == str(tmp_path / "run")
    assert first["config"] == {"optim": {"lr": 1}, "flags": "--lr 1\n--sft"}
    service.log([SAMPLES])
    table = {"columns": ["prompt", "answer"], "data": [["a?", "b"]]}
    assert library.kept["abc"][-1] == {"iteration": 3, "answers": table}
    [service] = services(
        LoggingConfig(wandb_project="p", wandb_save_dir="w"), save="run", run_id="", config={}
    )
    assert service.folder == "w"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_writes_to_the_requested_trackers(rank, monkeypatch, tmp_path) -> None:
    """Only rank 0 writes, also after a resume: to its log and to the requested services."""
    library = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    logging = LoggingConfig(wandb_project="p", log_jsonl=str(tmp_path / "log.jsonl"))
    config = SimpleNamespace(logging=logging, checkpoint=SimpleNamespace(save=str(tmp_path)))
    progress = SimpleNamespace(iteration=0, consumed_tokens=0)
    state = SimpleNamespace(progress=progress, run_id="abc", config={}, resumed=None)
    console = SimpleNamespace(say=lambda text: None, warn=pytest.fail)
    opening = {"data": {"training": {"targets_in": 5}}, "run": {"id": "abc", "folder": None}}
    for begun in (0, 2):
        state.progress.iteration, state.resumed = begun, begun or None
        log = None if rank else LogFile(logging.log_jsonl)
        groups = SimpleNamespace(rank=rank)
        writers = writers_of(config, groups, state, opening, console, log=log)
        for line in LINES[begun:] if writers else ():
            for writer in writers:
                writer.write(line)
        for writer in writers:
            writer.close()
    assert len(writers) == (0 if rank else 2)
    steps = [line["iteration"] for line in library.kept.get("abc", []) if line]
    assert steps == ([] if rank else [1, 2, 3, 3])
    if rank == 0:
        records = read_jsonl(logging.log_jsonl)
        assert [record["iteration"] for record in records] == [1, 2, 3]
        assert [record.get("data") for record in records] == [opening["data"], None, None]


class FakeMlflowClient:
    runs: dict[str, dict] = {}  # noqa: RUF012  the service, which outlives its clients

    def __init__(self, uri: str | None) -> None:
        assert uri == "file:here"

    def get_experiment_by_name(self, name: str):
        return SimpleNamespace(experiment_id=name) if self.runs else None

    def create_experiment(self, name: str) -> str:
        return name

    def search_runs(self, places, condition: str, max_results: int):
        assert condition == "tags.megatron_packed_run = 'abc'"
        return [SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in self.runs]

    def create_run(self, place: str, tags: dict, run_name: str | None):
        name = f"run{len(self.runs)}"
        self.runs[name] = {"tags": tags, "name": run_name, "params": {}, "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def log_param(self, run: str, name: str, value: str) -> None:
        self.runs[run]["params"][name] = value

    def log_batch(self, run: str, metrics) -> None:
        assert len(metrics) <= 1000, "the service refuses more"
        self.runs[run]["metrics"] += [(m[0], m[1], m[3]) for m in metrics]

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def set_tag(self, run: str, name: str, value: str) -> None:
        self.runs[run]["tags"][name] = value

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status


def test_mlflow_goes_on_in_the_same_run(monkeypatch) -> None:
    monkeypatch.setattr(FakeMlflowClient, "runs", {})
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeMlflowClient))
    monkeypatch.setitem(
        sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *values: values)
    )
    options = LoggingConfig(
        mlflow_experiment="x", mlflow_run_name="n", mlflow_tracking_uri="file:here"
    )
    for failed in (False, True):
        config = {"optim": {"lr": 1}}
        [service] = services(options, save=None, run_id="abc", config=config, flags=["--lr 1"])
        assert written(service, failed=failed) == (["MLflow: run run0 of experiment x"], [])
    points = [("train/loss", line["lm_loss"], line["iteration"]) for line in LINES]
    assert FakeMlflowClient.runs == {
        "run0": {
            "tags": {"megatron_packed_run": "abc", "flags": "--lr 1"},
            "name": "n",
            "params": {"optim.lr": "1"},
            "metrics": points * 2,
            "status": "FAILED",
        },
    }
    service.log([SAMPLES])
    assert FakeMlflowClient.runs["run0"]["tags"]["answers"] == "prompt: a?\nanswer: b"
    service.log(LINES * 700)
    assert len(FakeMlflowClient.runs["run0"]["metrics"]) == len(points * 702)


def test_what_is_no_number_is_not_sent() -> None:
    record = {"epoch": 1, "mfu": math.nan, "c": "nan", "d": [1.0], "e": None, "skipped": True}
    assert trackers._numbers(record) == {"data/epoch": 1, "train/skipped": 1}


def test_every_number_of_a_step_has_a_group() -> None:
    """Services show the part before the slash as a section, and names do not depend on the run."""
    experts = ExpertFigures.from_counts([30.0, 10.0], 1, 7, [8.0])
    assert experts is not None
    experts = experts.in_room(ExpertRoom.from_factor("auto"), Load(1.1, 1.2))
    graphs = GraphFigures.since((0, 0), GraphCounters())
    offload = OffloadFigures(buffers=2, moved_mib=1.0, loaded_mib=1.0)
    line = replace(
        step_records.record(3, experts=experts, graphs=graphs, offload=offload), num_zeros=3
    )
    line = replace(line, params_norm=1.0, weight_decay=1.0, loss_median=1.0, grad_norm_median=1.0)
    listed = {"expert_load", "expert_dropped_by_layer", "plan_hash", "skip_reason", "iteration"}
    assert line.as_dict().keys() - listed - {"skip_reason"} == metric_names.SECTIONS.keys()
    assert metric_names.tracked_name("lm_loss") == "train/loss"
    validation = {"iteration": 3, "valid_loss": 1.0, "valid_target_tokens": 9, "plan_hash": "f"}
    assert metric_names.tracked(validation) == {
        "valid/loss": 1.0,
        "valid/target_tokens": 9.0,
        "valid/perplexity": math.e,
    }
    assert metric_names.tracked({"test_loss": 99.0})["test/perplexity"] == math.exp(20)


def test_an_address_that_holds_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains a user name or a password") as caught:
        LoggingConfig(mlflow_experiment="x", mlflow_tracking_uri="https://user:secret@host/a")
    assert "secret" not in str(caught.value)
