"""Checkpoints of runs with bf16 moments and with masters that are weights and remainders."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.optim.master_remainders import split_masters
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.allowed_changes import _state_refusal
from megatron_packed.resume.compared_runs import AskedRun, Resumed
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job, build_job
from support.optimizer_states import everything_computed
from support.whole_state import assembled, assert_same_bits

GROUPS = ParallelGroups.single()
SLOTS, VOCAB = 32, 61
FP32: dict[str, Any] = {}
PAIRS = {"use_precision_aware_optimizer": True, "main_params_dtype": "fp32"}
BF16 = PAIRS | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
NEAREST = BF16 | {"moment_rounding": "nearest"}
MIXED = PAIRS | {"exp_avg_dtype": "bf16"}


def made(precision: dict[str, Any], seed: int = 1, **checkpoint: Any) -> tuple[Job, RunState]:
    config = RunConfig(
        model=ModelConfig(hybrid_layer_pattern="*-", hidden_size=16, num_attention_heads=2),
        data=DataConfig(train_data_path=("absent.jsonl",)),
        packing=PackingConfig(seq_length=SLOTS),
        optim=OptimizerConfig(lr=1e-2, **precision),
        training=TrainingConfig(train_iters=5, device="cpu", bf16=True, seed=seed),
        checkpoint=CheckpointConfig(**checkpoint),
    )
    job = build_job(config, GROUPS, VOCAB)
    return job, RunState(job.model, job.optimizer, GROUPS, AskedRun(config=config))


def steps(job: Job, numbers: range) -> None:
    for number in numbers:
        draw = np.random.default_rng(number)
        documents = [(draw.integers(0, VOCAB, length), None) for length in (17, 9)]
        job.step([MicroBatch.build(documents, SLOTS, scales=(1 / 24, 1, 1 / 24))], 1e-2)


def whole(job: Job) -> dict[str, Tensor]:
    return assembled([everything_computed(job)])


def saved(
    precision: dict[str, Any], folder: Path, *, ties: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Save a run after three steps; return its state.

    Args:
        ties: set some masters to numbers halfway between two bf16 numbers.
    """
    job, state = made(precision)
    steps(job, range(3))
    if ties:
        pairs, name = job.optimizer.pairs(), "embedding.weight"
        shards = job.optimizer.state_shards()
        master = pairs[name].values() if pairs else shards[f"master/{name}"]
        master[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.0])
        if pairs:
            pairs[name].set(master)
        job.optimizer.write_params()
    state.save(CheckpointConfig(save=str(folder), **options))
    state.saved(wait=True)
    return whole(job)


def loaded(precision: dict[str, Any], folder: Path, **options: Any) -> Job:
    """Load a checkpoint into a job whose weights are others."""
    job, state = made(precision, load=str(folder), **options)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.add_(1)
    job.optimizer.reset_masters()
    state.load(CheckpointConfig(load=str(folder), **options))
    return job


@pytest.mark.parametrize("precision", [PAIRS, BF16, NEAREST, MIXED], ids=str)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_run(
    precision: dict[str, Any], tmp_path: Path
) -> None:
    before = saved(precision, tmp_path)
    job = loaded(precision, tmp_path)
    assert_same_bits(whole(job), before)
    steps(job, range(3, 6))
    other, _ = made(precision)
    steps(other, range(6))
    assert_same_bits(whole(job), whole(other))


def test_a_checkpoint_stores_whole_masters_and_moments_in_their_dtype(tmp_path: Path) -> None:
    saved(MIXED, tmp_path)
    manifest = find_checkpoints(tmp_path)[0].manifest
    assert manifest is not None
    kinds = {name.split("/")[1]: t.dtype for name, t in manifest.tensors.items() if "optim" in name}
    assert kinds == {
        "master": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.float32,
        "step": torch.float32,
    }


def test_a_background_save_stores_the_same(tmp_path: Path) -> None:
    direct = saved(BF16, tmp_path / "direct")
    saved(BF16, tmp_path / "background", async_save=True)
    assert_same_bits(whole(loaded(BF16, tmp_path / "background")), direct)


@pytest.mark.parametrize("into", [FP32, PAIRS, BF16, MIXED], ids=str)
@pytest.mark.parametrize("precision", [FP32, BF16, MIXED], ids=str)
def test_a_phase_converts_the_state(
    precision: dict[str, Any], into: dict[str, Any], tmp_path: Path
) -> None:
    """Masters keep their bits, bf16 moments are exact in float32, and others are rounded to nearest."""
    before = saved(precision, tmp_path, ties=True)
    found = whole(loaded(into, tmp_path, begin_phase="next"))
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        if name.startswith("model/"):
            master = before[name.replace("model/", "optimizer/master/")]
            rounded = split_masters(master)[0] if into else master.bfloat16()
            assert torch.equal(tensor, rounded), name
        else:
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name
    kinds = {name.split("/")[1]: t.dtype for name, t in found.items() if "exp_avg" in name}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert kinds == {
        name: dtypes[into.get(f"{name}_dtype", "fp32")] for name in ("exp_avg", "exp_avg_sq")
    }


def test_other_data_types_without_a_phase_are_refused(tmp_path: Path) -> None:
    saved(BF16, tmp_path)
    said = (
        "has moments of other data types: --exp-avg-dtype fp32, was bf16; --exp-avg-sq-dtype fp32, was "
        "bf16; give --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 to resume, or give --begin-phase NAME "
        "with a new name to convert them"
    )
    with pytest.raises(CheckpointMismatchError, match=said):
        loaded(PAIRS, tmp_path)
    job = loaded(PAIRS, tmp_path, load_optim=False)
    assert not job.optimizer.exp_avg.any() and not job.optimizer.remainders.any()


def test_imported_and_older_checkpoints_have_float32_moments() -> None:
    """Their metadata lacks the data types. An import is converted, and an older run keeps them."""
    _, state = made(BF16)
    older = {"config": {"optim": {"lr": 0.1}, "packing": {}}}
    said = _state_refusal(state.run, Resumed(older))
    assert said is not None and "--exp-avg-dtype bf16, was fp32" in said
    assert "leave out --exp-avg-dtype --exp-avg-sq-dtype to resume" in said
    assert _state_refusal(state.run, Resumed({"config": {"optim": {"lr": 0.1}}})) is None


def test_masters_change_their_form_without_a_phase(tmp_path: Path) -> None:
    """The pair holds all bits of a master, so nothing is lost in either direction."""
    before = saved(FP32, tmp_path / "wide", ties=True)
    found = whole(loaded(PAIRS, tmp_path / "wide"))
    masters = [name for name in before if name.startswith("optimizer/")]
    assert all(torch.equal(found[name], before[name]) for name in masters)
    before = saved(PAIRS, tmp_path / "pairs", ties=True)
    job = loaded(FP32, tmp_path / "pairs")
    found = whole(job)
    assert all(torch.equal(found[name], before[name]) for name in masters)
    weights = {name: master.bfloat16() for name, master in before.items() if "/master/" in name}
    for name, weight in weights.items():
        assert torch.equal(found[name.replace("optimizer/master/", "model/")], weight)


def test_masters_that_a_checkpoint_lacks_are_the_weights(tmp_path: Path) -> None:
    before = saved(BF16, tmp_path, save_optim=False)
    job = loaded(BF16, tmp_path, dist_ckpt_strictness="log_unexpected")
    found = whole(job)
    for name, weight in before.items():
        if name.startswith("model/"):
            assert torch.equal(found[name], weight)
            master = found[name.replace("model/", "optimizer/master/")]
            assert torch.equal(master, weight.float())


def test_100_flipped_bits_of_a_checkpoint_are_all_found(tmp_path: Path) -> None:
    """A load of a damaged file is refused before it changes a tensor."""
    saved(BF16, tmp_path)
    job, state = made(BF16)
    before = whole(job)
    files = sorted((tmp_path / "step_00000000").iterdir())
    draw = random.Random(7)
    for number in range(100):
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        place, bit = draw.randrange(len(data)), draw.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=path.name):
            state.load(CheckpointConfig(load=str(tmp_path)))
        data[place] ^= 1 << bit
        path.write_bytes(data)
    assert_same_bits(whole(job), before)
    state.load(CheckpointConfig(load=str(tmp_path)))
    assert job.optimizer.exp_avg.any()
