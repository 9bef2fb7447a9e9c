"""Qwen3-Next and Qwen3.5: gated delta nets, gated attention, then a SwiGLU MLP or experts.

The files of Qwen3.5 and later have vision, too. Only their text model is converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    ATTENTION_WORDS,
    DELTA_SIZES,
    EXPERT_SIZES,
    HEADS,
    MLP_SIZES,
    PLAIN_ATTENTION,
    RMS_NORM_SWIGLU,
    SIZES,
    flat_rotary,
    hidden_layers,
    rope_unscaled,
    typed_pattern,
)
from megatron_packed.models.convert.families.delta_rows import (
    delta_by_key_head,
    delta_qkv_together,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    MTP,
    Depths,
    Family,
    Fields,
    Joined,
    Names,
)
from megatron_packed.models.convert.families.llama import (
    EXPERT_NAMES,
    QK_NORM_NAMES,
    STACKED_EXPERTS,
    SWIGLU_NAMES,
    every_layer_sparse,
)
from megatron_packed.models.convert.families.symbols import ATTENTION, GATED_DELTA_NET, MLP, MOE
from megatron_packed.models.convert.row_maps import gated_qkv

_WORDS = {"linear_attention": GATED_DELTA_NET} | dict.fromkeys(ATTENTION_WORDS, ATTENTION)
_INTERVAL = 4
"""Default of ``full_attention_interval``: every fourth layer has attention."""
_GATES = ("silu", "swish")
"""Values of ``output_gate_type``: the function of the gate in gated delta nets."""


def _spelled(fields: Fields, key_value_heads: int) -> dict[str, Any]:
    """Return the flat fields, with the kind of every layer.

    Args:
        key_value_heads: number of key-value heads if the key is missing.
    """
    defaults = {
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": key_value_heads,
        "head_dim": 256,
    }
    flat = flat_rotary(fields, defaults)
    every = flat.get("full_attention_interval", _INTERVAL)
    if flat.get("layer_types") is None and every > 0:
        number = hidden_layers(flat)
        flat["layer_types"] = [_word((n + 1) % every == 0) for n in range(number)]
    return flat


def _word(attention: bool) -> str:
    return "full_attention" if attention else "linear_attention"


def _text_spelled(fields: Fields, family: Family) -> Fields:
    """Return the flat fields of the text model of a file with vision.

    transformers reads the model from ``text_config`` alone, except that the outer
    ``tie_word_embeddings`` ties the tables. An outer key of the text model is marked as unknown.

    Args:
        family: family of the text model.
    """
    text = fields.get("text_config")
    if text is None:
        raise ValueError("text_config is missing; it has the options of the text model")
    inside = (family.deciding_keys | set(family.no_effect.split())) - _OUTER_KEYS
    flat = dict(family.spelled(text))
    for key, value in fields.items():
        if key not in inside:
            flat[key] = value
        elif key not in text or text[key] != value:
            flat[key + OUTSIDE_TEXT] = value
    del flat["text_config"]
    return flat


def _rules(fields: Fields) -> Iterator[str]:
    gate = fields.get("output_gate_type", _GATES[0])
    if gate not in _GATES:
        yield f"output_gate_type is {gate!r}, but only {' and '.join(_GATES)} are supported"
    yield from rope_unscaled(fields)
    yield from every_layer_sparse(fields)


def _written(model: ModelConfig) -> dict[str, Any]:
    """Return the layers; SGLang reads only the interval, and transformers and vLLM the list."""
    layers = [symbol == ATTENTION for symbol in model.main_layers[::2]]
    every = layers.index(True) + 1 if True in layers else len(layers) + 1
    regular = layers == [(n + 1) % every == 0 for n in range(len(layers))]
    return {
        "layer_types": [_word(has) for has in layers],
        **({"full_attention_interval": every} if regular else {}),
    }


def _text_written(model: ModelConfig) -> dict[str, Any]:
    """Return the layers, and the rotary options as files of Qwen3.5 nest them.

    The configuration of SGLang reads the base from the nested object alone.
    """
    if ATTENTION not in model.hybrid_layer_pattern:
        return _written(model)
    rotary = {
        "rope_type": "default",
        "rope_theta": model.rotary_base,
        "partial_rotary_factor": model.rotary_percent,
    }
    return {**_written(model), "rope_parameters": rotary}


def _depths(after: str) -> Depths:
    """Return the multi-token prediction of models that have ``after`` after each mixer.

    One depth is one layer with attention. transformers does not read it, and keeps its weights out
    of the files that it saves.
    """

    def stored(fields: Fields) -> tuple[str, int]:
        count = fields.get("mtp_num_hidden_layers", 1)
        if count != 1:
            raise ValueError(f"mtp_num_hidden_layers is {count!r}, but only 1 is supported")
        if fields.get("mtp_use_dedicated_embeddings", False) is not False:
            raise ValueError("mtp_use_dedicated_embeddings is not false, which is not supported")
        return ATTENTION + after, 1

    def unfit(model: ModelConfig) -> Iterator[str]:
        shared = model.mtp_use_repeated_layer or model.mtp_depths == 1
        if model.mtp_layers != ATTENTION + after or not shared:
            parts = "".join(f"/{model.mtp_layers}" * model.mtp_depths)
            yield (
                f"{model.flag('hybrid_layer_pattern')} ...{parts} (the family has one depth "
                f"{ATTENTION + after}, or {model.flag('mtp_use_repeated_layer')})"
            )

    return Depths(
        stored=stored,
        derive=lambda fields: {},
        written=lambda model: {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        unfit=unfit,
        layer="mtp.layers.{n}.",
        outside={
            "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "eh_proj.weight": "mtp.fc.weight",
            "final_norm.weight": "mtp.norm.weight",
        },
    )


JOINED_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")
"""Projections of gated delta nets in Qwen3-Next. Later models have ``qkv``, ``z``, ``b`` and ``a``."""
_GATED_DELTA_NET: Names = {
    "norm.weight": "input_layernorm.weight",
    "mixer.in_proj.weight": Joined(
        tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        delta_qkv_together,
    ),
    "mixer.conv1d.weight": "linear_attn.conv1d.weight",
    "mixer.A_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm.weight": "linear_attn.norm.weight",
    "mixer.out_proj.weight": "linear_attn.out_proj.weight",
}
_ATTENTION: Names = {
    "norm.weight": "input_layernorm.weight",
    "mixer.qkv.weight": Joined(tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), gated_qkv),
    **QK_NORM_NAMES,
    "mixer.proj.weight": "self_attn.o_proj.weight",
}
_EXPERTS: Names = {
    **EXPERT_NAMES,
    "mixer.shared_expert.fc1.weight": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    "mixer.shared_expert.fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mixer.shared_expert_gate.weight": "mlp.shared_expert_gate.weight",
}

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    spelled=lambda fields: _spelled(fields, 4),
    pattern=lambda fields: typed_pattern(fields, _WORDS, MLP),
    blocks=(GATED_DELTA_NET + MLP, ATTENTION + MLP),
    fixed={
        "": {
            **RMS_NORM_SWIGLU,
            "apply_layernorm_1p": True,
        },
        ATTENTION: {
            "position_embedding_type": "rope",
            "attention_output_gate": True,
            "qk_layernorm": True,
        },
    },
    options={
        "": SIZES,
        GATED_DELTA_NET: DELTA_SIZES,
        ATTENTION: {
            **HEADS,
            "rope_theta": "rotary_base",
            "partial_rotary_factor": "rotary_percent",
        },
        MLP: MLP_SIZES,
    },
    must_be={
        "": {"hidden_act": "silu"},
        ATTENTION: {
            **PLAIN_ATTENTION,
            "attn_output_gate": True,
        },
    },
    no_effect=LIBRARY
    + """attention_bias attention_dropout attn_output_gate head_dim linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mamba_ssm_dtype max_position_embeddings mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_attention_heads num_key_value_heads partial_rotary_factor rope_parameters.mrope_interleaved
    rope_parameters.mrope_section rope_theta tie_word_embeddings""",
    rules=_rules,
    derived_from="full_attention_interval layer_types mlp_only_layers num_hidden_layers "
    "output_gate_type rope_type",
    written=_text_written,
    prefixes=("model.", "model.language_model."),
    set_aside=("model.visual.", "visual.", MTP),
    depths=_depths(MLP),
    names={GATED_DELTA_NET: _GATED_DELTA_NET, ATTENTION: _ATTENTION, MLP: SWIGLU_NAMES},
)

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    spelled=lambda fields: _spelled(fields, 2),
    pattern=lambda fields: typed_pattern(fields, _WORDS, MOE),
    blocks=(GATED_DELTA_NET + MOE, ATTENTION + MOE),
    depths=_depths(MOE),
    fixed={**QWEN3_5_TEXT.fixed, MOE: {"moe_shared_expert_gate": True}},
    options={
        **QWEN3_5_TEXT.options,
        MOE: {
            **EXPERT_SIZES,
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
    },
    must_be={**QWEN3_5_TEXT.must_be, MOE: {"norm_topk_prob": True, "decoder_sparse_step": 1}},
    no_effect=QWEN3_5_TEXT.no_effect
    + " intermediate_size output_router_logits router_aux_loss_coef",
    stacked=STACKED_EXPERTS,
    names={**QWEN3_5_TEXT.names, MOE: _EXPERTS},
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    must_be={**QWEN3_5_TEXT.must_be, MOE: {"decoder_sparse_step": 1}},
    derive=lambda fields, pattern: {
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", True)
    },
    derived=("moe_router_pre_softmax",),
    derived_from=QWEN3_5_TEXT.derived_from + " norm_topk_prob",
    written=lambda model: {
        **_written(model),
        "norm_topk_prob": not model.moe_router_pre_softmax,
    },
    prefixes=("model.",),
    set_aside=(MTP,),
    names={
        **QWEN3_5_MOE_TEXT.names,
        GATED_DELTA_NET: {
            **_GATED_DELTA_NET,
            "mixer.in_proj.weight": Joined(
                tuple(f"linear_attn.{part}.weight" for part in JOINED_PROJECTIONS),
                delta_by_key_head,
            ),
        },
    },
)

_VISION = (
    " image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id"
    " language_model_only"
)
_OUTER_KEYS = frozenset(LIBRARY.split()) | {"tie_word_embeddings"}
"""Keys of the text model that files with vision also have outside ``text_config``."""
OUTSIDE_TEXT = " outside text_config"
"""End of the names of keys of the text model in another place, which are not read."""


def _with_vision(text: Family, model_type: str) -> Family:
    """Return the family of files with vision whose text model belongs to ``text``.

    A new config.json would need options of the vision model, so none is written.
    """
    return replace(
        text,
        model_type=model_type,
        architecture="",
        spelled=lambda fields: _text_spelled(fields, text),
        no_effect=text.no_effect + _VISION,
        prefixes=("model.language_model.", "model."),
        loaded={"model.language_model.": "model."},  # of the class without vision
    )


QWEN3_5 = _with_vision(QWEN3_5_TEXT, "qwen3_5")
QWEN3_5_MOE = _with_vision(QWEN3_5_MOE_TEXT, "qwen3_5_moe")
