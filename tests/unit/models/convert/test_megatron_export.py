"""Checkpoints for Megatron with the state of the optimizer: equal to the bit after the way back."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.models.convert.megatron.export_megatron import to_megatron
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.training.from_python import train
from support import megatron_checkpoint as theirs
from support.converted_model import convert
from support.json_lines import write_texts

pytestmark = pytest.mark.usefixtures("reader")
MODEL = """--hybrid-layer-pattern MG*-E --hidden-size 32 --num-attention-heads 2 --mamba-num-heads 4
    --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 --linear-num-key-heads 2
    --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --num-experts 4
    --moe-router-topk 2 --moe-ffn-hidden-size 24 --swiglu --disable-bias-linear
    --tokenizer-type NullTokenizer --vocab-size 128 --no-isolation-self-test --device cpu"""
RUN = """--seq-length 64 --global-batch-size 2 --train-iters 6 --exit-interval 3 --lr 1e-2
    --min-lr 1e-4 --lr-warmup-iters 1 --adam-beta2 0.95 --weight-decay 0.1 --data-path line.jsonl
    --save run"""
LOW = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def everything(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    """Return weights and optimizer state of a checkpoint of this project, and its manifest."""
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if not name.startswith("rng/")]
    return {name: read_tensor(path, name, manifest) for name in names}, manifest


def common_state(folder: Path) -> dict:
    """Return the plain values that torch's own reader finds in a checkpoint of Megatron."""
    state: dict[str, list] = {"common_state/shard_0_1": [None]}
    checkpoint.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state["common_state/shard_0_1"][0]


@pytest.fixture(name="trained")
def _trained(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Path:
    """Return the checkpoint of three steps of a model with a layer of each kind."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "line.jsonl", ["1 2 3 4 5 6 7 8 9"] * 60)
    train([*MODEL.split(), *RUN.split(), *request.param.split()])
    return tmp_path / "run" / "step_00000003"


@pytest.mark.parametrize("trained", ["", "--bf16", LOW], indirect=True)
def test_state_comes_back_equal_to_the_bit(trained, tmp_path, capsys):
    """Layers of each kind have fused parameters, which Megatron stores in parts."""
    ours, manifest = everything(trained)
    low = ours["model/embedding.weight"].dtype == torch.bfloat16
    assert convert("--to-megatron", tmp_path / "theirs", "--load", trained) == 0
    back = from_megatron(tmp_path / "theirs", tmp_path / "back", bf16=low)
    again, restored = everything(back.saved.path)
    assert again.keys() == ours.keys() and len(ours) > 90
    for name, tensor in ours.items():
        # Moments come back in float32, which holds bf16 values without rounding.
        wide = name.startswith("optimizer/") and name != "optimizer/step"
        assert torch.equal(again[name], tensor.float() if wide else tensor), name
        assert again[name].dtype == (torch.float32 if wide else tensor.dtype)
    before, after = (each.metadata["config"]["optim"] for each in (manifest, restored))
    for name in ("lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"):
        assert after[name] == before[name]
    assert (after["weight_decay"], after["lr_decay_samples"], after["lr_warmup_samples"]) == (
        0.1,
        12,
        2,
    )
    assert restored.step == 3 and restored.metadata["progress"]["plan_samples"] == 6
    assert "--lr 0.01 --min-lr 0.0001" in capsys.readouterr().out


@pytest.mark.parametrize("trained", [LOW], indirect=True)
def test_tensors_and_groups_are_those_of_a_distributed_optimizer(trained, tmp_path):
    folder = to_megatron(trained, tmp_path / "theirs").folder
    assert folder.name == "iter_0000003"
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "3"
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {name for name in stored if not name.startswith(("optimizer.", "common_state/"))}
    for kind, dtype in (
        ("param", torch.float32),
        ("exp_avg", torch.bfloat16),
        ("exp_avg_sq", torch.bfloat16),
    ):
        for name in weights:
            state = stored[f"optimizer.state.{kind}.{name}"]
            assert (state.size, state.properties.dtype) == (stored[name].size, dtype)
    assert len(stored) == 4 * len(weights) + 1
    common = common_state(folder)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["opt_param_scheduler"]["num_steps"] == common["args"].consumed_train_samples == 6
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["weight_decay"]) for group in groups] == [(1, 0.1), (0, 0)]
    for group in groups:
        assert (group["step"], group["betas"], group["max_lr"]) == (3, (0.9, 0.95), 0.01)
        assert not group["is_expert_parallel"]


@pytest.mark.parametrize("trained", [""], indirect=True)
def test_experts_of_several_ranks_have_an_optimizer_of_their_own(trained, tmp_path, capsys):
    """Megatron has it with expert parallelism, and looks for its groups under the number 1."""
    words = ["--to-megatron", tmp_path / "theirs", "--load", trained]
    assert convert(*words, "--target-expert-parallel-size", 2) == 0
    assert "--expert-model-parallel-size 2" in capsys.readouterr().out
    common = common_state(tmp_path / "theirs" / "iter_0000003")
    assert common["args"].expert_model_parallel_size == 2
    experts = [
        {group["is_expert_parallel"] for group in part["optimizer"]["param_groups"]}
        for part in (common["optimizer"][0], common["optimizer"][1])
    ]
    assert experts == [{False}, {True}]
    back = from_megatron(tmp_path / "theirs", tmp_path / "back")
    assert everything(back.saved.path)[0]["optimizer/step"].tolist() == [3.0]


@pytest.mark.parametrize("trained", ["--freeze-params embedding.weight"], indirect=True)
def test_weights_alone_are_written_on_request_or_if_moments_are_missing(trained, tmp_path, capsys):
    words = ["--load", trained, "--to-megatron"]
    assert convert(*words, tmp_path / "alone", "--no-save-optim") == 0
    printed = capsys.readouterr().out
    assert "--finetune" in printed and "moments" not in printed
    assert convert(*words, tmp_path / "frozen") == 0
    assert "embedding.weight has no moments, because it was frozen" in capsys.readouterr().out
    for name in ("alone", "frozen"):
        names = FileSystemReader(tmp_path / name / "release").read_metadata().state_dict_metadata
        assert not [tensor for tensor in names if tensor.startswith("optimizer.")]


def test_state_of_megatron_goes_back_to_it_unchanged(tmp_path):
    """Multi-token prediction and latent experts are in this model; its router's bias has no state."""
    found = theirs.tensors(torch.bfloat16)
    state = theirs.optimizer(found)
    more = copy.deepcopy(theirs.TRAINED)
    theirs.write(tmp_path / "c", {**found, **state}, theirs.TRAINED_ARGS, more=more)
    from_megatron(tmp_path / "c", tmp_path / "ours", bf16=True)
    folder = to_megatron(tmp_path / "ours", tmp_path / "back").folder
    reader = FileSystemReader(folder)
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert {*state, *found, "common_state/shard_0_1"} == set(
        reader.read_metadata().state_dict_metadata
    )
    checkpoint.load(read, storage_reader=reader, no_dist=True)
    assert all(torch.equal(read[name], state[name]) for name in state)
    common = common_state(folder)
    assert common["iteration"] == 7
    assert common["opt_param_scheduler"] == theirs.TRAINED["opt_param_scheduler"]
    steps = [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]]
    assert steps == [6, 6]


def test_a_schedule_without_its_length_is_named(tmp_path):
    more = copy.deepcopy(theirs.TRAINED)
    del more["opt_param_scheduler"]
    theirs.write_trained(tmp_path / "c", more=more)
    from_megatron(tmp_path / "c", tmp_path / "ours")
    written = to_megatron(tmp_path / "ours", tmp_path / "back")
    assert written.folder.name == "release"
    assert "has no length of the learning-rate schedule" in str(written.state)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--target-expert-parallel-size", "0"), "must be 1 or more"),
        (
            ("--no-save-optim", "--target-expert-parallel-size", "2"),
            "has no effect with --no-save-optim",
        ),
    ],
)
def test_options_that_contradict_are_refused(words, sentence, tmp_path, capsys):
    assert convert("--to-megatron", tmp_path / "a", "--load", tmp_path, *words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--no-save-optim", "--target-expert-parallel-size=2"])
def test_options_of_another_conversion_are_refused(option, tmp_path, capsys):
    assert convert("--from-hf", tmp_path, "--save", tmp_path / "a", option) == 2
    assert "has no effect with --from-hf" in capsys.readouterr().err
