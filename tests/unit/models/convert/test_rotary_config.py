"""Rotary options of config.json in old, new and contradictory files, as transformers reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.models.convert.huggingface_config import model_of
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases
from support.converted_model import FAMILIES as SMALL
from support.converted_model import change_fields, contents, opened, write_tensors
from support.json_lines import read_json

LLAMA = {key: value for key, value in SMALL["llama"].items() if not key.startswith("rope_")}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THETA = {"rope_theta": 5e5}
SPELLINGS: dict[str, tuple[dict[str, Any], float, bool]] = {
    "a stale base beside the nested one": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", **THETA}},
        5e5,
        False,
    ),
    "scaling of type default": ({**THETA, "rope_scaling": {"type": "default"}}, 5e5, False),
    "the same with the newer key": (
        {"rope_scaling": {"rope_type": "default", **THETA}},
        5e5,
        False,
    ),
    "an empty scaling": ({**THETA, "rope_scaling": {}}, 5e5, False),
    "no type": ({"rope_parameters": THETA}, 5e5, False),
    "scaled in both forms": (
        {
            **THETA,
            "rope_scaling": {"type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", **LLAMA3, **THETA},
        },
        5e5,
        True,
    ),
    "the default base in one of two forms": (
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e4}},
        1e4,
        False,
    ),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_positions_are_those_of_transformers(case):
    fields, base, scaled = SPELLINGS[case]
    model = model_of({**LLAMA, **fields}, Path())[1]
    assert (model.rotary_base, model.use_rope_scaling) == (base, scaled)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig.from_dict(json.loads(json.dumps({**LLAMA, **fields})))
    assert theirs.rope_parameters["rope_theta"] == base
    assert (theirs.rope_parameters["rope_type"] == "llama3") is scaled


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        ({"type": "default"}, {"rope_type": "default", **THETA}),
        ({"type": "default"}, {"rope_type": "llama3", **LLAMA3}),
        ({"type": "llama3", **LLAMA3}, {"rope_type": "llama3", **LLAMA3, "factor": 4.0}),
    ],
)
def test_two_forms_that_differ_are_refused_with_both_values(scaling, parameters):
    """transformers takes rope_scaling, and other libraries rope_parameters."""
    fields = {**LLAMA, "rope_scaling": scaling, "rope_parameters": parameters}
    with pytest.raises(CheckpointError) as error:
        model_of(fields, Path())
    assert "rope_scaling is {'type'" in str(error.value)
    assert "which contradicts rope_parameters {'rope_type'" in str(error.value)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_refusal_names_the_key_of_the_file(key):
    scaling = {name: value for name, value in LLAMA3.items() if name != "factor"}
    fields = {**LLAMA, key: {"rope_type": "llama3", **scaling, "beta": 1.0}}
    with pytest.raises(CheckpointError) as error:
        model_of(fields, Path("config.json"))
    assert f"config.json: {key}.factor is missing; {key}.beta is 1.0, but" in str(error.value)


def test_rotary_options_of_a_granite_model_without_positions_have_no_effect():
    transformers = pytest.importorskip("transformers")
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        mamba_n_heads=4,
        layer_types=["attention"],
        num_local_experts=0,
    )
    fields = json.loads(config.to_json_string())
    fields["rope_parameters"] = {"rope_type": "llama3", **THETA, **LLAMA3}
    assert model_of(fields, Path())[1].position_embedding_type == "none"
    with pytest.raises(CheckpointError, match="rope_type is 'llama3', but only 'default'"):
        model_of({**fields, "position_embedding_type": "rope"}, Path())


OLMO = {
    "the newer key": ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
    "the older key": ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
    "no positions, by the older key": (
        {"rope_scaling": {"rope_type": "default", "rope_theta": None}},
        None,
    ),
    "the older key beside null": (
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}, "rope_parameters": None},
        5e5,
    ),
}


@pytest.mark.parametrize("case", OLMO)
def test_positions_of_olmo_hybrid_are_those_of_transformers(case):
    changes, base = OLMO[case]
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    fields |= {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
    fields |= {"linear_allow_neg_eigval": True, "model_type": "olmo_hybrid", **changes}
    model = model_of(fields, Path())[1]
    assert model.position_embedding_type == ("none" if base is None else "rope")
    assert base is None or model.rotary_base == base
    transformers = pytest.importorskip("transformers")
    theirs = transformers.OlmoHybridConfig.from_dict(json.loads(json.dumps(fields)))
    assert theirs.rope_parameters["rope_theta"] == base


OLD = {
    "a stale base": {"rope_theta": 100.0},
    "another name of the activation": {"hidden_act": "swish"},
    "scaling of type default": {
        "rope_scaling": {"type": "default", **THETA},
        "rope_parameters": None,
    },
    "buffers of positions": {},
}


@pytest.mark.parametrize("case", OLD)
def test_old_files_have_the_logits_of_transformers(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    from support.huggingface_models import FAMILIES

    FAMILIES["llama"](random.Random(5), 0).save_pretrained(tmp_path)
    change_fields(tmp_path, **OLD[case])
    if case == "buffers of positions":
        buffers = {
            f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(2)
            for layer in range(read_json(tmp_path / "config.json")["num_hidden_layers"])
        }
        write_tensors(tmp_path, {**contents(tmp_path), **buffers})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, weights = opened(tmp_path)
    ours = HybridModel(model, vocab_size=model.vocab_size, max_positions=64)
    ours.load_state_dict(weights)
    documents = cases.make_documents([23])
    batch = cases.make_pack(documents, tail=0, spare=0)
    with torch.no_grad():
        expected = theirs(input_ids=torch.as_tensor(documents[0][0])[None]).logits[0]
        found = ours.logits(batch.tokens, batch.packed)[batch.packed.seq_idx[0] == 0]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
