"""Derived sizes of a model, and the layer pattern."""

import dataclasses

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.layer_pattern import pattern_problems
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.divisors import divisors


def test_sizes_that_are_not_given_follow_from_others() -> None:
    model = ModelConfig(
        hybrid_layer_pattern="M*-E",
        hidden_size=512,
        num_attention_heads=8,
        num_experts=4,
        add_bias_linear=False,
    )
    assert (model.ffn_hidden_size, model.moe_ffn_hidden_size) == (2048, 2048)
    assert (model.num_query_groups, model.head_dim) == (8, 64)
    assert (model.mamba_num_heads, model.d_inner, model.mamba_d_conv) == (16, 1024, 4)
    assert (model.layer_types, model.num_layers) == (["M", "*", "-", "E"], 4)
    assert model.activation == "gelu"


def test_sizes_that_are_given_stay() -> None:
    model = ModelConfig(
        hybrid_layer_pattern="M*-E",
        hidden_size=500,
        num_attention_heads=8,
        kv_channels=32,
        num_query_groups=2,
        mamba_num_heads=24,
        mamba_head_dim=32,
        ffn_hidden_size=1000,
        num_experts=4,
        moe_ffn_hidden_size=96,
        swiglu=True,
        add_bias_linear=False,
    )
    assert (model.head_dim, model.num_query_groups, model.d_inner) == (32, 2, 768)
    assert (model.ffn_hidden_size, model.moe_ffn_hidden_size, model.activation) == (
        1000,
        96,
        "swiglu",
    )
    assert dataclasses.replace(model, swiglu=False, squared_relu=True).activation == "squared_relu"


def test_a_model_without_attention_or_mamba_needs_no_sizes_for_them() -> None:
    assert ModelConfig(hybrid_layer_pattern="M-", hidden_size=256).num_attention_heads == 0
    assert (
        ModelConfig(hybrid_layer_pattern="*-", hidden_size=90, num_attention_heads=3).head_dim == 30
    )


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    model = ModelConfig(hybrid_layer_pattern="-", hidden_size=8)
    assert [model.padded_vocab_size(size) for size in (1, 128, 129, 50257)] == [
        128,
        128,
        256,
        50304,
    ]
    assert (
        dataclasses.replace(model, make_vocab_size_divisible_by=1).padded_vocab_size(50257) == 50257
    )


def test_rotated_channels() -> None:
    model = ModelConfig(
        hybrid_layer_pattern="*",
        hidden_size=256,
        num_attention_heads=4,
        rotary_percent=0.5,
        position_embedding_type="rope",
    )
    assert model.rotary_dim == 32


def test_constructing_a_wrong_model_reports_everything() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(
            hybrid_layer_pattern="M*Q", hidden_size="64", num_attention_heads=True, norm_epsilon=-1
        )
    assert {problem.option for problem in caught.value.problems} == {
        "--hybrid-layer-pattern",
        "--hidden-size",
        "--num-attention-heads",
        "--norm-epsilon",
    }
    assert "'Q' at position 3" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("MD", ["'D' at position 2", "DS"]),
        ("+", ["'+' at position 1", "multi-latent"]),
        ("MM|M", ["'|' at position 3", "pipeline"]),
        ("M*E/*E/*", ["'M*E/*E/*'", "other layers after one /"]),
        ("M*E/*E/", ["no layer after a /", "(M*E/*E)"]),
        ("M*E//", ["no layer after a /", "leave out this / (M*E), or write the same layers"]),
        ("/*-", ["no layer before the first /", "before it, for example M*-E/*-"]),
        ("/", ["no layer before the first /", "for example M*-E/*E"]),
        ("m*", ["'m' at position 1", "upper case"]),
        ("M*\u2013", ["position 3", "- MLP"]),
    ],
)
def test_wrong_patterns_are_refused_by_name_and_position(pattern: str, words: list[str]) -> None:
    (problem,) = pattern_problems(pattern)
    for word in words:
        assert word in str(problem)


def test_a_pattern_of_known_layers_has_no_problem() -> None:
    assert pattern_problems("M*-EGM") == []
    assert pattern_problems("M*-EGM/*E/*E") == []


def test_parts_of_a_pattern_with_multi_token_prediction() -> None:
    config = ModelConfig(
        hybrid_layer_pattern="G*-/*-/*-", hidden_size=64, num_attention_heads=4, window_size="3,0"
    )
    assert (config.main_layers, config.mtp_layers) == ("G*-", "*-")
    assert (config.num_layers, config.mtp_depths, config.mtp_num_layers) == (3, 2, 2)
    assert "".join(config.layer_types) == "G*-*-*-"
    assert [list(config.layers_of_depth(depth)) for depth in range(3)] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
    ]
    assert [config.depth_of_layer(n) for n in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    # As in Megatron, the list of windows begins again for each depth.
    windows = dataclasses.replace(config, window_attn_skip_freq="[0,1,1]")
    assert [windows.window_of(n) for n in (1, 3, 5)] == [4, None, None]
    with pytest.raises(ConfigError, match=r"is not the number of parts after a / .*\(2\)"):
        dataclasses.replace(config, mtp_num_layers=1)
    with pytest.raises(ConfigError, match="at most 14 depths"):
        dataclasses.replace(config, hybrid_layer_pattern="*" + 15 * "/*", mtp_num_layers=None)


def test_divisors() -> None:
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
    assert divisors(5040).endswith(", ...")


def test_defaults_that_hashes_of_saved_models_rest_on() -> None:
    """A changed default changes the meaning of old hashes; increase _HASH_VERSION in serialise.py
    with it.
    """
    defaults = {
        f.name: f.default
        for f in section_fields(ModelConfig)
        if not f.option.training_only and not f.required
    }
    assert defaults == {
        "ffn_hidden_size": None,
        "squared_relu": False,
        "swiglu": False,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "apply_layernorm_1p": False,
        "norm_epsilon": 1e-5,
        "num_attention_heads": 0,
        "num_query_groups": None,
        "kv_channels": None,
        "add_qkv_bias": False,
        "attention_output_gate": False,
        "qk_layernorm": False,
        "qk_layernorm_scope": "head",
        "attention_norm_placement": "input",
        "softmax_scale": None,
        "window_size": None,
        "window_attn_skip_freq": None,
        "position_embedding_type": "none",
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rope_scaling_low_freq_factor": 1.0,
        "rope_scaling_high_freq_factor": 4.0,
        "rope_scaling_original_max_positions": 8192,
        "mamba_state_dim": 128,
        "mamba_head_dim": 64,
        "mamba_num_groups": 8,
        "mamba_num_heads": None,
        "mamba_norm_groups": None,
        "mamba_norm_epsilon": 1e-5,
        "mamba_conv_bias": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_norm_epsilon": None,
        "linear_allow_neg_eigval": False,
        "num_experts": None,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": None,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "untie_embeddings_and_output_weights": False,
        "vocab_size": None,
        "embedding_multiplier": None,
        "residual_multiplier": None,
        "logits_scaling": None,
        "mtp_num_layers": None,
        "mtp_use_repeated_layer": False,
        "make_vocab_size_divisible_by": 128,
    }


@pytest.mark.parametrize(("hidden_size", "width"), [(4096, 10880), (768, 2048), (16, 64)])
def test_a_gated_mlp_is_as_wide_as_megatrons(hidden_size: int, width: int) -> None:
    """The width is int(4 h 2 / 3 / 64) 64, so that three matrices have the parameters of two. It is
    at least 64, where Megatron has 0.
    """
    model = ModelConfig(hybrid_layer_pattern="-", hidden_size=hidden_size, swiglu=True)
    assert model.ffn_hidden_size == width
    assert (
        dataclasses.replace(model, ffn_hidden_size=None, swiglu=False).ffn_hidden_size
        == 4 * hidden_size
    )
