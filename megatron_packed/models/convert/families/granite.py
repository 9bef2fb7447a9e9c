"""Bamba and Granite 4.0-H: Mamba-2 and attention, then a SwiGLU MLP or experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    ATTENTION_WORDS,
    HEADS,
    MAMBA_NORM,
    MLP_SIZES,
    MULTIPLIERS,
    PLAIN_ATTENTION,
    RMS_NORM_SWIGLU,
    SIZES,
    flat_rotary,
    head_width_unfit,
    hidden_layers,
    mamba_names,
    mamba_norm_epsilon,
    rope_unscaled,
    typed_pattern,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    OUTSIDE,
    Family,
    Fields,
)
from megatron_packed.models.convert.families.field_types import shown_value
from megatron_packed.models.convert.families.llama import LLAMA
from megatron_packed.models.convert.families.mamba2 import expand, mamba_unfit
from megatron_packed.models.convert.families.symbols import ATTENTION, MAMBA, MLP, MOE

_WORDS = {"linear_attention": MAMBA, "mamba": MAMBA} | dict.fromkeys(ATTENTION_WORDS, ATTENTION)
_UNUSED_EXPAND, _UNUSED_STATE = 2, 16
"""Inner width by hidden size, and state size, of Mamba in a model without Mamba layers."""
_ROTATED = 0.5
"""Rotated fraction of the channels of a head in Bamba, a constant of transformers."""


def _mamba_width(flat: dict[str, Any]) -> None:
    """Fill in the width of a Mamba head if it is ``auto``."""
    if flat.get("mamba_d_head", "auto") == "auto":
        sizes = [flat.get(key) for key in ("mamba_expand", "hidden_size", "mamba_n_heads")]
        positive_sizes = [size for size in sizes if size is not None and size > 0]
        if len(positive_sizes) == 3:
            flat["mamba_d_head"] = positive_sizes[0] * positive_sizes[1] // positive_sizes[2]


def _one_list(flat: dict[str, Any]) -> None:
    """Move the types of the layers to ``layer_types``, whose other name some files have.

    Raises:
        ValueError: the two keys have different lists.
    """
    other = flat.pop("layers_block_type", None)
    listed = flat.get("layer_types")
    if other is not None and listed is not None and _symbols(other) != _symbols(listed):
        raise ValueError(
            f"layers_block_type is {shown_value(other)}, which contradicts layer_types {shown_value(listed)}"
        )
    flat["layer_types"] = other if listed is None else listed


def _symbols(layer_types: list[str]) -> list[str]:
    return [_WORDS.get(word, word) for word in layer_types]


def _bamba_spelled(fields: Fields) -> Fields:
    defaults = {"rope_theta": 10_000.0, "mamba_expand": 2, "num_key_value_heads": 8}
    flat = flat_rotary(fields, defaults)
    _mamba_width(flat)
    _one_list(flat)
    attention = flat.get("attn_layer_indices")
    if flat["layer_types"] is None or attention is not None:
        number = hidden_layers(flat)
        layer_types = ["attention" if n in (attention or ()) else "mamba" for n in range(number)]
        listed = flat["layer_types"]
        if listed is not None and _symbols(listed) != _symbols(layer_types):
            key = "layer_types" if fields.get("layer_types") else "layers_block_type"
            raise ValueError(
                f"{key} is {shown_value(listed)}, which contradicts attn_layer_indices {attention}"
            )
        flat["layer_types"] = layer_types
    return flat


def _bamba_rules(fields: Fields) -> Iterator[str]:
    yield from rope_unscaled(fields)
    rotated = fields.get("partial_rotary_factor")
    if rotated not in (None, _ROTATED):
        yield f"partial_rotary_factor is {rotated!r}, but only {_ROTATED} is supported"
    channels, width = fields.get("attn_rotary_emb"), fields.get("head_dim")
    if channels is not None and type(width) is int and channels != int(width * _ROTATED):
        yield f"attn_rotary_emb is {channels!r}, but only {int(width * _ROTATED)} is supported"


def _bamba_written(model: ModelConfig) -> dict[str, Any]:
    symbols = model.main_layers[::2]
    return {
        "attn_layer_indices": [n for n, symbol in enumerate(symbols) if symbol == ATTENTION],
        **_mamba_written(model),
    }


def _mamba_written(model: ModelConfig) -> dict[str, Any]:
    """Return the inner width of Mamba layers, and sizes that a model without such layers needs.

    transformers, vLLM and SGLang check the sizes of Mamba layers, or reserve a state for them, also
    if all layers have attention. As many heads as attention has can be split as often.
    """
    if MAMBA in model.hybrid_layer_pattern:
        return {"mamba_expand": expand(model)}
    return {
        "mamba_expand": _UNUSED_EXPAND,
        "mamba_n_heads": model.num_attention_heads,
        "mamba_d_head": _UNUSED_EXPAND * model.hidden_size // model.num_attention_heads,
        "mamba_n_groups": 1,
        "mamba_d_state": _UNUSED_STATE,
        "mamba_d_conv": ModelConfig.mamba_d_conv,
    }


def _unfit(model: ModelConfig) -> Iterator[str]:
    if MAMBA in model.hybrid_layer_pattern:
        yield from mamba_unfit(model)
    yield from head_width_unfit(model)


_MAMBA_NAMES = mamba_names("input_layernorm.weight", "mamba")

BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    spelled=_bamba_spelled,
    pattern=lambda fields: typed_pattern(fields, _WORDS, MLP),
    blocks=(MAMBA + MLP, ATTENTION + MLP),
    fixed={
        "": RMS_NORM_SWIGLU,
        ATTENTION: {"position_embedding_type": "rope", "rotary_percent": _ROTATED},
    },
    options={
        "": SIZES,
        MAMBA: {
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "mamba_num_groups",
            "mamba_d_state": "mamba_state_dim",
            "mamba_chunk_size": "mamba_chunk_size",
            "mamba_conv_bias": "mamba_conv_bias",
        },
        ATTENTION: {**HEADS, "rope_theta": "rotary_base"},
        MLP: MLP_SIZES,
    },
    must_be={
        "": {"hidden_act": "silu", "mlp_bias": False},
        MAMBA: {
            "mamba_d_conv": ModelConfig.mamba_d_conv,
            "mamba_proj_bias": False,
            "time_step_limit": [0.0, math.inf],
        },
        ATTENTION: PLAIN_ATTENTION,
    },
    no_effect=LIBRARY
    + """attention_bias attention_dropout head_dim mamba_expand max_position_embeddings
    num_attention_heads num_key_value_heads num_logits_to_keep rope_theta
    tie_word_embeddings z_loss_coefficient""",
    rules=_bamba_rules,
    derive=lambda fields, pattern: mamba_norm_epsilon(fields["rms_norm_eps"], pattern),
    derived=MAMBA_NORM,
    derived_from="""attn_layer_indices attn_rotary_emb layer_types layers_block_type num_hidden_layers
    partial_rotary_factor rope_type""",
    written=_bamba_written,
    unfit=_unfit,
    outside={**OUTSIDE, "final_norm.weight": "{model}final_layernorm.weight"},
    names={
        MAMBA: _MAMBA_NAMES,
        ATTENTION: LLAMA.names[ATTENTION],
        MLP: {
            "norm.weight": "pre_ff_layernorm.weight",
            "mixer.fc1.weight": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
            "mixer.fc2.weight": "feed_forward.down_proj.weight",
        },
    },
)


def _granite_spelled(fields: Fields) -> Fields:
    flat = flat_rotary(fields, {"rope_theta": 10_000.0, "mamba_expand": 2, "num_local_experts": 8})
    if flat.get("position_embedding_type") != "rope":
        flat = {
            key: value
            for key, value in flat.items()
            if key != "rope_type" and not key.startswith("rope_parameters.")
        }
    _mamba_width(flat)
    _one_list(flat)
    if flat["layer_types"] is None:
        flat["layer_types"] = ["mamba"] * hidden_layers(flat)
    return flat


def _granite_pattern(fields: Fields) -> str:
    after = MOE if fields["num_local_experts"] else MLP
    return typed_pattern(fields, _WORDS, after)


def _granite_derive(fields: Fields, pattern: str) -> dict[str, Any]:
    """Return multipliers, positions and the factor of attention; a factor of 1 is left out."""
    values = {key: fields.get(key, 1.0) for key in MULTIPLIERS}
    derived: dict[str, Any] = {key: None if values[key] == 1 else values[key] for key in values}
    derived |= mamba_norm_epsilon(fields["rms_norm_eps"], pattern)
    if ATTENTION in pattern:
        scale = fields.get("attention_multiplier", 1.0)
        derived["softmax_scale"] = None if scale == fields["head_dim"] ** -0.5 else scale
        rope = fields.get("position_embedding_type") == "rope"
        derived["position_embedding_type"] = "rope" if rope else "none"
        if rope:
            derived["rotary_base"] = fields["rope_theta"]
    return derived


def _granite_rules(fields: Fields) -> Iterator[str]:
    rope = fields.get("position_embedding_type")
    if rope == "rope":
        yield from rope_unscaled(fields)
        if fields["rope_theta"] is None:
            yield "rope_theta is null, but it must have a value"
    if rope not in (None, "rope", "nope"):
        yield f"position_embedding_type is {rope!r}, but only 'rope' and 'nope' are supported"


def _granite_written(model: ModelConfig) -> dict[str, Any]:
    layer_types = {MAMBA: "mamba", ATTENTION: "attention"}
    symbols = model.main_layers[::2]
    values = {key: getattr(model, key) for key in MULTIPLIERS}
    fields: dict[str, Any] = {
        "layer_types": [layer_types[symbol] for symbol in symbols],
        **_mamba_written(model),
        **{key: 1.0 if value is None else value for key, value in values.items()},
    }
    if MOE not in model.hybrid_layer_pattern:
        fields["num_local_experts"] = 0
    if ATTENTION in symbols:
        scale = model.softmax_scale
        rope = model.position_embedding_type == "rope"
        fields["attention_multiplier"] = model.head_dim**-0.5 if scale is None else scale
        fields["position_embedding_type"] = "rope" if rope else "nope"
        fields["rope_theta"] = model.rotary_base
    return fields


GRANITE = replace(
    BAMBA,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    spelled=_granite_spelled,
    pattern=_granite_pattern,
    blocks=(MAMBA + MLP, ATTENTION + MLP, MAMBA + MOE, ATTENTION + MOE),
    fixed={"": BAMBA.fixed[""]},
    options={
        **BAMBA.options,
        ATTENTION: HEADS,
        MLP: {"shared_intermediate_size": "ffn_hidden_size"},
        MOE: {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
            "shared_intermediate_size": "moe_shared_expert_intermediate_size",
        },
    },
    must_be={**BAMBA.must_be, "": {"hidden_act": "silu", "normalization_function": "rmsnorm"}},
    no_effect=BAMBA.no_effect
    + """ init_method intermediate_size num_experts_per_tok output_router_logits
    router_aux_loss_coef""",
    rules=_granite_rules,
    derive=_granite_derive,
    derived=(
        *MULTIPLIERS,
        *MAMBA_NORM,
        "softmax_scale",
        "position_embedding_type",
        "rotary_base",
    ),
    derived_from=" ".join(MULTIPLIERS)
    + """ attention_multiplier layer_types layers_block_type num_hidden_layers num_local_experts
    partial_rotary_factor position_embedding_type rope_type""",
    written=_granite_written,
    outside=OUTSIDE,
    loaded={"block_sparse_moe.router.layer.": "block_sparse_moe.router."},
    stacked={
        "mixer.experts.fc1": "block_sparse_moe.experts.gate_up_proj",
        "mixer.experts.fc2": "block_sparse_moe.experts.down_proj",
    },
    names={
        MAMBA: _MAMBA_NAMES,
        ATTENTION: LLAMA.names[ATTENTION],
        MLP: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.fc1.weight": "shared_mlp.input_linear.weight",
            "mixer.fc2.weight": "shared_mlp.output_linear.weight",
        },
        MOE: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.router.weight": "block_sparse_moe.router.layer.weight",
            "mixer.experts.fc1": "block_sparse_moe.input_linear.weight",
            "mixer.experts.fc2": "block_sparse_moe.output_linear.weight",
            "mixer.shared_expert.fc1.weight": "shared_mlp.input_linear.weight",
            "mixer.shared_expert.fc2.weight": "shared_mlp.output_linear.weight",
        },
    },
)
