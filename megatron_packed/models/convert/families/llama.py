"""Llama and its kin: attention with rotary positions, then a SwiGLU MLP or experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    EXPERT_SIZES,
    HEADS,
    MLP_SIZES,
    PLAIN_ATTENTION,
    RMS_NORM_SWIGLU,
    ROPE_SCALING,
    ROPE_SCALING_KEYS,
    SIZES,
    WINDOW,
    flat_rotary,
    rope_scaling,
    rope_scaling_rules,
    rope_scaling_written,
    window,
    window_of_layers,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    Family,
    Fields,
    Joined,
    Names,
    OneOf,
)
from megatron_packed.models.convert.families.field_types import shown_value
from megatron_packed.models.convert.families.symbols import ATTENTION, MLP, MOE
from megatron_packed.models.convert.row_maps import qkv

QKV = Joined(tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), qkv)
"""Names of the fused projection without a gate."""
QK_NORM_NAMES: Names = {
    f"mixer.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"
}
"""Names of the norms of queries and keys."""
SWIGLU_NAMES: Names = {
    "norm.weight": "post_attention_layernorm.weight",
    "mixer.fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mixer.fc2.weight": "mlp.down_proj.weight",
}
"""Names of ``-`` layers."""
EXPERT_NAMES: Names = {
    "norm.weight": "post_attention_layernorm.weight",
    "mixer.router.weight": "mlp.gate.weight",
    "mixer.experts.fc1": OneOf(
        (
            ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
            "mlp.experts.gate_up_proj",
        )
    ),
    "mixer.experts.fc2": OneOf(("mlp.experts.{e}.down_proj.weight", "mlp.experts.down_proj")),
}
"""Names of ``E`` layers in Qwen's families: one tensor for each expert, or one for all."""
STACKED_EXPERTS: Names = {
    "mixer.experts.fc1": "mlp.experts.gate_up_proj",
    "mixer.experts.fc2": "mlp.experts.down_proj",
}
"""Names of the experts' parameters in models of transformers."""


def every_layer_sparse(fields: Fields) -> Iterator[str]:
    """Check that no layer has an MLP in place of experts."""
    if fields.get("mlp_only_layers") not in (None, []):
        yield f"mlp_only_layers is {fields['mlp_only_layers']!r}, but only [] is supported"


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    spelled=lambda fields: flat_rotary(fields, {"rope_theta": 10_000.0}),
    blocks=(ATTENTION + MLP,),
    fixed={
        "": {
            **RMS_NORM_SWIGLU,
            "position_embedding_type": "rope",
        }
    },
    options={
        "": SIZES,
        ATTENTION: {**HEADS, "rope_theta": "rotary_base"},
        MLP: MLP_SIZES,
    },
    must_be={
        "": {"hidden_act": "silu", "mlp_bias": False},
        ATTENTION: {
            **PLAIN_ATTENTION,
            "sliding_window": None,
        },
    },
    no_effect=LIBRARY
    + "max_position_embeddings num_hidden_layers pretraining_tp tie_word_embeddings",
    rules=rope_scaling_rules,
    derive=lambda fields, pattern: rope_scaling(fields),
    derived=ROPE_SCALING,
    derived_from=ROPE_SCALING_KEYS,
    written=rope_scaling_written,
    names={
        ATTENTION: {
            "norm.weight": "input_layernorm.weight",
            "mixer.qkv.weight": QKV,
            "mixer.proj.weight": "self_attn.o_proj.weight",
        },
        MLP: SWIGLU_NAMES,
    },
)

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    spelled=lambda fields: flat_rotary(
        fields, {"rope_theta": 1_000_000.0, "num_key_value_heads": 8}
    ),
    blocks=(ATTENTION + MOE,),
    options={
        **LLAMA.options,
        MOE: {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
        },
    },
    must_be={**LLAMA.must_be, MOE: {"router_jitter_noise": 0.0}},
    loaded={".block_sparse_moe.": ".mlp."},
    stacked=STACKED_EXPERTS,
    no_effect=LLAMA.no_effect + " output_router_logits router_aux_loss_coef",
    names={
        **LLAMA.names,
        MOE: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.router.weight": "block_sparse_moe.gate.weight",
            "mixer.experts.fc1": (
                "block_sparse_moe.experts.{e}.w1.weight",
                "block_sparse_moe.experts.{e}.w3.weight",
            ),
            "mixer.experts.fc2": "block_sparse_moe.experts.{e}.w2.weight",
        },
    },
)


_WINDOW_TOKENS = 4096
"""Default of ``sliding_window`` in transformers."""


def _without_window(family: Family) -> dict[str, dict[str, Any]]:
    """Return the table ``must_be`` of a family whose windows are read."""
    table = {symbol: dict(keys) for symbol, keys in family.must_be.items()}
    table[ATTENTION].pop("sliding_window")
    return table


def _mistral_derive(fields: Fields, pattern: str) -> dict[str, Any]:
    """Return the scaled positions, and a window in every layer."""
    layers = len(pattern) // 2
    return {**rope_scaling(fields), **window(fields["sliding_window"], [True] * layers, 2)}


def _mistral_written(model: ModelConfig) -> dict[str, Any]:
    tokens, windowed = window_of_layers(model, 2)
    return {**LLAMA.written(model), "sliding_window": tokens if all(windowed) else None}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    spelled=lambda fields: flat_rotary(
        fields, {"rope_theta": 10_000.0, "num_key_value_heads": 8, "sliding_window": _WINDOW_TOKENS}
    ),
    must_be=_without_window(LLAMA),
    derive=_mistral_derive,
    derived=(*ROPE_SCALING, *WINDOW),
    derived_from=ROPE_SCALING_KEYS + "sliding_window",
    written=_mistral_written,
)

_WINDOW_WORDS = {"sliding_attention": True, "full_attention": False}
_QWEN_WINDOW = " sliding_window use_sliding_window max_window_layers layer_types"


def _qwen_rules(fields: Fields) -> Iterator[str]:
    yield from rope_scaling_rules(fields)
    yield from every_layer_sparse(fields)
    listed, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    if listed is None:
        return
    switched = fields["use_sliding_window"]
    supported = ", ".join(_WINDOW_WORDS)
    if len(listed) != layers:
        yield f"layer_types is {shown_value(listed)}; it must list the {layers!r} layers of num_hidden_layers"
    elif unknown := [word for word in listed if word not in _WINDOW_WORDS]:
        yield f"layer_types has the entry {unknown[0]!r}, but only {supported} are supported"
    elif _qwen_window(fields) is None and "sliding_attention" in listed:
        off = "sliding_window is null" if switched else "use_sliding_window is False"
        yield f"layer_types has the entry 'sliding_attention', but {off}"


def _qwen_window(fields: Fields) -> int | None:
    """Return the window in tokens; None if it is switched off."""
    tokens: int | None = fields["sliding_window"]
    return tokens if fields["use_sliding_window"] else None


def _qwen_derive(fields: Fields, pattern: str) -> dict[str, Any]:
    """Return the scaled positions, and a window in the layers that config.json names."""
    listed, layers = fields.get("layer_types"), len(pattern) // 2
    if listed is not None:
        windowed = [_WINDOW_WORDS[word] for word in listed]
    else:
        windowed = [number >= fields["max_window_layers"] for number in range(layers)]
    return {**rope_scaling(fields), **window(_qwen_window(fields), windowed, 2)}


def _qwen_written(model: ModelConfig) -> dict[str, Any]:
    tokens, windowed = window_of_layers(model, 2)
    layer_types = {has: word for word, has in _WINDOW_WORDS.items()}
    return {
        **LLAMA.written(model),
        "use_sliding_window": tokens is not None,
        "sliding_window": tokens,
        "layer_types": [layer_types[has] for has in windowed],
        "max_window_layers": windowed.index(True) if tokens is not None else len(windowed),
    }


def _qwen3_moe_written(model: ModelConfig) -> dict[str, Any]:
    tokens, windowed = window_of_layers(model, 2)
    return {
        **LLAMA.written(model),
        "use_sliding_window": tokens is not None,
        "sliding_window": tokens if all(windowed) else None,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    }


def _qwen3_moe_derive(fields: Fields, pattern: str) -> dict[str, Any]:
    """Return the scaled positions, a window in every layer, and the normalisation of scores."""
    return {
        **rope_scaling(fields),
        **window(_qwen_window(fields), [True] * (len(pattern) // 2), 2),
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", False),
    }


_QWEN_DEFAULTS = {
    "rope_theta": 10_000.0,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": _WINDOW_TOKENS,
    "max_window_layers": 28,
}
"""Values of missing keys in transformers."""

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    spelled=lambda fields: flat_rotary(fields, _QWEN_DEFAULTS),
    fixed={**LLAMA.fixed, ATTENTION: {"add_qkv_bias": True}},
    must_be={
        "": {"hidden_act": "silu"},
        ATTENTION: {"attention_dropout": 0.0, "use_mrope": False},
    },
    rules=_qwen_rules,
    derive=_qwen_derive,
    derived=(*ROPE_SCALING, *WINDOW),
    derived_from=ROPE_SCALING_KEYS + _QWEN_WINDOW + " mlp_only_layers",
    written=_qwen_written,
    names={
        **LLAMA.names,
        ATTENTION: {
            **LLAMA.names[ATTENTION],
            "mixer.qkv.bias": Joined(tuple(f"self_attn.{part}_proj.bias" for part in "qkv"), qkv),
        },
    },
)

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    spelled=lambda fields: flat_rotary(fields, {**_QWEN_DEFAULTS, "head_dim": 128}),
    fixed={**LLAMA.fixed, ATTENTION: {"qk_layernorm": True}},
    must_be={**QWEN2.must_be, ATTENTION: {**QWEN2.must_be[ATTENTION], "attention_bias": False}},
    names={
        **LLAMA.names,
        ATTENTION: {
            **LLAMA.names[ATTENTION],
            **QK_NORM_NAMES,
        },
    },
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    spelled=lambda fields: flat_rotary(fields, {**_QWEN_DEFAULTS, "num_key_value_heads": 4}),
    blocks=(ATTENTION + MOE,),
    options={
        **LLAMA.options,
        MOE: EXPERT_SIZES,
    },
    must_be={**QWEN3.must_be, MOE: {"decoder_sparse_step": 1}},
    repeats={"num_local_experts": "num_experts"},
    derive=_qwen3_moe_derive,
    derived=(*QWEN3.derived, "moe_router_pre_softmax"),
    derived_from=QWEN3.derived_from + " norm_topk_prob",
    written=_qwen3_moe_written,
    no_effect=MIXTRAL.no_effect + " intermediate_size",
    stacked=STACKED_EXPERTS,
    names={**QWEN3.names, MOE: EXPERT_NAMES},
)
