"""Test of options from a checkpoint, with ``--use-checkpoint-args``."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron_packed.cli.main import main
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import Parsed, parse_with_sources
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import model_differences, section_to_dict
from megatron_packed.resume.stored_options import stored_options
from megatron_packed.training.from_python import train

SCRIPT = Path(__file__).parents[3] / "pretrain_hybrid.py"
MODEL = "--hybrid-layer-pattern -- --hidden-size 16 --ffn-hidden-size 24 --squared-relu"
TOKENIZER = "--tokenizer-type NullTokenizer --null-tokenizer-eod-id 7 --vocab-size 100"
REST = """--mock-data --lr 1e-2 --lr-decay-style constant --global-batch-size 2
    --no-isolation-self-test --device cpu --save runs --load runs"""
RUN = f"{REST} --seq-length 64 {TOKENIZER}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Train three steps in this test's folder, and return the configuration."""
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_args([*MODEL.split(), *RUN.split(), "--train-iters", "3"])
    train(config)
    return config


def parsed(words: str) -> Parsed:
    argv = [*REST.split(), "--train-iters", "5", "--use-checkpoint-args", *words.split()]
    return parse_with_sources(argv, read_stored=stored_options)


def test_the_model_comes_from_the_checkpoint(run: RunConfig) -> None:
    found = parsed("")
    assert model_differences(section_to_dict(run.model), found.config.model) == []
    assert found.config.model.hidden_size == 16 and found.config.model.ffn_hidden_size == 24
    line = "options of the checkpoint (--use-checkpoint-args): "
    assert found.taken_options.startswith(line)
    for flag in ("--hybrid-layer-pattern --", "--hidden-size 16", "--squared-relu"):
        assert flag in found.taken_options
    assert found.sources["model.hidden_size"] == "checkpoint"


def test_length_and_tokenizer_come_from_the_checkpoint_unless_given(run: RunConfig) -> None:
    found = parsed("")
    assert found.config.data == run.data
    assert found.config.packing == run.packing
    for flag in ("--seq-length 64", "--tokenizer-type NullTokenizer", "--null-tokenizer-eod-id 7"):
        assert flag in found.taken_options
    assert parsed("--seq-length 32").config.packing.seq_length == 32
    other = parsed("--tokenizer-type ByteTokenizer").config.data
    assert (other.tokenizer_type, other.null_tokenizer_eod_id) == ("ByteTokenizer", None)


def test_the_options_are_those_of_the_chosen_step(run: RunConfig) -> None:
    words = [*MODEL.split(), *RUN.replace("64", "32").split(), "--train-iters", "4"]
    train(RunConfig.from_args([*words, "--begin-phase", "short"]))
    assert parsed("").config.packing.seq_length == 32
    assert parsed("--ckpt-step 3").config.packing.seq_length == 64


def test_given_options_are_overridden_and_named(run: RunConfig) -> None:
    found = parsed("--hidden-size 32 --swiglu --hidden-dropout 0.1 --hybrid-layer-pattern ---")
    assert found.config.model.hidden_size == 16 and not found.config.model.swiglu
    assert "--hidden-size 16 instead of 32" in found.taken_options
    assert "--hybrid-layer-pattern -- instead of ---" in found.taken_options
    assert found.config.model.hidden_dropout == 0.1  # only affects training


def test_without_a_checkpoint_the_flags_count(run: RunConfig) -> None:
    other = MODEL.replace("16", "32")
    found = parse_with_sources(
        [
            *other.split(),
            *RUN.replace("runs", "new").split(),
            "--train-iters",
            "5",
            "--use-checkpoint-args",
        ],
        read_stored=stored_options,
    )
    assert found.config.model.hidden_size == 32 and found.taken_options == ""
    alone = [*RUN.replace("runs", "new").split(), "--train-iters", "5", "--use-checkpoint-args"]
    with pytest.raises(ConfigError, match=r"^--use-checkpoint-args: finds no checkpoint in new;"):
        parse_with_sources(alone, read_stored=stored_options)
    fine_tuned = parse_with_sources(
        [
            *RUN.replace("runs", "new").split(),
            "--pretrained-checkpoint",
            "runs",
            "--train-iters",
            "5",
            "--use-checkpoint-args",
        ],
        read_stored=stored_options,
    )
    assert fine_tuned.config.model.hidden_size == 16


def test_generate_takes_model_length_and_tokenizer_from_the_checkpoint(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", "runs", "--device", "cpu", "--prompt", "1 2 3", "--max-new-tokens", "2"]
    assert main(["generate", *words, *RUN.split(), *MODEL.split()]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", "--use-checkpoint-args", *words]) == 0
    found = capsys.readouterr()
    assert found.out == expected != ""
    assert main(["generate", "--verbose", *words]) == 0
    assert (
        "options of the checkpoint: --hybrid-layer-pattern --; --hidden-size 16; "
        in capsys.readouterr().err
    )
    assert main(["generate", "--use-checkpoint-args", *words[2:], "--load", "nowhere"]) == 4
    assert "checkpoint error: nowhere: no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["--load", "--pretrained-checkpoint"])
def test_the_precision_is_the_runs_own_and_must_be_that_of_the_checkpoint(
    run: RunConfig, start: str
) -> None:
    words = REST.replace("--load runs", f"{start} runs").replace("--save runs", "--save new")
    argv = [*words.split(), "--train-iters", "5", "--use-checkpoint-args", "--bf16"]
    with pytest.raises(ConfigError, match=r"--bf16: is given, and the checkpoint was made without"):
        parse_with_sources(argv, read_stored=stored_options)


def test_a_damaged_checkpoint_and_other_programs_are_one_problem(run: RunConfig) -> None:
    argv = [*RUN.split(), "--train-iters", "5", "--use-checkpoint-args"]
    with pytest.raises(ConfigError) as caught:
        parse_with_sources(argv)
    assert [problem.option for problem in caught.value.problems] == ["--use-checkpoint-args"]
    [manifest] = Path("runs").glob("step_*/manifest.json")
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"--load runs: .*manifest"):
        parsed("")


def test_a_run_resumes_without_options_of_model_and_tokenizer(
    run: RunConfig, quick_programs: Path
) -> None:
    words = [*REST.split(), "--train-iters", "5", "--use-checkpoint-args", "--log-jsonl", "log"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(quick_programs / "python"), str(SCRIPT), *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("options of the checkpoint (--use-checkpoint-args): ") == 1
    assert "resuming from" in ended.stdout
    steps = [
        one for one in map(json.loads, Path("log").read_text().splitlines()) if "lm_loss" in one
    ]
    whole: list[dict] = []
    alone = [*MODEL.split(), *RUN.replace("runs", "whole").split(), "--train-iters", "5"]
    train(RunConfig.from_args(alone), whole.append)
    expected = [one["lm_loss"] for one in whole if one.get("iteration", 0) > 3 and "lm_loss" in one]
    assert [one["lm_loss"] for one in steps] == expected
