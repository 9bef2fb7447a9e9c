"""Path of a newcomer: published weights, tuned adapters, their folder, and answers of PEFT."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.models.generate import generate
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.converted_model import assert_same, contents, convert, from_hf, imported
from support.json_lines import read_json, write_lines

FLAGS = """--seq-length 128 --global-batch-size 2 --train-iters 50 --lr 1e-2 --device cpu --sft
    --no-isolation-self-test --tokenizer-type ByteTokenizer --lora-rank 4 --lora-alpha 16
    --lora-dropout 0.05"""
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN: dict[str, Any] = {
    **ATTENTION,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
NEMOTRON: dict[str, Any] = {
    **ATTENTION,
    "layers_block_type": None,
    "hybrid_override_pattern": "ME*-",
    "intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "time_step_min": 1e-12,
}
CASES = {
    "Qwen3_5": ("Qwen3_5TextConfig", QWEN, ["all-linear"]),
    # PEFT gives out_proj of this family no adapter.
    "NemotronH": (
        "NemotronHConfig",
        NEMOTRON,
        ["in_proj", "attention", "mlp", "experts", "shared-experts"],
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_tuned_adapters_answer_in_peft(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers, those of the checkpoint, and those of merged weights are the same."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from support.huggingface_models import filled

    options, sizes, targets = CASES[family]
    config = getattr(transformers, options)(vocab_size=260, hidden_size=32, **sizes)
    hf, base, lora, folder, back, merged = (
        tmp_path / name for name in ("hf", "base", "lora", "folder", "back", "merged")
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    filled(model, random.Random(5)).save_pretrained(hf)
    assert from_hf(hf, base) == 0
    lines = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(10, 50)]
    write_lines(tmp_path / "data.jsonl", lines)
    words = (base / "model.args").read_text().replace("'", "").split()
    words += [*FLAGS.split(), "--lora-target-modules", *targets]
    paths = ["--train-data-path", str(tmp_path / "data.jsonl"), "--save", str(lora)]
    assert train([*words, *paths, "--pretrained-checkpoint", str(base)]) is ExitCode.DONE

    capsys.readouterr()
    assert convert("--to-peft", folder, "--load", lora, "--hf-base", hf) == 0
    said = capsys.readouterr().out
    assert ("lora_dropout is 0" in said) == (family == "NemotronH") and "refuses" not in said
    assert (folder / "chat_template.jinja").is_file() and (folder / "tokenizer.json").is_file()
    assert 256 in read_json(folder / "generation_config.json")["eos_token_id"]
    assert not (folder / "config.json").exists()
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    assert convert("--merge", "--load", lora, "--to-hf", merged, "--hf-base", hf) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 256, length).tolist() for length in (1, 7, 40)]
    ours = generate(TrainedModel.load(lora, device="cpu").model, prompts, 24)
    for prompt, tokens in zip(prompts, ours, strict=True):
        tensor = torch.as_tensor(prompt)[None]  # without a mask, token 0 would count as padding
        given = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        for each in (theirs, whole):
            [expected] = each.generate(**given, max_new_tokens=24, do_sample=False)
            answer = expected[len(prompt) :].tolist()  # merged weights stop at the end of answers
            assert answer == list(tokens)[: len(answer)] and (len(answer) == 24) >= (each is theirs)
    with theirs.disable_adapter():
        [expected] = theirs.generate(**given, max_new_tokens=24, do_sample=False)
    assert list(tokens) != expected[len(prompt) :].tolist()

    assert convert("--from-peft", folder, "--load", base, "--save", back) == 0
    found, expected = imported(back / "step_00000000"), imported(lora / "step_00000050")
    assert_same(found, {name: expected[name] for name in found})
    assert convert("--to-peft", tmp_path / "alone", "--load", lora) == 0
    alone, beside = (
        read_json(each / "generation_config.json") for each in (tmp_path / "alone", folder)
    )
    assert set(alone["eos_token_id"]) <= set(beside["eos_token_id"])
    filled(model, random.Random(6)).save_pretrained(tmp_path / "hf2")
    assert from_hf(tmp_path / "hf2", tmp_path / "base2") == 0
    words = ["--merge", "--load", lora, "--save", tmp_path / "no"]
    assert convert(*words, "--pretrained-checkpoint", tmp_path / "base2") == 4
    assert "holds adapters of another base" in capsys.readouterr().err
    assert_same(contents(merged), contents(merged_again(tmp_path, back, hf)))


def merged_again(folder: Path, adapters: Path, hf: Path) -> Path:
    """Return the export of the checkpoint that adapters and their base make."""
    weights, directory = folder / "weights", folder / "again"
    assert convert("--merge", "--load", adapters, "--save", weights) == 0
    assert convert("--to-hf", directory, "--load", weights, "--hf-base", hf) == 0
    return directory
