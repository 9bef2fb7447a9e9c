"""``--dist-ckpt-strictness``: tensors that only the run or only the checkpoint has."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume import allowed_changes
from megatron_packed.resume import run_and_random_state as run_state
from megatron_packed.resume.allowed_changes import CheckpointUse
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.held_state import held_state
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job

GROUPS, VOCAB_SIZE = ParallelGroups.single(), 61


def made(pattern: str, seed: int, **model: Any) -> tuple[Job, RunState]:
    config = RunConfig(
        model=ModelConfig(
            hybrid_layer_pattern=pattern, hidden_size=16, ffn_hidden_size=24, **model
        ),
        data=DataConfig(train_data_path=("absent.jsonl",)),
        packing=PackingConfig(seq_length=32),
        optim=OptimizerConfig(lr=1e-2),
        training=TrainingConfig(train_iters=5, device="cpu", bf16=True, seed=seed),
    )
    job = build_job(config, GROUPS, VOCAB_SIZE)
    return job, RunState(
        job.model, job.optimizer, GROUPS, AskedRun(config=config, vocab_size=VOCAB_SIZE)
    )


@pytest.fixture(autouse=True)
def other_models_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in allowed_changes.TABLE if CheckpointUse.FINE_TUNE in row.uses)
    monkeypatch.setattr(allowed_changes, "TABLE", rows)


def loaded(pattern: str, folder: Path, **options: Any) -> tuple[Job, Any]:
    job, state = made(pattern, 2)
    return job, state.load(CheckpointConfig(load=str(folder), **options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """Save a model of two MLPs whose masters differ from the rounded weights."""
    folder = tmp_path_factory.mktemp("saved")
    job, state = made("--", 1)
    for name, view in job.optimizer.state_shards().items():
        if name.startswith("master/"):
            view.add_(1e-6)
    state.save(CheckpointConfig(save=str(folder)))
    return job, folder


@pytest.mark.parametrize("strictness", ["log_unexpected", "log_all", "ignore_all"])
def test_what_the_checkpoint_lacks_keeps_its_start_values(
    strictness: str, saved: tuple[Job, Path]
) -> None:
    before, folder = saved
    start, _ = made("---", 2)
    job, found = loaded("---", folder, dist_ckpt_strictness=strictness)
    assert "model/layers.2.mixer.fc1.weight" in found.missing and found.unused == ()
    shards, expected = job.optimizer.state_shards(), before.optimizer.state_shards()
    for name, parameter in job.model.named_parameters():
        source = start if "layers.2" in name else before
        assert torch.equal(parameter, source.model.get_parameter(name))
        master = parameter.float().view(-1) if "layers.2" in name else expected[f"master/{name}"]
        assert torch.equal(shards[f"master/{name}"], master)


@pytest.mark.parametrize("strictness", ["raise_all", "raise_unexpected", "assume_ok_unexpected"])
def test_what_the_checkpoint_lacks_is_an_error(strictness: str, saved: tuple[Job, Path]) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"layers\.2\.mixer\.fc1\.bias is missing"):
        loaded("---", saved[1], dist_ckpt_strictness=strictness)


def test_what_the_run_lacks(saved: tuple[Job, Path]) -> None:
    before, folder = saved
    for finetune in (False, True):  # fine-tuning needs no optimizer, but drops no weight either
        with pytest.raises(CheckpointMismatchError, match=r"layers\.1\.mixer\.fc1\.bias is extra"):
            loaded("-", folder, finetune=finetune)
    for strictness in (
        "raise_unexpected",
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "ignore_all",
    ):
        job, found = loaded("-", folder, dist_ckpt_strictness=strictness)
        assert "model/layers.1.mixer.fc1.weight" in found.unused
        assert torch.equal(job.model.embedding.weight, before.model.embedding.weight)


def test_masters_that_no_checkpoint_had_are_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing masters are set from the weights; otherwise the first step would undo the load."""
    before, state = made("-", 1)
    with monkeypatch.context() as patch:
        patch.setattr(run_state, "held_state", lambda model, optimizer, part: held_state(model))
        state.save(CheckpointConfig(save=str(tmp_path)))
    job, found = loaded("-", tmp_path, dist_ckpt_strictness="log_unexpected")
    assert any(name.startswith("optimizer/master/") for name in found.missing)
    job.optimizer.write_params()
    for name, parameter in before.model.named_parameters():
        assert torch.equal(job.model.get_parameter(name), parameter)


def test_optimizer_and_random_states_may_be_left_out(
    saved: tuple[Job, Path], tmp_path: Path
) -> None:
    """With ``--no-load-*`` and ``--no-save-*``, only weights and position are restored."""
    before, folder = saved
    whole = {shard.split("/")[0] for shard in stored_names(folder)}
    assert whole == {"model", "optimizer", "rng"}
    _, state = made("--", 1)
    torch.manual_seed(3)
    state.load(CheckpointConfig(load=str(folder)))
    assert torch.initial_seed() != 3
    state.save(CheckpointConfig(save=str(tmp_path), save_optim=False, save_rng=False))
    assert {name.split("/")[0] for name in stored_names(tmp_path)} == {"model"}
    for place in (folder, tmp_path):
        job, state = made("--", 2)
        torch.manual_seed(4)
        drawn = torch.get_rng_state()
        state.load(CheckpointConfig(load=str(place), load_optim=False, load_rng=False))
        assert torch.equal(torch.get_rng_state(), drawn)
        masters = job.optimizer.state_shards()
        for name, parameter in job.model.named_parameters():
            assert torch.equal(parameter, before.model.get_parameter(name))
            assert torch.equal(masters[f"master/{name}"], parameter.float().view(-1))
        assert not job.optimizer.exp_avg.any() and job.optimizer.steps == 0
    with pytest.raises(CheckpointMismatchError, match=r"optimizer/.* is missing"):
        loaded("--", tmp_path)


def test_tables_that_were_padded_otherwise_name_the_option(saved: tuple[Job, Path]) -> None:
    _, state = made("--", 2, make_vocab_size_divisible_by=64)
    said = "--make-vocab-size-divisible-by is 64, and the checkpoint was made with 128; give 128"
    with pytest.raises(CheckpointMismatchError, match=said):
        state.load(CheckpointConfig(load=str(saved[1]), finetune=True))


def stored_names(folder: Path) -> list[str]:
    [candidate] = find_checkpoints(folder)
    assert candidate.manifest is not None
    return list(candidate.manifest.tensors)


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_states_are_those_of_the_same_layout(
    world_size: int, saved: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another layout they would be those of a rank that draws other masks."""
    layout = {"world_size": world_size, "tp_size": 1, "cp_size": 1, "sequence_parallel": 0}
    monkeypatch.setattr(RunState, "_layout", layout)
    _, state = made("--", 2)
    before = torch.manual_seed(7).get_state()
    state.load(CheckpointConfig(load=str(saved[1])))
    assert torch.equal(torch.get_rng_state(), before) == (world_size == 2)
