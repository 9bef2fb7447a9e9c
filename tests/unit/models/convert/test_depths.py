"""Weights of multi-token prediction in Hugging Face files: names, values and numbers of depths."""

import json
from pathlib import Path

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.cli.main import main
from megatron_packed.models.convert.huggingface_config import model_of
from megatron_packed.models.convert.huggingface_files import ModelFiles
from megatron_packed.models.convert.import_huggingface import open_model
from support.converted_model import (
    FAMILIES,
    assert_same,
    contents,
    from_hf,
    imported,
    to_hf,
    write_model,
)

EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_latent_size": 12}
NEMOTRON = {
    "num_nextn_predict_layers": 2,
    "mtp_use_repeated_layer": False,
    "mtp_layers_block_type": ["full_attention", "moe"],
    "keep_mtp_spec_in_bf16": True,
    **EXPERTS,
}
QWEN = {"num_experts": 2, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
"""Options with two experts, for short tables."""


def block(number, first, last):
    """Return the keys of layers ``number`` (attention) and ``number + 1`` (experts)."""
    star, e = f"mtp.layers.{number}", f"mtp.layers.{number + 1}"
    at, experts = f"layers.{first}", f"layers.{first + 1}.mixer"
    return {
        f"{star}.enorm.weight": f"mtp.{last}.enorm.weight",
        f"{star}.hnorm.weight": f"mtp.{last}.hnorm.weight",
        f"{star}.eh_proj.weight": f"mtp.{last}.eh_proj.weight",
        f"{star}.norm.weight": f"{at}.norm.weight",
        f"{star}.mixer.q_proj.weight": f"{at}.mixer.qkv.weight",
        f"{star}.mixer.k_proj.weight": f"{at}.mixer.qkv.weight",
        f"{star}.mixer.v_proj.weight": f"{at}.mixer.qkv.weight",
        f"{star}.mixer.o_proj.weight": f"{at}.mixer.proj.weight",
        f"{e}.norm.weight": f"layers.{first + 1}.norm.weight",
        f"{e}.mixer.gate.weight": f"{experts}.router.weight",
        f"{e}.mixer.gate.e_score_correction_bias": f"{experts}.router.expert_bias",
        f"{e}.mixer.experts.0.up_proj.weight": f"{experts}.experts.fc1",
        f"{e}.mixer.experts.1.up_proj.weight": f"{experts}.experts.fc1",
        f"{e}.mixer.experts.0.down_proj.weight": f"{experts}.experts.fc2",
        f"{e}.mixer.experts.1.down_proj.weight": f"{experts}.experts.fc2",
        f"{e}.mixer.shared_experts.up_proj.weight": f"{experts}.shared_expert.fc1.weight",
        f"{e}.mixer.shared_experts.down_proj.weight": f"{experts}.shared_expert.fc2.weight",
        f"{e}.mixer.fc1_latent_proj.weight": f"{experts}.fc1_latent_proj.weight",
        f"{e}.mixer.fc2_latent_proj.weight": f"{experts}.fc2_latent_proj.weight",
        f"{e}.final_layernorm.weight": f"mtp.{last}.final_norm.weight",
    }


def nemotron_table(layers):
    """Return the keys of two depths, by the number of layers of the main model."""
    return {**block(0, layers, 0), **block(2, layers + 2, 1)}


def qwen_table(layers):
    one, at, experts = "mtp.layers.0", f"layers.{layers}", f"layers.{layers + 1}.mixer"
    shared = f"{experts}.shared_expert"
    found = {
        "mtp.fc.weight": "mtp.0.eh_proj.weight",
        "mtp.pre_fc_norm_embedding.weight": "mtp.0.enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "mtp.0.hnorm.weight",
        "mtp.norm.weight": "mtp.0.final_norm.weight",
        f"{one}.input_layernorm.weight": f"{at}.norm.weight",
        f"{one}.post_attention_layernorm.weight": f"layers.{layers + 1}.norm.weight",
        f"{one}.self_attn.o_proj.weight": f"{at}.mixer.proj.weight",
        f"{one}.self_attn.q_norm.weight": f"{at}.mixer.q_norm.weight",
        f"{one}.self_attn.k_norm.weight": f"{at}.mixer.k_norm.weight",
        f"{one}.mlp.gate.weight": f"{experts}.router.weight",
        f"{one}.mlp.shared_expert_gate.weight": f"{experts}.shared_expert_gate.weight",
        f"{one}.mlp.shared_expert.gate_proj.weight": f"{shared}.fc1.weight",
        f"{one}.mlp.shared_expert.up_proj.weight": f"{shared}.fc1.weight",
        f"{one}.mlp.shared_expert.down_proj.weight": f"{shared}.fc2.weight",
    }
    found |= {f"{one}.self_attn.{part}_proj.weight": f"{at}.mixer.qkv.weight" for part in "qkv"}
    for expert in "01":
        for part, ours in (("gate", "fc1"), ("up", "fc1"), ("down", "fc2")):
            key = f"{one}.mlp.experts.{expert}.{part}_proj.weight"
            found[key] = f"{experts}.experts.{ours}"
    return found


CASES = {
    "nemotron_h": (NEMOTRON, 2, "/*E/*E", nemotron_table),
    "qwen3_5_moe_text": (QWEN, 1, "/*E", qwen_table),
}


def converted(folder, *more):
    """Import ``folder/hf``, and return the exit code."""
    return from_hf(folder / "hf", folder / "ours", *more)


@pytest.mark.parametrize("family", CASES)
def test_each_key_is_in_the_table_and_comes_back_to_the_bit(family, tmp_path, capsys):
    changes, depths, parts, table = CASES[family]
    tensors = write_model(tmp_path / "hf", family, depths=depths, **changes)
    model, _, weights = open_model(tmp_path / "hf", bf16=False, depths=depths)
    assert model.hybrid_layer_pattern.endswith(parts) and not model.mtp_use_repeated_layer
    wanted = table(model.num_layers)
    found = {
        part.name: weight.name
        for weight in weights.values()
        for part in weight.parts
        if part.name.startswith("mtp.")
    }
    assert found == wanted and wanted.keys() == {key for key in tensors if key.startswith("mtp.")}
    assert converted(tmp_path, "--mtp-depths", depths) == 0
    assert f"--hybrid-layer-pattern '{model.hybrid_layer_pattern}'" in capsys.readouterr().out
    ours = imported(tmp_path / "ours" / "step_00000000")
    whole = {name for name in wanted.values() if list(wanted.values()).count(name) == 1}
    for key, name in wanted.items():
        assert name not in whole or torch.equal(ours[name], tensors[key]), key
    config = tmp_path / "hf" / "config.json"
    assert to_hf(tmp_path / "back", tmp_path / "ours", "--hf-config", config) == 0
    assert_same(contents(tmp_path / "back"), tensors)


@pytest.mark.parametrize("family", CASES)
def test_without_the_option_the_tensors_are_passed_over(family, tmp_path, capsys):
    changes, depths, _, table = CASES[family]
    tensors = write_model(tmp_path / "hf", family, depths=depths, **changes)
    assert converted(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"Passed over, because they are not part of the text model: {len(table(1))}" in said
    assert "--mtp-depths N converts multi-token prediction" in said
    assert not any(n.startswith("mtp.") for n in imported(tmp_path / "ours" / "step_00000000"))
    assert to_hf(tmp_path / "back", tmp_path / "ours", "--hf-base", tmp_path / "hf") == 0
    assert ModelFiles(tmp_path / "back").shapes.keys() == tensors.keys()


@pytest.mark.parametrize("family", CASES)
def test_several_depths_share_the_layers_of_files_with_one(family, tmp_path):
    changes, *_ = CASES[family]
    one = {**changes, "num_nextn_predict_layers": 1} if family == "nemotron_h" else changes
    one.pop("mtp_use_repeated_layer", None)
    tensors = write_model(tmp_path / "hf", family, depths=1, **one)
    assert converted(tmp_path, "--mtp-depths", "3") == 0
    flags = (tmp_path / "ours" / "model.args").read_text()
    assert "/*E/*E/*E'" in flags and "--mtp-use-repeated-layer" in flags
    # Nemotron 3 weights this loss by 0.3 if config.json does not tell.
    assert ("--mtp-loss-scaling-factor 0.3" in flags) == (family == "nemotron_h")
    config = tmp_path / "hf" / "config.json"
    assert to_hf(tmp_path / "back", tmp_path / "ours", "--hf-config", config) == 0
    assert ModelFiles(tmp_path / "back").shapes.keys() == tensors.keys()


def test_both_spellings_of_the_layers_of_a_depth_are_read():
    fields = {**FAMILIES["nemotron_h"], "num_nextn_predict_layers": 1}
    for spelling in (
        {"mtp_hybrid_override_pattern": "*E"},
        {"mtp_layers_block_type": ["attention", "moe"]},
        {"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["full_attention", "moe"]},
    ):
        model = model_of({**fields, **spelling}, Path(), depths=2)[1]
        assert model.hybrid_layer_pattern.endswith("/*E/*E") and model.mtp_use_repeated_layer
        assert model_of({**fields, **spelling}, Path())[1].mtp_depths == 0


@pytest.mark.parametrize(
    ("family", "changes", "depths", "sentence"),
    [
        ("llama", {}, 1, "llama has no multi-token prediction"),
        ("nemotron_h", {}, 1, "1 depths are requested, but config.json has no such depth"),
        ("nemotron_h", NEMOTRON, 3, "3 depths are requested, but config.json has 2 depths"),
        ("nemotron_h", {**NEMOTRON, "mtp_layers_block_type": ["x"]}, 2, "the entry 'x'"),
        ("nemotron_h", {**NEMOTRON, "mtp_use_repeated_layer": 1}, 2, "must be true or false"),
        ("qwen3_5_moe_text", {"mtp_num_hidden_layers": 2}, 1, "only 1 is supported"),
        ("qwen3_5_moe_text", {"mtp_use_dedicated_embeddings": True}, 1, "is not supported"),
    ],
)
def test_other_depths_are_refused(family, changes, depths, sentence):
    with pytest.raises(CheckpointError) as refused:
        model_of({**FAMILIES[family], **changes}, Path(), depths=depths)
    assert sentence in str(refused.value)


def test_the_number_of_depths_is_of_an_import_only(tmp_path, capsys):
    fields = json.dumps(FAMILIES["nemotron_h"])
    (tmp_path / "config.json").write_text(fields)
    words = ["convert", "--to-hf", str(tmp_path / "n"), "--load", "x", "--mtp-depths", "1"]
    assert main(words) == 2
    assert "--mtp-depths has no effect with --to-hf" in capsys.readouterr().err
