"""docs/support_matrix.md matches the records, the records match the tests, and only passes count."""

import json
import os
import re
import runpy
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import kernel_code, shown
from support.json_lines import read_json

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "support").glob("*.json"))


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "support_matrix.py"))


def test_the_page_is_up_to_date(script):
    text = script["PAGE"].read_text()
    assert script["filled"](text) == text, "run python docs/support_matrix.py"


def test_records_say_what_tests_say(tmp_path, quick_programs):
    """The records list exactly the tests that fill cells of the matrix.

    Removed tests and tests with changed cells leave the records. New tests are added as not run.
    """
    files = {
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.shows(" in path.read_text()
    }
    named = {name.split("::")[0] for record in RECORDS for name in read_json(record)["tests"]}
    files |= {str(ROOT / name) for name in named if (ROOT / name).exists()}
    copies = [tmp_path / record.name for record in RECORDS]
    options = []
    for record, copy in zip(RECORDS, copies):
        copy.write_text(record.read_text())
        options += ["--record-shown", str(copy)]
    command = [
        str(quick_programs / "python"),
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        *options,
        *files,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:]
    for record, copy in zip(RECORDS, copies):
        name = record.relative_to(ROOT)
        assert copy.read_text() == record.read_text(), (
            f"run pytest --collect-only --record-shown {name}, then tests"
        )


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({}, ["eager", "graphs: local"]),
        ({"loss_difference": 0.02}, None),
        ({"grad_norm_difference": 0.03}, None),
        ({"loss_difference": float("nan")}, None),
        ({"graphs": {"local": {"fallbacks": 1}}}, ["eager"]),
    ],
)
def test_a_benchmark_with_other_losses_or_eager_packs_shows_nothing(script, changes, columns):
    good = {
        "loss_difference": 1e-4,
        "grad_norm_difference": 1e-3,
        "graphs": {"local": {"fallbacks": 0}},
    }
    result = {"processes": 2, "layouts": {"tp2 sp": good | changes}}
    found = list(script["benchmarked"]("H200 benchmark", result, {}))
    assert [list(seen.shows) for seen in found] == ([columns] if columns else [])


CLAIM = {"eager": ["TP"], "graphs: local": ["TP"]}


@pytest.mark.parametrize(
    ("machine", "outcomes", "eager", "graphs"),
    [
        ("CPU", ["passed"], "[CPU 1](#tests)", "[CPU stand-in 1](#tests)"),
        ("NVIDIA H200", ["not run", "passed"], "[H200 1](#tests)", "[H200 1](#tests)"),
        (
            "CPU",
            ["passed", "failed"],
            "[**CPU fails** 1](#tests)",
            "[**CPU stand-in fails** 1](#tests)",
        ),
        (
            "CPU",
            ["skipped", "not run"],
            "[*CPU skipped* 1](#tests)",
            "[*CPU stand-in skipped* 1](#tests)",
        ),
        ("CPU", [], "-", "-"),
    ],
)
def test_only_what_passed_is_seen(script, tmp_path, monkeypatch, machine, outcomes, eager, graphs):
    tests = {
        f"{file}.py::test": {"outcome": outcome, "shows": CLAIM}
        for file, outcome in zip("ab", outcomes)
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.json").write_text(json.dumps({"machine": machine, "tests": tests}))
    everything = script["Cells"].__call__.__globals__
    monkeypatch.setitem(everything, "RECORDS", tmp_path / "docs")
    monkeypatch.setitem(everything, "ROOT", tmp_path)  # a folder without benchmarks
    cell = script["Cells"]()
    assert (cell("eager", "TP"), cell("graphs: local", "TP")) == (eager, graphs)
    assert cell("eager", "TP", "ZeRO-1") == "-"
    preferred = {"passed": 0, "failed": 1, "skipped": 2, "not run": 3}
    best = min(zip(outcomes, "ab"), key=lambda test: preferred[test[0]], default=None)
    if best is not None and "failed" not in outcomes:
        assert cell.files == [f"{best[1]}.py"]


EVIDENCE = {"code": "0123", "kernels": "4567", "shows": CLAIM}
RUN = {"date": "2026-11-29 01:00 UTC", "commit": "abcdef01", "card": "CPU"}


def report(when, outcome, name="tests/a.py::test"):
    return SimpleNamespace(
        when=when, outcome=outcome, nodeid=name, user_properties=[("shown", EVIDENCE)]
    )


def config_of(tmp_path, *, collects=False, commit="abcdef0123"):
    return SimpleNamespace(
        option=SimpleNamespace(collectonly=collects),
        rootpath=tmp_path,
        getoption=lambda name: {"--record-commit": commit}[name],
    )


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        (["setup passed", "call passed", "teardown passed"], "passed"),
        (["setup passed", "call passed", "teardown failed"], "failed"),
        (["setup passed", "call skipped", "teardown passed"], "skipped"),
        (["setup skipped", "teardown passed"], "skipped"),
        (["setup passed"], "not run"),
    ],
)
def test_what_a_run_records(phases, outcome, tmp_path):
    """An entry has the outcome, the date, commit and card of the run, and what it depends on."""
    path = tmp_path / "record.json"
    config = config_of(tmp_path)
    for _ in range(2):  # The second recorder reads the file of the first one.
        recorder = shown.Recorder(config, path)
        for phase in phases:
            recorder.pytest_runtest_logreport(report(*phase.split()))
    entry = read_json(path)["tests"]["tests/a.py::test"]
    if outcome == "not run":
        assert entry == {"outcome": outcome, "shows": CLAIM}
        return
    date = datetime.strptime(entry.pop("date"), "%Y-%m-%d %H:%M UTC").replace(tzinfo=timezone.utc)
    assert datetime.now(timezone.utc) - date < timedelta(minutes=5)
    assert entry == {"outcome": outcome, "commit": "abcdef01", "card": "CPU", **EVIDENCE}
    skipping = shown.Recorder(config, path)
    skipping.pytest_runtest_logreport(report("setup", "skipped"))
    after = read_json(path)["tests"]["tests/a.py::test"]["outcome"]
    assert after == ("passed" if outcome == "passed" else "skipped")
    path.write_text(path.read_text().replace(shown.torch.__version__, "0.1"))
    with pytest.raises(pytest.UsageError, match="another machine or other versions"):
        shown.Recorder(config, path)


def test_a_skip_does_not_keep_a_pass_of_other_code(tmp_path):
    path = tmp_path / "record.json"
    old = {"outcome": "passed", **RUN, **EVIDENCE, "code": "89ab"}
    recorder = shown.Recorder(config_of(tmp_path), path)
    recorder._write({"tests/a.py::test": old})
    recorder.pytest_runtest_logreport(report("setup", "skipped"))
    assert read_json(path)["tests"]["tests/a.py::test"]["outcome"] == "skipped"


def test_a_record_needs_the_commit_of_the_tested_files(tmp_path):
    """Files that differ from their commit, or have no commit, are refused."""
    with pytest.raises(
        pytest.UsageError, match="give the commit of these files by --record-commit"
    ):
        shown.tested_commit(tmp_path, None)

    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("")
    git("add", ".")
    git("commit", "-m", "x")
    assert re.fullmatch("[0-9a-f]{8}", shown.tested_commit(tmp_path, None))
    (tmp_path / "tests" / "a.py").write_text("1")
    with pytest.raises(pytest.UsageError, match=r"tests/a\.py; commit them first"):
        shown.tested_commit(tmp_path, None)
    assert shown.tested_commit(tmp_path, "0123456789") == "01234567"


def test_a_gpu_without_a_default_kernel_records_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shown.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shown.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(kernel_code, "missing_kernels", lambda: ["ssd triton: ImportError: x"])
    with pytest.raises(pytest.UsageError, match="lacks default kernels: ssd triton: ImportError"):
        shown.Recorder(config_of(tmp_path), tmp_path / "record.json")


NAME, RENAMED = "tests/a.py::test[1]", "tests/b.py::test_of_the_same[1]"


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        (NAME, {}, True),
        (NAME, {"code": "89ab"}, False),
        (NAME, {"kernels": "89ab"}, False),
        (NAME, {"shows": {"eager": ["TP"]}}, False),
        (RENAMED, {}, True),
        (RENAMED, {"code": "89ab"}, False),
        (RENAMED.replace("1", "2"), {}, False),
    ],
)
def test_an_outcome_belongs_to_code_claims_and_kernels(name, changes, kept, tmp_path):
    """A collection keeps the outcomes of tests whose code, claims and kernels are the recorded ones."""
    recorder = shown.Recorder(config_of(tmp_path, collects=True), tmp_path / "record.json")
    old = {"outcome": "passed", **RUN, **EVIDENCE}
    recorder._record["tests"] = {NAME: old}
    item = SimpleNamespace(path=tmp_path / name.split("::")[0], config=config_of(tmp_path))
    found = EVIDENCE | changes
    expected = old if kept else {"outcome": "not run", "shows": found["shows"]}
    assert recorder._after_collection([item], {name: found}) == {name: expected}


def test_axes_are_those_of_what_is_trained():
    assert shown.axes_of(1, {}) == ["one process"] and shown.axes_of(2, {"cp_size": 2}) == []
    assert shown.axes_of(4, {"tp_size": 2}, {"sequence_parallel": True}) == ["TP + SP", "DP"]
    assert shown.axes_of(2, {"cp_size": 2, "cp_comm_type": "p2p", "ep_size": 1}) == ["CP p2p"]


def test_layers_are_those_of_what_is_trained():
    latent = {"hybrid_layer_pattern": "M*E/*", "moe_latent_size": 8}
    assert shown.layers_of({"tp_size": 2}) == []
    assert shown.layers_of({"hybrid_layer_pattern": "G-"}) == ["MLP", "gated delta net"]
    named = ["Mamba", "attention", "experts", "latent experts", "MTP"]
    assert shown.layers_of({"tp_size": 2}, latent) == named
    # The latent size of a model without experts has no effect.
    assert shown.layers_of({"hybrid_layer_pattern": "M", "moe_latent_size": 8}) == ["Mamba"]


def test_the_first_column_with_a_passed_test_is_shown(script, monkeypatch):
    """A cell of several columns takes the first column whose test passed."""
    seen = [
        script["Seen"](outcome, "CPU", f"{column}.py", {column: ["MTP", "TP"]})
        for column, outcome in (("graphs: local", "passed"), ("eager", "not run"))
    ]
    cell = script["Cells"]()
    monkeypatch.setattr(cell, "_seen", seen)
    assert cell(["eager", "graphs: local"], "MTP", "TP") == "[CPU stand-in 1](#tests)"
    seen.append(script["Seen"]("passed", "CPU", "eager.py", {"eager": ["MTP", "TP"]}))
    assert cell(["eager", "graphs: local"], "MTP", "TP") == "[CPU 2](#tests)"


def test_the_list_of_tests_says_what_they_compare_and_when_they_ran(script):
    """Every test file of the page says what it compares; its runs have a machine, a day and a commit."""
    text = script["PAGE"].read_text()
    rows = re.findall(r"^\| \d+ \| `(tests/\S+)` \| (.*) \| (.*) \|$", text, flags=re.M)
    assert len(rows) > 40
    overlap = dict(row[:2] for row in rows)["tests/distributed/test_overlap.py"]
    assert "steps without" in overlap and "2 % on two GPUs" in overlap
    run = r"(CPU|H\d+) \d{4}-\d\d-\d\d [0-9a-f]{8}"
    assert all(re.fullmatch(f"-|{run}(, {run})*", runs) for *_, runs in rows)


def test_every_outcome_on_record_has_its_run_and_its_code():
    for record in RECORDS:
        for name, entry in read_json(record)["tests"].items():
            keys = {*entry}
            if entry["outcome"] == "not run":
                assert keys == {"outcome", "shows"}, name
            else:
                assert keys == {"outcome", *RUN, *EVIDENCE}, name


@pytest.mark.parametrize(("date", "outcome"), [("2026-11-22", "not run"), ("2027-01-01", "passed")])
def test_a_benchmark_with_older_kernels_is_not_run(script, tmp_path, monkeypatch, date, outcome):
    """The layouts of 22 November ran mamba-ssm's scan, which is no longer the default."""
    good = {"loss_difference": 1e-4, "grad_norm_difference": 1e-3, "graphs": {}}
    versions = {"quack-kernels": "1", "flash-attn-4": "1"}
    result = {
        "device": "NVIDIA H200",
        "date": f"{date} 09:00 UTC",
        "versions": versions,
        "results": {"hybrid1b": {"processes": 2, "layouts": {"tp2 sp": good}}},
    }
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "layouts_2_hybrid1b.json").write_text(json.dumps(result))
    names = script["everything"].__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    monkeypatch.setitem(names, "RECORDS", tmp_path)
    assert [seen.outcome for seen in script["everything"]()] == [outcome]
