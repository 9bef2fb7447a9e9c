"""Runs with ``--freeze-params``: what they print and save, and which resumes are refused."""

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.resume.allowed_changes import _frozen_refusal
from megatron_packed.resume.compared_runs import AskedRun, Resumed
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.json_lines import write_texts

MODEL = "--hybrid-layer-pattern M*- --hidden-size 16 --num-attention-heads 2 --mamba-head-dim 8"
MODEL += " --mamba-num-groups 1 --mamba-state-dim 8 --no-isolation-self-test --seq-length 64"
FROZEN = ["embedding.*", "layers.0.*"]


@pytest.fixture
def flags(tmp_path):
    data = tmp_path / "documents.jsonl"
    write_texts(data, (f"{n:02d} hello" for n in range(40)))
    folder = str(tmp_path / "run")
    places = ["--data-path", str(data), "--save", folder, "--load", folder]
    return [*MODEL.split(), *places, "--lr", "1e-2"]


def weights(folder) -> dict[str, torch.Tensor]:
    model = TrainedModel.load(folder).model
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_a_resumed_run_keeps_its_list(flags, tmp_path, capsys):
    """Frozen weights are in the checkpoint and stay equal; another list is refused on resuming."""
    assert train(flags, train_iters=1, freeze_params=FROZEN) is ExitCode.DONE
    said = capsys.readouterr().out
    assert "of them frozen), fp32" in said
    first = weights(tmp_path / "run")
    assert train(flags, train_iters=3, freeze_params=FROZEN) is ExitCode.DONE
    last = weights(tmp_path / "run")
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if name.startswith(("embedding.", "layers.0."))}
    with pytest.raises(CheckpointError, match="trained other parameters, so its optimizer state"):
        train(flags, train_iters=4, freeze_params=["embedding.*"])
    started = {"finetune": True, "save": str(tmp_path / "new"), "train_iters": 1}
    assert train(flags, freeze_params=["embedding.*"], **started) is ExitCode.DONE


def test_the_refusal_names_the_list_of_the_checkpoint():
    def run(*patterns: str) -> AskedRun:
        words = [*MODEL.split(), "--mock-data", "--lr", "1e-2", "--train-iters", "2"]
        return AskedRun(config=RunConfig.from_args(words, freeze_params=patterns))

    stored = Resumed({"config": {"model": {"freeze_params": ["embedding.*"]}}})
    refusal = _frozen_refusal(run("layers.0.*"), stored)
    assert refusal is not None
    assert "--freeze-params layers.0.*, was embedding.*; give --freeze-params" in refusal
    assert refusal.endswith("give --finetune to start a new run from these weights")
    older = Resumed({"config": {"model": {}}})  # of a version without the option
    assert "leave out --freeze-params to resume" in str(_frozen_refusal(run("layers.0.*"), older))
    assert _frozen_refusal(run(), older) is None


def test_a_pattern_without_a_match_is_refused_before_data_is_read(flags, tmp_path):
    (tmp_path / "documents.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigError, match=r"--freeze-params layer.0.\*: matches the name"):
        train(flags, train_iters=1, freeze_params=["layer.0.*"])
