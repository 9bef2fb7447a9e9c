"""``packing`` and ``tune`` read length, tokenizer and chat template from a checkpoint, as a run does."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_packed.cli.main import main
from megatron_packed.training.from_python import train
from support import commands

FLAGS = """--hybrid-layer-pattern - --hidden-size 16 --seq-length 96 --lr 1e-2 --train-iters 1
    --no-isolation-self-test --device cpu --bf16 --sft --chat-template own.jinja
    --tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size 270 --data-path talk.jsonl"""
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> dict:
    """Train a step, and return the report of its packs; cache and template are deleted."""
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "I am fine."}]
    lines = [json.dumps({"messages": turns * (1 + number % 3)}) for number in range(20)]
    Path("talk.jsonl").write_text("\n".join(lines) + "\n")
    found = commands.report(capsys, "packing", *FLAGS.split())
    train([*FLAGS.split(), "--save", "run"])
    Path("own.jinja").unlink()
    shutil.rmtree(".megatron_packed_cache")
    capsys.readouterr()
    return found


def test_options_and_files_come_from_the_checkpoint(report: dict, capsys) -> None:
    words = ["--sft", "--data-path", "talk.jsonl", "--load", "run", "--use-checkpoint-args"]
    assert main(["packing", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == report
    assert "--seq-length 96" in printed.err and "instead of" not in printed.err
    tuned = commands.report(capsys, "tune", *words)
    assert tuned["lengths"]["tokens"] == report["training"]["counts"]["tokens_in"]
    assert list(Path(".megatron_packed_cache").glob("tokenizer-*")) == []


def test_a_run_that_resumes_is_described_with_its_tokenizer(report: dict, capsys) -> None:
    """Without ``--use-checkpoint-args``, the flags of the run name a tokenizer of its checkpoint."""
    lines = Path("talk.jsonl").read_text().replace("fine", "sad")
    Path("other.jsonl").write_text(lines)
    flags = [*FLAGS.replace("talk", "other").split(), "--load", "run"]
    assert main(["packing", *flags, "--json"]) == 0
    assert list(Path(".megatron_packed_cache").glob("tokenizer-*")) == []


def test_plan_knows_the_vocabulary_of_the_checkpoint(report: dict, capsys) -> None:
    vocabularies = []
    for more in ([], ["--load", "run"]):
        found = commands.report(capsys, "plan", *FLAGS.split(), *more)
        vocabularies.append(found["vocab_size"])
    size = len(json.loads(Path("run/step_00000001/tokenizer.json").read_text())["model"]["vocab"])
    assert vocabularies == [270, size] and size < 270


def test_plan_takes_the_options_of_the_checkpoint(report: dict, capsys) -> None:
    expected = commands.report(capsys, "plan", *FLAGS.split(), "--load", "run")
    assert main(["plan", "--load", "run", "--use-checkpoint-args", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    for name in ("vocab_size", "world_size", "ranks"):
        assert found[name] == expected[name]
    assert "--seq-length 96" in printed.err and "--bf16" in printed.err


@pytest.mark.parametrize("command", ["packing", "plan", "tune"])
def test_a_missing_option_of_a_loaded_checkpoint_has_this_cure(report, capsys, command) -> None:
    words = [command, "--sft", "--data-path", "talk.jsonl", "--load", "run"]
    cure = "give --seq-length N, or take it from the loaded checkpoint with --use-checkpoint-args"
    assert cure in commands.refusal(capsys, *words)[1]
    assert "--use-checkpoint-args" not in commands.refusal(capsys, *words[:-2])[1]


def test_plan_estimates_no_model_that_no_flag_describes(report: dict, capsys) -> None:
    for more in ([], ["--load", "run"]):
        code, said = commands.refusal(capsys, "plan", "--seq-length", 96, *more)
        assert code != 0
        assert "--hybrid-layer-pattern" in said
        assert ("with --use-checkpoint-args" in said) == bool(more)


def test_a_damaged_tokenizer_is_a_sentence(report: dict, capsys) -> None:
    Path("run/step_00000001/tokenizer.json").write_text("{}")
    words = ["--sft", "--data-path", "talk.jsonl", "--load", "run", "--use-checkpoint-args"]
    for command in ("packing", "tune"):
        code, said = commands.refusal(capsys, command, *words)
        assert code == 4
        assert "checkpoint error" in said and "step_00000001/tokenizer.json" in said
