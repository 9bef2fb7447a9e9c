"""The families: what their config.json says of our model, and what their tensors are called.

In the tables of names, ``{n}`` is the number of a layer, ``{e}`` stands for all experts, one after
another, and several names are parts of one tensor of ours, rows after rows; `weight_rows.py` says where
rows lie otherwise (``qkv``, padded vocabularies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_packed.config.layer_pattern import ATTENTION, MAMBA, MLP, MOE
from megatron_packed.layers.mamba_mixer import GATED_NORM_EPS

Fields = Mapping[str, Any]
"""The keys of a config.json and their values."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    What is said under a symbol of the pattern holds if the pattern has it; under ``""`` it always
    holds.
    """

    model_type: str
    spelled: Callable[[Fields], Fields]
    """The fields as the tables name them: nothing nested, and nothing left to be derived."""
    pattern: Callable[[Fields], str]
    """Our pattern; raises ValueError with a sentence."""
    fixed: Mapping[str, Mapping[str, Any]]
    """Fields of ours that are the same in all models of the family."""
    options: Mapping[str, Mapping[str, str]]
    """Their keys, which must be there, and our fields."""
    must_be: Mapping[str, Mapping[str, Any]]
    """The only value that is built; also what a key stands for that is not there."""
    repeats: Mapping[str, str]
    """Keys that some files have beside, or in place of, another one, which they must then agree
    with.
    """
    no_effect: str
    """Keys, as words, that change no output: first values of weights, generation of text, who wrote
    the file.
    """
    rules: Callable[[Fields], Iterator[str]]
    """What else is wrong, in sentences."""
    outside: Mapping[str, str]
    """Names outside the layers, ours and theirs."""
    layer: str
    """In front of the names of a layer."""
    symbols_per_layer: int
    """Layers of ours in one of theirs."""
    names: Mapping[str, Mapping[str, str | tuple[str, ...]]]
    """Names inside a layer by its symbol, ours and theirs."""


LIBRARY = """_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range model_type
    output_attentions output_hidden_states pad_token_id return_dict tokenizer_class torch_dtype transformers_version
    use_cache """
"""Keys of transformers that say nothing about what a model computes."""


def _nemotron_h_pattern(fields: Fields) -> str:
    """From ``hybrid_override_pattern`` ("M*-E") or a list of types, in transformers' words or in
    the hub's.
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
                f"layers_block_type names {unknown[0]!r}, and only {', '.join(words)} are built"
            )
        spelled = "".join(words[word] for word in layers)
        if text not in (None, spelled):
            raise ValueError(
                f"hybrid_override_pattern {text!r} contradicts layers_block_type, which is {spelled!r}"
            )
        text = spelled
    if not isinstance(text, str) or not text or not set(text) <= {MAMBA, ATTENTION, MLP, MOE}:
        raise ValueError(f"hybrid_override_pattern is {text!r}, not a word of M, *, - and E")
    if fields.get("num_hidden_layers", len(text)) != len(text):
        raise ValueError(
            f"num_hidden_layers is {fields['num_hidden_layers']!r}, and the pattern has {len(text)}"
        )
    return text


def _nemotron_h_rules(fields: Fields) -> Iterator[str]:
    """The weights of chosen experts are divided by their sum, and one alone is not (as in
    Megatron).
    """
    divides, chosen = fields.get("norm_topk_prob", True), fields.get("num_experts_per_tok")
    if MOE in _nemotron_h_pattern(fields) and divides is not (chosen != 1):
        yield f"norm_topk_prob is {divides!r}, and with num_experts_per_tok {chosen!r} only {chosen != 1} is built"


NEMOTRON_H = Family(
    model_type="nemotron_h",
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
        "embedding.weight": "backbone.embeddings.weight",
        "final_norm.weight": "backbone.norm_f.weight",
        "output.weight": "lm_head.weight",
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
    """Llama's and Mixtral's: rotary options may be nested (transformers 5), and numbers of heads
    derived.
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
    """The same block in every layer."""
    layers = fields.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= 10_000:
        raise ValueError(f"num_hidden_layers is {layers!r}, not a number from 1 to 10,000")
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
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
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
