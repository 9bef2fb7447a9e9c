"""OLMo Hybrid: gated delta nets with doubled beta, and attention whose output is normalised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    ATTENTION_WORDS,
    DELTA_SIZES,
    HEADS,
    MLP_SIZES,
    PLAIN_ATTENTION,
    RMS_NORM_SWIGLU,
    SIZES,
    flat_rotary,
    head_width_unfit,
    hidden_layers,
    rope_unscaled,
    typed_pattern,
)
from megatron_packed.models.convert.families.delta_rows import (
    convolution_in_thirds,
    delta_convolution,
    delta_sections,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    Family,
    Fields,
    Joined,
    OneOf,
)
from megatron_packed.models.convert.families.llama import QK_NORM_NAMES, QKV, SWIGLU_NAMES
from megatron_packed.models.convert.families.symbols import ATTENTION, GATED_DELTA_NET, MLP

GATED_NORM_EPS = 1e-5
"""Epsilon of the norm inside gated delta nets, which config.json does not contain."""
_WORDS = {"linear_attention": GATED_DELTA_NET} | dict.fromkeys(ATTENTION_WORDS, ATTENTION)
_CONVOLUTIONS = tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")


def _spelled(fields: Fields) -> Fields:
    """Return the flat fields, with the defaults of transformers.

    A ``rope_theta`` or ``rope_type`` of null stands for attention without positions, as in the
    released models.
    """
    flat = flat_rotary(fields, {})
    nested = fields.get("rope_scaling") or fields.get("rope_parameters")
    rotary = {**fields, **(nested or {})}
    if rotary.get("rope_type", "default") is None:
        rotary = {"rope_theta": None}
        flat["rope_type"] = "default"
    flat["rope_theta"] = rotary.get("rope_theta", 10_000.0)
    if "rope_parameters" in fields and nested is None and "rope_theta" not in fields:
        flat["rope_parameters"] = None
    layers, heads, hidden = (
        flat.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    derived: dict[str, Any] = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    if layers is not None:
        layers = hidden_layers(flat)
        layer_types = [
            "full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)
        ]
        derived["layer_types"] = (
            layer_types if layers > 3 else [*layer_types[:-1], "full_attention"]
        )
    for key, value in derived.items():
        flat[key] = value if flat.get(key) is None else flat[key]
    key_heads = flat["linear_num_key_heads"]
    if flat.get("linear_key_head_dim") is None and hidden is not None and key_heads:
        flat["linear_key_head_dim"] = int(0.75 * hidden / key_heads)
    if flat.get("linear_value_head_dim") is None and flat.get("linear_key_head_dim") is not None:
        flat["linear_value_head_dim"] = 2 * flat["linear_key_head_dim"]
    return flat


def _derive(fields: Fields, pattern: str) -> dict[str, Any]:
    epsilon = None if fields["rms_norm_eps"] == GATED_NORM_EPS else GATED_NORM_EPS
    theta = fields["rope_theta"]
    positions = {} if theta is None else {"rotary_base": theta}
    return {
        "linear_norm_epsilon": epsilon,
        "position_embedding_type": "none" if theta is None else "rope",
        **positions,
    }


def _rules(fields: Fields) -> Iterator[str]:
    yield from rope_unscaled(fields)
    if "rope_parameters" in fields:
        yield (
            "rope_parameters is null, which some libraries read as rotary positions with base 10000 "
            "and others as no positions; write rope_theta as null in it for no positions"
        )


def _written(model: ModelConfig) -> dict[str, Any]:
    rope = model.position_embedding_type == "rope"
    theta = model.rotary_base if rope else None
    layer_types = {symbol: word for word, symbol in reversed(_WORDS.items())}
    return {
        "layer_types": [layer_types[symbol] for symbol in model.main_layers[::2]],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _unfit(model: ModelConfig) -> Iterator[str]:
    for symbol, name in ((ATTENTION, "attention"), (GATED_DELTA_NET, "gated-delta-net")):
        if symbol not in model.hybrid_layer_pattern:
            yield f"a model without {name} layers"
    yield from head_width_unfit(model)


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    spelled=_spelled,
    pattern=lambda fields: typed_pattern(fields, _WORDS, MLP),
    blocks=(GATED_DELTA_NET + MLP, ATTENTION + MLP),
    fixed={
        "": RMS_NORM_SWIGLU,
        ATTENTION: {
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
            "attention_norm_placement": "output",
        },
    },
    options={
        "": SIZES,
        GATED_DELTA_NET: {
            **DELTA_SIZES,
            "linear_allow_neg_eigval": "linear_allow_neg_eigval",
        },
        ATTENTION: HEADS,
        MLP: MLP_SIZES,
    },
    must_be={
        "": {"hidden_act": "silu"},
        ATTENTION: PLAIN_ATTENTION,
    },
    no_effect=LIBRARY
    + """linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    linear_use_gate max_position_embeddings tie_word_embeddings""",
    rules=_rules,
    derive=_derive,
    derived=("linear_norm_epsilon", "position_embedding_type", "rotary_base"),
    derived_from="layer_types num_hidden_layers rope_parameters rope_theta rope_type",
    nullable="rope_theta rope_type",
    written=_written,
    unfit=_unfit,
    loaded={
        "attention_layer_norm.": "input_layernorm.",
        "feedforward_layer_norm.": "post_attention_layernorm.",
    },
    names={
        GATED_DELTA_NET: {
            "norm.weight": OneOf(("attention_layer_norm.weight", "input_layernorm.weight")),
            "mixer.in_proj.weight": Joined(
                tuple(f"linear_attn.{part}_proj.weight" for part in "qkvgba"), delta_sections
            ),
            "mixer.conv1d.weight": OneOf(
                (
                    Joined(_CONVOLUTIONS, delta_convolution),
                    Joined(_CONVOLUTIONS, convolution_in_thirds),
                    "linear_attn.conv1d.weight",
                )
            ),
            "mixer.A_log": "linear_attn.A_log",
            "mixer.dt_bias": "linear_attn.dt_bias",
            "mixer.norm.weight": "linear_attn.o_norm.weight",
            "mixer.out_proj.weight": "linear_attn.o_proj.weight",
        },
        ATTENTION: {
            # transformers saves the norm after attention under the second name.
            "norm.weight": OneOf(
                ("post_attention_layernorm.weight", "feedforward_layer_norm.weight")
            ),
            "mixer.qkv.weight": QKV,
            **QK_NORM_NAMES,
            "mixer.proj.weight": "self_attn.o_proj.weight",
        },
        MLP: {
            **SWIGLU_NAMES,
            "norm.weight": OneOf(
                ("feedforward_layer_norm.weight", "post_attention_layernorm.weight")
            ),
        },
        ATTENTION + MLP: {"norm.weight": "post_feedforward_layernorm.weight"},
    },
)
