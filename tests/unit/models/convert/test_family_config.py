"""config.json as in the files of the hub: what each family reads, and what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.models.convert import huggingface_config
from megatron_packed.models.convert.families.field_types import FIELD_TYPES, NULLABLE
from megatron_packed.models.convert.families.registry import FAMILIES
from megatron_packed.models.convert.huggingface_config import model_of
from support.converted_model import FIELDS as NEMOTRON

LIBRARY = {"architectures": ["A"], "torch_dtype": "bfloat16", "use_cache": True, "eos_token_id": 2}
MISSING = object()
"""Value of a key that is removed."""


def changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**fields, **changes}
    return {key: value for key, value in both.items() if value is not MISSING}


ATTENTION = {
    **LIBRARY,
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
DELTA = {
    "attention_bias": False,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
}
QWEN3_5 = {
    **ATTENTION,
    **DELTA,
    "model_type": "qwen3_5_text",
    "intermediate_size": 96,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "full_attention_interval": 2,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 24,
}
QWEN3_5_MOE = {
    **{key: value for key, value in QWEN3_5.items() if key != "intermediate_size"},
    **EXPERTS,
    "model_type": "qwen3_5_moe_text",
}
VISION = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_config": {"depth": 27},
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0",
}
QWEN = {
    "hidden_size": 64,
    "vocab_size": 100,
    "norm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "add_bias_linear": False,
    "swiglu": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "rotary_base": 10_000_000,
    "rotary_percent": 0.25,
    "position_embedding_type": "rope",
    "attention_output_gate": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
}
QWEN_EXPERTS = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
MAMBA = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
}
OUR_MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 1,
    "mamba_state_dim": 16,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}
NO_SCALING = {"use_rope_scaling": False}
NO_WINDOW = {"window_size": None, "window_attn_skip_freq": None}
LLAMA_KIN = {
    "hidden_size": 64,
    "vocab_size": 100,
    "norm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "position_embedding_type": "rope",
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "untie_embeddings_and_output_weights": True,
}
GRANITE = {
    **ATTENTION,
    **MAMBA,
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "logits_scaling": 16,
    "init_method": "mup",
    "intermediate_size": 16,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "normalization_function": "rmsnorm",
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 24,
}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3.5": (QWEN3_5, {**QWEN, "hybrid_layer_pattern": "G-*-G-*-", "ffn_hidden_size": 96}),
    "Qwen3.5 MoE": (
        QWEN3_5_MOE,
        {**QWEN, **QWEN_EXPERTS, "hybrid_layer_pattern": "GE*EGE*E"},
    ),
    "Qwen3.5 with vision, tied by the outer key": (
        {**VISION, "model_type": "qwen3_5", "text_config": QWEN3_5},
        {
            **QWEN,
            "hybrid_layer_pattern": "G-*-G-*-",
            "ffn_hidden_size": 96,
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "Qwen3.5 MoE with vision": (
        {**VISION, "model_type": "qwen3_5_moe", "text_config": QWEN3_5_MOE},
        {
            **QWEN,
            **QWEN_EXPERTS,
            "hybrid_layer_pattern": "GE*EGE*E",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "Qwen3-Next, with old rotary keys and the default interval": (
        {
            **ATTENTION,
            **DELTA,
            **EXPERTS,
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "intermediate_size": 96,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_scaling": None,
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        },
        {
            **QWEN,
            **QWEN_EXPERTS,
            "hybrid_layer_pattern": "GEGEGE*E",
            "moe_router_pre_softmax": False,
        },
    ),
    "OLMo Hybrid without positions": (
        {
            **ATTENTION,
            "model_type": "olmo_hybrid",
            "attention_bias": False,
            "intermediate_size": 96,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_allow_neg_eigval": True,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": None},
        },
        {
            "hybrid_layer_pattern": "G-G-G-*-",
            "hidden_size": 64,
            "vocab_size": 100,
            "norm_epsilon": 1e-6,
            "linear_norm_epsilon": 1e-5,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "ffn_hidden_size": 96,
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
            "attention_norm_placement": "output",
            "position_embedding_type": "none",
            "untie_embeddings_and_output_weights": True,
        },
    ),
    "Llama 3.2, with old rotary keys": (
        {
            **ATTENTION,
            "model_type": "llama",
            "attention_bias": False,
            "intermediate_size": 96,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        {
            **LLAMA_KIN,
            "hybrid_layer_pattern": "*-*-*-*-",
            "ffn_hidden_size": 96,
            "rotary_base": 500000.0,
            "use_rope_scaling": True,
            "rope_scaling_factor": 32.0,
            "rope_scaling_low_freq_factor": 1.0,
            "rope_scaling_high_freq_factor": 4.0,
            "rope_scaling_original_max_positions": 8192,
        },
    ),
    "Mistral 7B v0.1": (
        {
            **ATTENTION,
            "model_type": "mistral",
            "intermediate_size": 96,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
        {
            **LLAMA_KIN,
            **NO_SCALING,
            "hybrid_layer_pattern": "*-*-*-*-",
            "ffn_hidden_size": 96,
            "rotary_base": 10000.0,
            "window_size": "4095,0",
            "window_attn_skip_freq": None,
        },
    ),
    "Qwen2 with a window in its last layer": (
        {
            **ATTENTION,
            "model_type": "qwen2",
            "intermediate_size": 96,
            "max_window_layers": 3,
            "rope_theta": 1000000.0,
            "sliding_window": 128,
            "use_sliding_window": True,
            "use_mrope": False,
        },
        {
            **LLAMA_KIN,
            **NO_SCALING,
            "hybrid_layer_pattern": "*-*-*-*-",
            "ffn_hidden_size": 96,
            "rotary_base": 1000000.0,
            "add_qkv_bias": True,
            "window_size": "127,0",
            "window_attn_skip_freq": "[0]*6+[1]*2",
        },
    ),
    "Qwen3 whose window is off": (
        {
            **ATTENTION,
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 16,
            "intermediate_size": 96,
            "max_window_layers": 2,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {
            **LLAMA_KIN,
            **NO_SCALING,
            **NO_WINDOW,
            "hybrid_layer_pattern": "*-*-*-*-",
            "ffn_hidden_size": 96,
            "rotary_base": 1000000,
            "qk_layernorm": True,
        },
    ),
    "Qwen3-MoE": (
        {
            **ATTENTION,
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 16,
            "intermediate_size": 96,
            "max_window_layers": 4,
            "mlp_only_layers": [],
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {
            **LLAMA_KIN,
            **NO_SCALING,
            **NO_WINDOW,
            "hybrid_layer_pattern": "*E*E*E*E",
            "rotary_base": 1000000.0,
            "qk_layernorm": True,
            "num_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 16,
            "moe_router_pre_softmax": False,
        },
    ),
    "Mamba-2 with a chunk size that is no power of two": (
        {
            **LIBRARY,
            "model_type": "mamba2",
            "chunk_size": 100,
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "hidden_size": 64,
            "initializer_range": 0.1,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 1,
            "norm_before_gate": True,
            "num_heads": 8,
            "num_hidden_layers": 3,
            "rescale_prenorm_residual": False,
            "residual_in_fp32": True,
            "rms_norm": True,
            "state_size": 16,
            "tie_word_embeddings": True,
            "time_step_floor": 0.0001,
            "time_step_limit": [0.0, float("inf")],
            "time_step_max": 0.1,
            "time_step_min": 0.001,
            "time_step_rank": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 100,
        },
        {
            **OUR_MAMBA,
            "mamba_chunk_size": 128,
            "mamba_norm_epsilon": 1e-5,
            "hybrid_layer_pattern": "MMM",
            "hidden_size": 64,
            "vocab_size": 100,
            "norm_epsilon": 1e-5,
            "normalization": "RMSNorm",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "Bamba": (
        {
            **ATTENTION,
            **MAMBA,
            "model_type": "bamba",
            "attention_bias": False,
            "attn_layer_indices": [2],
            "attn_rotary_emb": 8,
            "intermediate_size": 96,
            "mlp_bias": False,
            "num_logits_to_keep": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
        },
        {
            **LLAMA_KIN,
            **OUR_MAMBA,
            "hybrid_layer_pattern": "M-M-*-M-",
            "ffn_hidden_size": 96,
            "mamba_norm_epsilon": 1e-6,
            "rotary_base": 10000.0,
            "rotary_percent": 0.5,
        },
    ),
    "Granite 4.0-H": (
        GRANITE,
        {
            **LLAMA_KIN,
            **OUR_MAMBA,
            "hybrid_layer_pattern": "MEME*EME",
            "position_embedding_type": "none",
            "mamba_norm_epsilon": 1e-6,
            "num_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "softmax_scale": 0.0078125,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "logits_scaling": 16,
        },
    ),
    "Granite 4.0-H without experts, with factors of 1": (
        {
            **GRANITE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
        },
        {
            **LLAMA_KIN,
            **OUR_MAMBA,
            "hybrid_layer_pattern": "M-M-*-M-",
            "ffn_hidden_size": 24,
            "mamba_norm_epsilon": 1e-6,
            "rotary_base": 10000,
            "softmax_scale": None,
            **dict.fromkeys(
                ("embedding_multiplier", "residual_multiplier", "logits_scaling"), None
            ),
        },
    ),
}


@pytest.fixture
def values(monkeypatch):
    """Return a function that gives the fields of `ModelConfig` before their rules are checked."""
    monkeypatch.setattr(huggingface_config, "ModelConfig", dict)
    return lambda fields: model_of(fields, Path("config.json"))[1]


@pytest.mark.parametrize("name", READ)
def test_a_config_of_the_hub(name, values):
    fields, expected = READ[name]
    assert values(fields) == expected


def test_every_family_has_a_config():
    tested = {fields["model_type"] for fields, _ in READ.values()}
    assert tested | {"nemotron_h", "mixtral"} == FAMILIES.keys()


REFUSED = {
    "another gate": ("Qwen3.5", {"output_gate_type": "sigmoid"}, "only silu and swish are"),
    "no gate": ("Qwen3.5", {"attn_output_gate": False}, "attn_output_gate is False, but only True"),
    "a bias": ("Qwen3.5", {"attention_bias": True}, "attention_bias is True, but only False"),
    "a word": (
        "Qwen3.5",
        {"layer_types": ["full_attention", "conv", "conv", "conv"]},
        "layer_types has the entry 'conv', but only linear_attention, full_attention, attention",
    ),
    "a short list": (
        "Qwen3.5",
        {"layer_types": ["full_attention"]},
        "layer_types is ['full_attention']; it must list the 4 layers of num_hidden_layers",
    ),
    "other positions": (
        "Qwen3.5",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "rope_type is 'yarn', but only 'default' is supported",
    ),
    "layers without experts": (
        "Qwen3.5 MoE",
        {"mlp_only_layers": [1]},
        "mlp_only_layers is [1], but only [] is supported",
    ),
    "every second layer": (
        "Qwen3-MoE",
        {"decoder_sparse_step": 2},
        "decoder_sparse_step is 2, but only 1 is supported",
    ),
    "unknown positions": (
        "OLMo Hybrid without positions",
        {"rope_parameters": None},
        "rope_parameters is null, which some libraries read",
    ),
    "other scaled positions": (
        "Llama 3.2, with old rotary keys",
        {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn"}},
        "rope_type is 'yarn', but only 'default' and 'llama3' are supported",
    ),
    "a window that is off": (
        "Qwen3 whose window is off",
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        "layer_types has the entry 'sliding_attention', but use_sliding_window is False",
    ),
    "a fraction of channels": (
        "Bamba",
        {"partial_rotary_factor": 0.25},
        "partial_rotary_factor is 0.25, but only 0.5 is supported",
    ),
    "a limit of steps": (
        "Bamba",
        {"time_step_limit": [0.1, 1.0]},
        "time_step_limit is [0.1, 1.0], but only [0.0, inf] is supported",
    ),
    "a kind of positions": (
        "Granite 4.0-H",
        {"position_embedding_type": "alibi"},
        "position_embedding_type is 'alibi', but only 'rope' and 'nope' are supported",
    ),
}


def refusal(fields: dict[str, Any]) -> str:
    """Return the error of a config.json that is refused."""
    with pytest.raises(CheckpointError) as error:
        model_of(fields, Path("config.json"))
    return str(error.value)


WRONG = (None, "false", "4", True, 2.5, [], [None], [["a"]], {}, {"a": 1}, 10**30, 1e308)
"""Values of which each has a wrong type for most keys."""


@pytest.mark.parametrize("name", READ)
def test_a_value_of_a_wrong_type_is_refused_with_its_key(name):
    """A key that decides what the model computes is read with its type, or it is named."""
    fields = READ[name][0]
    family = FAMILIES[fields["model_type"]]
    text = fields.get("text_config", fields)
    for key in family.deciding_keys & text.keys() & FIELD_TYPES.keys():
        for value in WRONG:
            # A key in ``no_effect`` decides only if the pattern has its layers.
            nullable = key in NULLABLE or key in family.no_effect.split()
            if FIELD_TYPES[key].holds(value) or (value is None and nullable):
                continue
            changed = {**text, key: value}
            if text is not fields:
                changed = {**fields, "text_config": changed}
            assert f"{key} is " in refusal(changed), (key, value)


# Nulls and truth are no defaults.
REFUSED |= {
    "a switch in quotation marks": (
        "Qwen2 with a window in its last layer",
        {"use_sliding_window": "false"},
        "use_sliding_window is 'false'; it must be true or false",
    ),
    "no first layer with a window": (
        "Qwen2 with a window in its last layer",
        {"max_window_layers": None},
        "max_window_layers is null; it must be a whole number",
    ),
    "no normalisation of scores": (
        "Qwen3-MoE",
        {"norm_topk_prob": None},
        "norm_topk_prob is null; it must be true or false",
    ),
    "no multiplier": (
        "Granite 4.0-H",
        {"embedding_multiplier": None},
        "embedding_multiplier is null; it must be a number",
    ),
    "no base of the positions": (
        "Mistral 7B v0.1",
        {"rope_theta": None},
        "rope_theta is null, but it must have a value",
    ),
    "no experts": (
        "Granite 4.0-H",
        {"num_local_experts": None},
        "num_local_experts is null; it must be a whole number",
    ),
    "a window in quotation marks, in a file with vision": (
        "Qwen3.5 with vision, tied by the outer key",
        {"text_config": {**QWEN3_5, "full_attention_interval": "2"}},
        "text_config.full_attention_interval is '2'; it must be a whole number",
    ),
    "a size out of bounds": (
        "Qwen3-MoE",
        {"num_experts_per_tok": -1},
        "invalid sizes (num_experts_per_tok): --moe-router-topk -1: must be >= 1",
    ),
    "the other name of a size": (
        "Qwen3-MoE",
        {"num_experts": None, "num_local_experts": None},
        "num_local_experts is null, but it must have a value",
    ),
    "a base out of bounds": (
        "OLMo Hybrid without positions",
        {"rope_parameters": {"rope_theta": 0}},
        "invalid sizes (rope_theta): --rotary-base 0.0: must be > 1",
    ),
    "a negative window": (
        "Mistral 7B v0.1",
        {"sliding_window": -7},
        "invalid sizes (sliding_window): --window-size -7: ",
    ),
    "no heads": (
        "Mistral 7B v0.1",
        {"num_attention_heads": 0},
        "invalid sizes (num_attention_heads",
    ),
    "two sizes that do not fit": (
        "OLMo Hybrid without positions",
        {"linear_num_key_heads": 3},
        "invalid sizes (linear_num_key_heads, linear_num_value_heads): ",
    ),
    "a division of loaded weights": (
        "Mamba-2 with a chunk size that is no power of two",
        {"rescale_prenorm_residual": True},
        "rescale_prenorm_residual is True, with which transformers divides the loaded weights",
    ),
    "a list for fewer layers": (
        "Qwen3 whose window is off",
        {"layer_types": ["full_attention"]},
        "layer_types is ['full_attention']; it must list the 4 layers of num_hidden_layers",
    ),
}


def test_two_problems_of_sizes_are_one_line():
    fields = {**READ["Granite 4.0-H"][0], "rms_norm_eps": 0}
    said = refusal(fields)
    assert said.startswith("config.json: invalid sizes (rms_norm_eps): --norm-epsilon 0.0: ")
    assert "; --mamba-norm-epsilon 0.0: " in said and "\n" not in said


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_has_the_type_of_transformers(name):
    """Each key that a family reads has a type, and null is read only where it has a meaning."""
    family = FAMILIES[name]
    single = {key for keys in family.must_be.values() for key in keys} | family.repeats.keys()
    bare = {key.rpartition(".")[2] for key in family.deciding_keys - single}
    assert bare <= FIELD_TYPES.keys()
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name)
    words = {
        "a whole number": "int",
        "a number": "float",
        "true or false": "bool",
        "a text": "str",
        "a list of texts": "list[str]",
        "a list of whole numbers": "list[int]",
    }
    for about in dataclasses.fields(config):
        if about.name in bare and about.name not in ("rope_parameters", "text_config"):
            theirs = str(getattr(about.type, "__name__", about.type))
            assert words.get(FIELD_TYPES[about.name].said, "str") in theirs, about.name


WITHOUT_KEY = {
    "mistral": ("num_key_value_heads", "sliding_window"),
    "mixtral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads", "max_window_layers", "sliding_window"),
    "qwen3": ("num_key_value_heads", "head_dim", "sliding_window"),
    "qwen3_moe": ("num_key_value_heads", "sliding_window"),
    "qwen3_next": ("num_key_value_heads", "head_dim"),
    "qwen3_5_text": ("num_key_value_heads", "head_dim"),
    "qwen3_5_moe_text": ("num_key_value_heads", "head_dim"),
    "bamba": ("num_key_value_heads",),
    "granitemoehybrid": ("num_local_experts",),
}
"""Keys that may be missing, by family."""


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_a_missing_key_has_the_value_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2}
    held = transformers.AutoConfig.for_model(name, **sizes)
    flat = FAMILIES[name].spelled(sizes)
    for key in WITHOUT_KEY[name]:
        theirs = type(held).__dataclass_fields__[key].default
        assert flat[key] == theirs, key


@pytest.mark.parametrize("name", ["Qwen2 with a window in its last layer", "Qwen3-MoE"])
def test_a_switched_window_without_its_size_is_that_of_transformers(name, values):
    fields = {**READ[name][0], "use_sliding_window": True}
    del fields["sliding_window"]
    assert values(fields)["window_size"] == "4095,0"
    layered = {"layer_types": ["sliding_attention"] * 4}
    with pytest.raises(CheckpointError, match="'sliding_attention', but sliding_window is null"):
        values({**fields, **layered, "sliding_window": None})


# Keys that contradict each other.
REFUSED |= {
    "Granite's lists": (
        "Granite 4.0-H",
        {"layers_block_type": ["mamba"] * 4},
        "layers_block_type is ['mamba', 'mamba', 'mamba', 'mamba'], which contradicts layer_types",
    ),
    "Bamba's lists": (
        "Bamba",
        {"layers_block_type": ["mamba"] * 4},
        "which contradicts attn_layer_indices [2]",
    ),
    "a size of the text model outside it": (
        "Qwen3.5 with vision, tied by the outer key",
        {"hidden_size": 32},
        "hidden_size outside text_config is 32, but qwen3_5 models with this option are not",
    ),
    "no text model": (
        "Qwen3.5 with vision, tied by the outer key",
        {"text_config": None},
        "text_config is missing; it has the options of the text model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_refuses(case):
    name, changes, sentence = REFUSED[case]
    assert sentence in refusal({**READ[name][0], **changes})


NEMOTRON_H = {
    "a limit of time steps": (
        {"time_step_min": 0.5},
        "time_step_min is 0.5, to which transformers raises shorter time steps, but only values up to "
        "0.001 are supported",
    ),
    "an epsilon under another name": (
        {"layer_norm_epsilon": MISSING, "norm_eps": 1e-3},
        "norm_eps is 0.001 without layer_norm_epsilon, for which transformers takes 1e-05; add "
        "layer_norm_epsilon",
    ),
    "no layers": (
        {"hybrid_override_pattern": None},
        "hybrid_override_pattern, layers_block_type and layer_types are missing or null",
    ),
    "no expert of a token": (
        {"num_experts_per_tok": -1},
        "invalid sizes (num_experts_per_tok): --moe-router-topk -1: must be >= 1",
    ),
    "no group of experts": (
        {"n_group": 0},
        "n_group is 0 and topk_group 1; they must be at least 1",
    ),
    "a width of latent experts": (
        {"moe_latent_size": -1},
        "invalid sizes (moe_latent_size): --moe-latent-size -1: must be >= 1",
    ),
    "no number of experts": ({"n_routed_experts": MISSING}, "n_routed_experts is missing"),
    "no number of key-value heads": (
        {"num_key_value_heads": MISSING},
        "num_key_value_heads or num_query_groups is missing",
    ),
}


@pytest.mark.parametrize("case", NEMOTRON_H)
def test_what_nemotron_h_refuses(case):
    changes, sentence = NEMOTRON_H[case]
    assert sentence in refusal(changed(NEMOTRON, changes))


def test_other_names_and_limits_of_nemotron_h_that_change_nothing():
    expected = model_of(NEMOTRON, Path("config.json"))[1]
    for changes in (
        {"layer_norm_epsilon": MISSING, "norm_eps": 1e-5},
        {"layer_norm_epsilon": MISSING, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": MISSING, "num_query_groups": 2},
        {"time_step_min": 0.001},
    ):
        assert model_of(changed(NEMOTRON, changes), Path("config.json"))[1] == expected
    limited = {"hybrid_override_pattern": "*-", "time_step_min": 0.5}
    assert model_of({**NEMOTRON, **limited}, Path("config.json"))[1].main_layers == "*-"


def test_two_lists_of_nemotron_h_must_agree():
    lists = {"layers_block_type": ["mamba", "mlp"], "layer_types": ["mamba", "moe"]}
    with pytest.raises(CheckpointError, match="layers_block_type 'M-' contradicts layer_types"):
        model_of({"model_type": "nemotron_h", **lists}, Path("config.json"))


@pytest.mark.parametrize("name", READ)
def test_advice_never_names_a_key_that_decides_what_a_model_computes(name):
    fields = READ[name][0]
    keys = {key for family in FAMILIES.values() for key in family.deciding_keys} - {"model_type"}
    keys |= {"quantization_config", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    for key in keys - fields.keys():
        value = {"quant_method": "fp8"} if key == "quantization_config" else 3
        try:
            model_of({**fields, key: value}, Path("config.json"))
        except CheckpointError as error:
            assert "--ignore-key" not in str(error), key
    with pytest.raises(CheckpointError, match="if it changes no output, give --ignore-key mine"):
        model_of({**fields, "mine": 3}, Path("config.json"))
