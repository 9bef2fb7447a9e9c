"""`benchmarks/prepare_real.py` and `train_real.py` on a small set: the archive, a run, the checks."""

import json
import sys
import zipfile

import pytest

import prepare_real
import train_real
from support.benchmark_inputs import conversations, with_python, write_jsonl
from train_real import largest_over_running_median, problems_of

GOOD = {
    "valid_loss": [[50, 4.0], [100, 3.0]],
    "unigram_entropy": 6.0,
    "largest_over_running_median": 1.1,
    "skipped_steps": 0,
}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "chat.jsonl.gz", conversations(80))
    write_jsonl(tmp_path / "chat.valid.jsonl", conversations(20, 100))
    write_jsonl(
        tmp_path / "text.jsonl",
        [{"text": f"Document {number} says nothing new."} for number in range(50)],
    )
    words = ["--set", "sgd_chat", tmp_path / "chat.jsonl.gz", tmp_path / "chat.valid.jsonl"]
    words += ["--set", "docs_longtail", tmp_path / "text.jsonl", "--vocab-size", "320"]
    monkeypatch.setattr(
        sys, "argv", ["prepare_real.py", str(tmp_path / "real.zip"), *map(str, words)]
    )
    prepare_real.main()
    return tmp_path / "real.zip"


def test_archive_holds_two_parts_of_each_set(archive, tmp_path):
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "out")
    train, valid = (
        prepare_real.read(tmp_path / "out/docs_longtail" / name)
        for name in ("train.jsonl.gz", "valid.jsonl.gz")
    )
    assert (len(train), len(valid)) == (47, 3)
    assert sorted(train + valid) == sorted(prepare_real.read(tmp_path / "text.jsonl"))
    assert len(prepare_real.read(tmp_path / "out/sgd_chat/train.jsonl.gz")) == 80
    tokenizer = json.loads((tmp_path / "out/sgd_chat/tokenizer/tokenizer.json").read_text())
    assert 300 < len(tokenizer["model"]["vocab"]) <= 320


def test_the_real_script_trains_and_its_log_is_read(archive, tmp_path, monkeypatch, quick_programs):
    monkeypatch.setattr(train_real, "command_line", with_python(quick_programs / "python"))
    argv = [
        "train_real.py",
        str(archive),
        "sgd_chat",
        "--quick",
        "--device",
        "cpu",
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", argv)
    train_real.main()
    document = json.loads((tmp_path / "train_real.json").read_text())
    found = document["results"]["sgd_chat"]
    assert len(found["loss"]) == 6 and found["loss"][-1] < found["loss"][0]
    assert [iteration for iteration, _ in found["valid_loss"]] == [3, 6]
    assert 0 < found["unigram_entropy"] < 6
    assert found["parameters"] > 10000 and "--sft" in found["command"]
    # The results contain no path of the machine.
    assert str(tmp_path.parent) not in json.dumps(document)


def test_running_median_sees_a_spike():
    assert largest_over_running_median([4.0, 4.0, 4.0, 6.4, 4.0]) == pytest.approx(1.6)
    assert largest_over_running_median([4.0, 3.0, 2.0]) < 1
    assert largest_over_running_median([9.0] * 30 + [2.0] * 30 + [4.0]) == pytest.approx(
        2.0
    )  # Only recent steps count.


@pytest.mark.parametrize(
    ("change", "bound", "words"),
    [
        ({}, None, None),
        ({}, 3.1, None),
        ({}, 3.0, "not below its bound"),
        ({"valid_loss": [[100, float("nan")]]}, 3.1, "not below its bound"),
        ({"unigram_entropy": 2.9}, 3.1, "unigram entropy"),
        ({"largest_over_running_median": 1.51}, None, "running median"),
        ({"largest_over_running_median": float("nan")}, None, "running median"),
        ({"skipped_steps": 1}, None, "skipped"),
    ],
)
def test_what_fails_a_run(change, bound, words):
    problems = problems_of("x", {**GOOD, **change}, bound)
    assert (problems == []) if words is None else any(words in problem for problem in problems)
