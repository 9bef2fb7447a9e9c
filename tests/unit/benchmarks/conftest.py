"""Make the benchmark scripts importable by name, as they import each other."""

import json
import sys
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Return a function that runs a script with arguments, and returns the content of its results."""
    import harness

    def run(script, *words):
        monkeypatch.setattr(harness, "RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        import_module(script).main()
        written = tmp_path / f"{script}.json"
        return json.loads(written.read_text()) if written.exists() else None

    return run


@pytest.fixture
def archive(run_script, tmp_path):
    """Return an archive of conversations and of texts, as `prepare_real.py` makes it."""
    from support.benchmark_inputs import conversations, write_jsonl

    chats = [tmp_path / "chat.jsonl.gz", tmp_path / "chat.valid.jsonl"]
    write_jsonl(chats[0], conversations(80))
    write_jsonl(chats[1], conversations(20, 100))
    texts = [f"Document {number} says nothing new." for number in range(50)]
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    sets = ("--set", "sgd_chat", *chats, "--set", "docs_longtail", tmp_path / "text.jsonl")
    run_script("prepare_real", tmp_path / "real.zip", *sets, "--vocab-size", "320")
    return tmp_path / "real.zip"


@pytest.fixture
def without_profiler(monkeypatch):
    """Replace measurements that need a GPU's profile by numbers, but still call the functions."""
    import graph_step
    import harness
    from harness import Busy, Row, Spread, WallAndBusy

    ticks = count(1)

    def busy(function, *, calls):
        for _ in range(calls):
            function()
        return Busy(float(next(ticks)), 7.0, [])

    def both(function, *, calls, rounds):
        assert rounds == 1
        value = busy(function, calls=calls).milliseconds
        return WallAndBusy(*(Spread.of([1e-3 * x]) for x in (2 * value, value, 0.002)))

    def row(function, *, calls):
        value = busy(function, calls=calls).milliseconds
        return Row(3 * value, value, 2.5 * value)

    monkeypatch.setattr(harness, "row", row)
    monkeypatch.setattr(harness, "gpu_busy", busy)
    monkeypatch.setattr(harness, "wall_and_busy", both)
    monkeypatch.setattr(graph_step, "host_launches", lambda function, calls: 42.0)
