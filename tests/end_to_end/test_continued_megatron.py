"""A run that a checkpoint of Megatron begins continues as the run that trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.convert.megatron.names import new_weights
from support import megatron_checkpoint as theirs
from support.json_lines import write_texts
from support.runs import TINY_MODEL, TINY_RUN, final_state, losses, run, steps

ROWS, LENGTH, DOCUMENTS = 64, 32, 4
KINDS = {"model": "", "optimizer/exp_avg": "exp_avg.", "optimizer/exp_avg_sq": "exp_avg_sq."}


def options_of(folder: Path) -> dict[str, Any]:
    """Return options of a run that trains on all documents in every step."""
    draw, data = np.random.default_rng(1), folder / "numbers.jsonl"
    rows = draw.integers(0, ROWS - 1, (DOCUMENTS, LENGTH - 1)).tolist()
    write_texts(data, (" ".join(map(str, row)) for row in rows))
    return {
        **TINY_MODEL,
        **TINY_RUN,
        "sft": None,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": ROWS,
        "train_data_path": data,
        "seq_length": LENGTH,
        "global_batch_size": DOCUMENTS,
        "train_iters": 5,
    }


def write_as_megatron(source: Path, folder: Path) -> ModelConfig:
    """Write a checkpoint of this project, with its optimizer, as Megatron does; return its model."""
    manifest = read_manifest(source)
    model = ModelConfig(**manifest.metadata["config"]["model"])
    found: dict[str, Tensor] = {}
    for weight, names in new_weights(model, torch.float32):
        for kind, theirs_kind in KINDS.items():
            name = f"{kind}/{weight.name}"
            if name in manifest.tensors:
                parts = weight.split(read_tensor(source, name, manifest))
                beginning = theirs_kind and f"optimizer.state.{theirs_kind}"
                found.update({beginning + names[part]: one for part, one in parts.items()})
    groups = [{"betas": (0.9, 0.999), "eps": 1e-8, "step": 3}]
    schedule = {
        "max_lr": 3e-3,
        "min_lr": 0.0,
        "lr_decay_style": "cosine",
        "lr_warmup_steps": 2 * DOCUMENTS,
        "lr_decay_steps": 5 * DOCUMENTS,
        "num_steps": 3 * DOCUMENTS,
        "start_wd": 0.01,
        "end_wd": 0.01,
    }
    more = {
        "iteration": 3,
        "optimizer": {"optimizer": {"param_groups": groups}},
        "opt_param_scheduler": schedule,
    }
    args = {"consumed_train_samples": 3 * DOCUMENTS, "seq_length": LENGTH, "clip_grad": 1.0}
    theirs.write(folder, found, args, parts=2, more=more)
    return model


def test_moments_and_schedule_of_megatron_continue_in_another_layout(tmp_path: Path) -> None:
    options, whole, own = options_of(tmp_path), tmp_path / "whole", tmp_path / "own"
    saved = {"save": whole / "checkpoints", "save_interval": 3, "log_jsonl": whole / "log.jsonl"}
    assert run({**options, **saved}, whole, 1).exit_code == 0
    model = write_as_megatron(whole / "checkpoints" / "step_00000003", tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", own / "checkpoints", model=model)

    schedule = {"lr": 1.0, "lr_warmup_iters": 0, "lr_decay_style": "constant"}
    again = {
        **options,
        **schedule,
        "use_checkpoint_opt_param_scheduler": True,
        "load": own / "checkpoints",
        "save": own / "checkpoints",
        "log_jsonl": own / "log.jsonl",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    first = run({**again, "train_iters": 4}, own, 2)
    assert first.exit_code == 0, first.console
    assert "samples of the imported checkpoint continue (12 samples)" in first.console
    assert "--lr 0.003 instead of 1.0" in first.console
    assert run(again, own, 2).exit_code == 0
    assert losses(own / "log.jsonl") == pytest.approx(losses(whole / "log.jsonl")[3:], rel=1e-5)
    rates = [
        [one["learning_rate"] for one in steps(folder / "log.jsonl")] for folder in (own, whole)
    ]
    assert rates[0] == pytest.approx(rates[1][3:], rel=1e-12)
    found, about = final_state(own / "checkpoints", 5)
    expected, _ = final_state(whole / "checkpoints", 5)
    assert about["progress"]["plan_samples"] == 12 and about["progress"]["consumed_packs"] == 8
    for name in (name for name in expected if not name.startswith("rng/")):
        table = name.endswith(("embedding.weight", "output.weight"))
        rows = ROWS if table else len(expected[name])  # the rest is padding
        close = torch.allclose(found[name][:rows], expected[name][:rows], rtol=1e-3, atol=2e-5)
        assert close, name
