"""Fine-tuning of converted weights with two processes, and use of the result by transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.models.convert.huggingface_files import ModelFiles
from megatron_packed.models.generate import generate
from megatron_packed.training.trained_model import TrainedModel
from support.converted_model import from_hf, to_hf
from support.runs import TINY_RUN, Data, flags_of, losses, run, trained

SIZES: dict[str, Any] = {
    "vocab_size": ByteTokenizer.vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"num_position_embeddings": 16, "out_hidden_size": 32}
NEW_TOKENS = 24


def test_a_tuned_qwen3_5_continues_texts_as_in_transformers(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export of a run with two tensor-parallel processes has its tokens and its vision."""
    transformers = pytest.importorskip("transformers")
    from support.huggingface_models import filled

    hf, weights, folder, back = (tmp_path / name for name in ("hf", "weights", "run", "back"))
    config = transformers.Qwen3_5Config(text_config=SIZES, vision_config=VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    filled(model, random.Random(5)).save_pretrained(hf)
    assert from_hf(hf, weights) == 0
    options = {**TINY_RUN, **flags_of(weights / "model.args"), "train_iters": 6}
    options |= {"train_data_path": data.train, "data_cache_path": data.folder / "cache"}
    options |= {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    phase = run({**options, "load": weights, "begin_phase": "a"}, folder, 2)
    assert phase.exit_code == 4 and "holds converted weights, which no run has" in phase.console
    trained(folder, 2, options, pretrained_checkpoint=weights)
    first, *_, last = losses(folder / "log.jsonl")
    assert last < first

    assert to_hf(back, folder / "checkpoints", "--hf-base", hf) == 0
    assert "tensors model.visual.*" in capsys.readouterr().out
    before, after = ModelFiles(hf), ModelFiles(back)
    same = {name for name in before.places if torch.equal(before.read(name), after.read(name))}
    assert same == {name for name in before.places if name.startswith("model.visual.")}

    theirs = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(back).eval()
    ours = TrainedModel.load(folder / "checkpoints", device="cpu").model
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 256, length).tolist() for length in (1, 7, 40)]
    found = generate(ours, prompts, NEW_TOKENS)
    for prompt, tokens in zip(prompts, found, strict=True):
        given = torch.as_tensor(prompt)[None]
        [expected] = theirs.generate(given, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert list(tokens) == expected[len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name, template, expected",
    [
        ("qwen3_5", "file", "Unlike the original: the chat template is that of the training."),
        ("granite", "own", "out: written\n"),
    ],
)
def test_a_tuned_model_answers_as_in_transformers(
    name: str, template: str, expected: str, tmp_path: Path
) -> None:
    """transformers prompts it as it was trained, gives its answers, and stops where it stops."""
    pytest.importorskip("transformers")
    from support.served_models import check

    found = check(name, template, tmp_path)
    assert found.ours == found.theirs and found.stopped
    assert len(set(map(tuple, found.ours))) == len(found.ours)
    assert expected in found.said and ("Unlike" in found.said) == (template != "own")
