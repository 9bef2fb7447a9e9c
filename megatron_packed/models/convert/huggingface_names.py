"""Supported Hugging Face families: options of config.json and names of tensors.

In the tables of names, ``{n}`` is the number of a layer and ``{e}`` the number of an expert. A name
with ``{e}`` stands for the tensors of all experts, in order. If a table lists several names for one
parameter, the parameter contains the rows of these tensors one after another. `weight_rows.py`
describes the exceptions: ``qkv`` and padded vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_packed.config.layer_pattern import ATTENTION, MAMBA, MLP, MOE
from megatron_packed.layers.mamba_mixer import GATED_NORM_EPS

TABLE, OUTPUT = "embedding.weight", "output.weight"
"""Parameters of the embedding and of the output projection; a tied model has only the first."""
Fields = Mapping[str, Any]
"""The keys of a config.json and their values."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Options and tensor names of one family of models.

    Tables are keyed by a symbol of the layer pattern: its entries apply to models whose pattern has
    that symbol. Entries under ``""`` apply to all models.
    """

    model_type: str
    spelled: Callable[[Fields], Fields]
    """Function that flattens the fields to the keys of the tables and fills in derived values."""
    pattern: Callable[[Fields], str]
    """Function that returns the layer pattern; raises ValueError with a sentence."""
    fixed: Mapping[str, Mapping[str, Any]]
    """Fields of `ModelConfig` that are the same in all models of the family."""
    options: Mapping[str, Mapping[str, str]]
    """Required keys of config.json, and the field of `ModelConfig` for each."""
    must_be: Mapping[str, Mapping[str, Any]]
    """Keys of config.json and the only supported value of each, which is also the default."""
    repeats: Mapping[str, str]
    """Keys that some files have in addition to another key or in place of it. If both are present,
    their values must be equal.
    """
    no_effect: str
    """Keys, separated by spaces, that do not affect the model's output. They concern
    initialization, text generation and the origin of the file.
    """
    rules: Callable[[Fields], Iterator[str]]
    """Function that checks the fields beyond the tables. It yields each problem as a clause without a
    full stop.
    """
    outside: Mapping[str, str]
    """Names of parameters outside the layers, and the Hugging Face name of each."""
    layer: str
    """Prefix of the Hugging Face names of one layer's tensors."""
    symbols_per_layer: int
    """Number of symbols of the layer pattern that one Hugging Face layer becomes."""
    names: Mapping[str, Mapping[str, str | tuple[str, ...]]]
    """Names of parameters inside a layer, by its symbol, and the Hugging Face names of each."""
    unties: bool = False
    """True if transformers ignores ``tie_word_embeddings``, so that files need both tables."""


LIBRARY = """_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range model_type
    output_attentions output_hidden_states pad_token_id return_dict tokenizer_class torch_dtype transformers_version
    use_cache """
"""Keys of the transformers library that do not affect the model's output."""


def _nemotron_h_pattern(fields: Fields) -> str:
    """Return the layer pattern of a Nemotron-H model.

    It is given as ``hybrid_override_pattern`` ("M*-E") or as a list of layer types. transformers
    and the files on the hub use different words for these types; both are read.
    """
    words = {
        "linear_attention": MAMBA,
        "mamba": MAMBA,
        "full_attention": ATTENTION,
        "attention": ATTENTION,
        "mlp": MLP,
        "moe": MOE,
    }
    text, layers = (
        fields.get("hybrid_override_pattern"),
        fields.get("layers_block_type", fields.get("layer_types")),
    )
    if isinstance(layers, list):
        unknown = [word for word in layers if not isinstance(word, str) or word not in words]
        if unknown:
            raise ValueError(
                f"layers_block_type has the entry {unknown[0]!r}, but only {', '.join(words)} are supported"
            )
        spelled = "".join(words[word] for word in layers)
        if text not in (None, spelled):
            raise ValueError(
                f"hybrid_override_pattern {text!r} contradicts layers_block_type, which is {spelled!r}"
            )
        text = spelled
    if not isinstance(text, str) or not text or not set(text) <= {MAMBA, ATTENTION, MLP, MOE}:
        raise ValueError(f"hybrid_override_pattern is {text!r}; only M, *, - and E may occur in it")
    if fields.get("num_hidden_layers", len(text)) != len(text):
        raise ValueError(
            f"num_hidden_layers is {fields['num_hidden_layers']!r}, but the pattern has {len(text)} layers"
        )
    return text


def _nemotron_h_rules(fields: Fields) -> Iterator[str]:
    """Check ``norm_topk_prob``.

    The model divides the weights of the chosen experts by their sum, except if a token has only one
    expert, as in Megatron.
    """
    divides, chosen = fields.get("norm_topk_prob", True), fields.get("num_experts_per_tok")
    if MOE in _nemotron_h_pattern(fields) and divides is not (chosen != 1):
        yield (
            f"norm_topk_prob is {divides!r}, but with num_experts_per_tok {chosen!r} "
            f"only {chosen != 1} is supported"
        )


NEMOTRON_H = Family(
    model_type="nemotron_h",
    unties=True,
    spelled=lambda fields: fields,
    pattern=_nemotron_h_pattern,
    fixed={
        "": {"normalization": "RMSNorm", "add_bias_linear": False, "squared_relu": True},
        MOE: {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    },
    options={
        "": {
            "hidden_size": "hidden_size",
            "vocab_size": "vocab_size",
            "layer_norm_epsilon": "norm_epsilon",
        },
        MAMBA: {
            "mamba_num_heads": "mamba_num_heads",
            "mamba_head_dim": "mamba_head_dim",
            "n_groups": "mamba_num_groups",
            "ssm_state_size": "mamba_state_dim",
            "chunk_size": "mamba_chunk_size",
        },
        ATTENTION: {
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "head_dim": "kv_channels",
        },
        MLP: {"intermediate_size": "ffn_hidden_size"},
        MOE: {
            "n_routed_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "routed_scaling_factor": "moe_router_topk_scaling_factor",
            "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
    },
    must_be={
        "": {
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "residual_in_fp32": False,
            "num_nextn_predict_layers": 0,
        },
        MAMBA: {
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
            "time_step_limit": [0.0, math.inf],
            "layer_norm_epsilon": GATED_NORM_EPS,
        },
        ATTENTION: {"attention_bias": False, "attention_dropout": 0.0, "sliding_window": None},
        MOE: {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_latent_size": None},
    },
    repeats={
        "attention_head_dim": "head_dim",
        "num_query_groups": "num_key_value_heads",
        "norm_eps": "layer_norm_epsilon",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    no_effect=LIBRARY
    + """expand hidden_dropout hybrid_override_pattern layer_types layers_block_type
    mamba_ssm_cache_dtype max_position_embeddings moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type norm_topk_prob num_hidden_layers num_logits_to_keep output_router_logits
    partial_rotary_factor rescale_prenorm_residual rope_theta tie_word_embeddings time_step_floor time_step_max
    time_step_min time_step_rank use_mamba_kernels""",
    rules=_nemotron_h_rules,
    outside={
        TABLE: "backbone.embeddings.weight",
        "final_norm.weight": "backbone.norm_f.weight",
        OUTPUT: "lm_head.weight",
    },
    layer="backbone.layers.{n}.",
    symbols_per_layer=1,
    names={
        MAMBA: {
            "norm.weight": "norm.weight",
            "mixer.in_proj.weight": "mixer.in_proj.weight",
            "mixer.conv1d.weight": "mixer.conv1d.weight",
            "mixer.conv1d.bias": "mixer.conv1d.bias",
            "mixer.A_log": "mixer.A_log",
            "mixer.D": "mixer.D",
            "mixer.dt_bias": "mixer.dt_bias",
            "mixer.norm.weight": "mixer.norm.weight",
            "mixer.out_proj.weight": "mixer.out_proj.weight",
        },
        ATTENTION: {
            "norm.weight": "norm.weight",
            "mixer.qkv.weight": (
                "mixer.q_proj.weight",
                "mixer.k_proj.weight",
                "mixer.v_proj.weight",
            ),
            "mixer.proj.weight": "mixer.o_proj.weight",
        },
        MLP: {
            "norm.weight": "norm.weight",
            "mixer.fc1.weight": "mixer.up_proj.weight",
            "mixer.fc2.weight": "mixer.down_proj.weight",
        },
        MOE: {
            "norm.weight": "norm.weight",
            "mixer.router.weight": "mixer.gate.weight",
            "mixer.router.expert_bias": "mixer.gate.e_score_correction_bias",
            "mixer.experts.fc1": "mixer.experts.{e}.up_proj.weight",
            "mixer.experts.fc2": "mixer.experts.{e}.down_proj.weight",
            "mixer.shared_expert.fc1.weight": "mixer.shared_experts.up_proj.weight",
            "mixer.shared_expert.fc2.weight": "mixer.shared_experts.down_proj.weight",
        },
    },
)


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
    spelled=lambda fields: _decoder_spelled(fields, 10_000.0),
    pattern=lambda fields: _decoder_pattern(fields, ATTENTION + MLP),
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
            "mixer.qkv.weight": (
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
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
    spelled=lambda fields: _decoder_spelled(fields, 1_000_000.0),
    pattern=lambda fields: _decoder_pattern(fields, ATTENTION + MOE),
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

FAMILIES = {family.model_type: family for family in (NEMOTRON_H, LLAMA, MIXTRAL)}
