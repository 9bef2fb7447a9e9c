"""Checkpoints of runs with ``--lora-rank``: they hold adapters alone, and name their base."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.checkpoint.load import newest_checkpoint
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.training.from_python import train

MODEL = "--hybrid-layer-pattern M*-G --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2"
MODEL += " --mamba-head-dim 8 --mamba-num-groups 1 --mamba-state-dim 8 --linear-num-key-heads 1"
MODEL += " --linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8 --swiglu"
MODEL += " --no-isolation-self-test --seq-length 64 --vocab-size 300 --mock-data --lr 1e-2"
MODEL += " --tokenizer-type ByteTokenizer --device cpu --global-batch-size 2 --bf16"
LORA = ["--lora-rank", "2", "--lora-modules-to-save", "output.*"]


def run(folder: Path, *flags: str, **options: Any) -> ExitCode:
    """Train with checkpoints in ``folder``, and resume what is there."""
    return train([*MODEL.split(), "--save", str(folder), *flags], **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, and adapters of it after 4 steps, saved at steps 2 and 4."""
    root = tmp_path_factory.mktemp("made")
    assert run(root / "base", train_iters=1) is ExitCode.DONE
    start = ["--load", str(root / "base"), "--finetune"]
    assert run(root / "lora", *start, *LORA, train_iters=4, save_interval=2) is ExitCode.DONE
    return root


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    names = read_manifest(checkpoint).tensors
    return {name: read_tensor(checkpoint, name) for name in names}


def test_a_checkpoint_holds_what_is_trained(made: Path) -> None:
    manifest = read_manifest(newest_checkpoint(made / "lora"))
    model = {n.removeprefix("model/") for n in manifest.tensors if n.startswith("model/")}
    print(sorted(model))
    assert {n for n in model if ".lora." not in n} <= {"output.weight", "embedding.weight"}
    base = manifest.metadata["adapters"]
    assert base["path"] == str(newest_checkpoint(made / "base")) and len(base["hash"]) == 32
