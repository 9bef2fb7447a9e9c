"""Llama and its kin: attention with rotary positions, then a SwiGLU MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_packed.config.layer_pattern import ATTENTION, MLP, MOE
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    OUTPUT,
    TABLE,
    Family,
    Fields,
    Joined,
)
from megatron_packed.models.convert.row_maps import qkv


def _decoder_spelled(fields: Fields, rotary_base: float) -> Fields:
    """Return the flat fields of a Llama or Mixtral config.json, with derived values filled in.

    transformers 5 nests the rotary options. The number of key-value heads and the head size may be
    missing; they are derived.
    """
    spelled = {key: value for key, value in fields.items() if key != "rope_parameters"}
    rotary = fields.get("rope_parameters")
    if isinstance(rotary, dict):
        for key, value in rotary.items():
            alone = key in ("rope_theta", "rope_type") and fields.get(key, value) == value
            spelled[key if alone else f"rope_parameters.{key}"] = value
    elif rotary is not None:
        spelled["rope_parameters.?"] = rotary
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    derived: dict[str, Any] = {"rope_theta": rotary_base, "num_key_value_heads": heads}
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        derived["head_dim"] = hidden // heads
    return {**spelled, **{key: value for key, value in derived.items() if spelled.get(key) is None}}


def _decoder_pattern(fields: Fields, block: str) -> str:
    """Return the pattern of a model with the same block in every layer."""
    layers = fields.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= 10_000:
        raise ValueError(f"num_hidden_layers is {layers!r}; it must be a number from 1 to 10,000")
    return block * layers


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    spelled=lambda fields: _decoder_spelled(fields, 10_000.0),
    pattern=lambda fields: _decoder_pattern(fields, ATTENTION + MLP),
    block=ATTENTION + MLP,
    fixed={
        "": {
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "swiglu": True,
            "position_embedding_type": "rope",
        }
    },
    options={
        "": {
            "hidden_size": "hidden_size",
            "vocab_size": "vocab_size",
            "rms_norm_eps": "norm_epsilon",
        },
        ATTENTION: {
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "head_dim": "kv_channels",
            "rope_theta": "rotary_base",
        },
        MLP: {"intermediate_size": "ffn_hidden_size"},
    },
    must_be={
        "": {"hidden_act": "silu", "mlp_bias": False},
        ATTENTION: {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_type": "default",
            "rope_scaling": None,
            "sliding_window": None,
        },
    },
    repeats={},
    no_effect=LIBRARY
    + "max_position_embeddings num_hidden_layers pretraining_tp tie_word_embeddings",
    rules=lambda fields: iter(()),
    written=lambda model: {"num_hidden_layers": model.num_layers // 2},
    outside={
        TABLE: "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        OUTPUT: "lm_head.weight",
    },
    layer="model.layers.{n}.",
    symbols_per_layer=2,
    names={
        ATTENTION: {
            "norm.weight": "input_layernorm.weight",
            "mixer.qkv.weight": Joined(
                (
                    "self_attn.q_proj.weight",
                    "self_attn.k_proj.weight",
                    "self_attn.v_proj.weight",
                ),
                qkv,
            ),
            "mixer.proj.weight": "self_attn.o_proj.weight",
        },
        MLP: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mixer.fc2.weight": "mlp.down_proj.weight",
        },
    },
)

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    spelled=lambda fields: _decoder_spelled(fields, 1_000_000.0),
    pattern=lambda fields: _decoder_pattern(fields, ATTENTION + MOE),
    block=ATTENTION + MOE,
    options={
        **LLAMA.options,
        MOE: {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "intermediate_size": "moe_ffn_hidden_size",
        },
    },
    must_be={**LLAMA.must_be, MOE: {"router_jitter_noise": 0.0}},
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
