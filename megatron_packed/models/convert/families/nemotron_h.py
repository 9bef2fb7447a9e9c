"""Nemotron-H: Mamba-2, attention without positions, squared-ReLU MLPs and mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import (
    HEADS,
    MAMBA_NORM,
    MLP_SIZES,
    PLAIN_ATTENTION,
    mamba_names,
    mamba_norm_epsilon,
    spelled_layers,
)
from megatron_packed.models.convert.families.family import (
    LIBRARY,
    MTP,
    OUTPUT,
    TABLE,
    Depths,
    Family,
    Fields,
    Joined,
)
from megatron_packed.models.convert.families.symbols import ATTENTION, MAMBA, MLP, MOE
from megatron_packed.models.convert.row_maps import qkv

NO_STEP_LIMIT = 1e-12
"""``time_step_min`` of an exported model. transformers limits the time steps of Mamba from below to
this value, and this project does not limit them. The value must be above 0, because transformers
takes its logarithm.
"""


_WORDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}
"""Types of layers in the words of transformers and of the files on the hub."""


_EPSILON = 1e-5
"""Value of a missing ``layer_norm_epsilon`` in transformers."""
_LARGEST_STEP_LIMIT = 1e-3
"""Largest ``time_step_min`` of a model with Mamba layers, which is the default. Steps below it are so
small that the missing limit changes little.
"""


def _nemotron_h_spelled(fields: Fields) -> Fields:
    """Return the fields; refuse an epsilon that transformers does not read.

    transformers reads only ``layer_norm_epsilon``. Other libraries also read its other names.
    """
    if "layer_norm_epsilon" not in fields:
        for key in ("norm_eps", "rms_norm_eps"):
            if fields.get(key, _EPSILON) != _EPSILON:
                raise ValueError(
                    f"{key} is {fields[key]!r} without layer_norm_epsilon, for which transformers "
                    f"takes {_EPSILON}; add layer_norm_epsilon with the value of the training"
                )
    return fields


def _nemotron_h_pattern(fields: Fields) -> str:
    """Return the layer pattern of a Nemotron-H model.

    It is given as ``hybrid_override_pattern`` ("M*-E") or as a list of layer types. transformers
    and the files on the hub use different words for these types; both are read.
    """
    text = _layers_of(fields, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    if fields.get("num_hidden_layers", len(text)) != len(text):
        raise ValueError(
            f"num_hidden_layers is {fields['num_hidden_layers']!r}, but the pattern has {len(text)} layers"
        )
    return text


def _layers_of(fields: Fields, pattern: str, lists: tuple[str, ...]) -> str:
    """Return the layers that a pattern or lists of types name; all that are there must agree.

    Args:
        pattern: key of the pattern.
        lists: keys of lists of types.
    """
    text = fields.get(pattern)
    for key in lists:
        layers = fields.get(key)
        if layers is None:
            continue
        spelled = spelled_layers(layers, _WORDS, key)
        if text not in (None, spelled):
            raise ValueError(f"{pattern} {text!r} contradicts {key}, which is {spelled!r}")
        text, pattern = spelled, key
    if text is None:
        raise ValueError(f"{pattern}, {' and '.join(lists)} are missing or null")
    if not text or not set(text) <= {MAMBA, ATTENTION, MLP, MOE}:
        raise ValueError(f"{pattern} is {text!r}; only M, *, - and E may occur in it")
    return str(text)


def _nemotron_h_depths(fields: Fields) -> tuple[str, int]:
    """Return the layers of a depth of multi-token prediction and the number of stored depths.

    Without ``mtp_use_repeated_layer`` all depths use the same layers.
    """
    depths = fields.get("num_nextn_predict_layers", 0)
    if type(depths) is not int or depths < 1:
        return "", 0
    repeated = fields.get("mtp_use_repeated_layer", True)
    if not isinstance(repeated, bool):
        raise ValueError(f"mtp_use_repeated_layer is {repeated!r}; it must be true or false")
    layers = _layers_of(fields, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    return layers, 1 if repeated else depths


def _nemotron_h_depths_written(model: ModelConfig) -> Fields:
    """Return the keys of multi-token prediction of a new config.json."""
    layer_types = {symbol: word for word, symbol in _WORDS.items() if word != "linear_attention"}
    layer_types |= {ATTENTION: "full_attention"}
    return {
        "num_nextn_predict_layers": model.mtp_depths,
        "mtp_hybrid_override_pattern": model.mtp_layers,
        "mtp_layers_block_type": [layer_types[symbol] for symbol in model.mtp_layers],
        "mtp_use_repeated_layer": model.mtp_use_repeated_layer or model.mtp_depths == 1,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
    }


def _nemotron_h_rules(fields: Fields) -> Iterator[str]:
    """Check the limit of time steps, ``norm_topk_prob`` and the groups of experts.

    The model divides the weights of the chosen experts by their sum, except if a token has only one
    expert, as in Megatron.
    """
    pattern = _nemotron_h_pattern(fields)
    limit = fields.get("time_step_min", _LARGEST_STEP_LIMIT)
    if MAMBA in pattern and limit > _LARGEST_STEP_LIMIT:
        yield (
            f"time_step_min is {limit!r}, to which transformers raises shorter time steps, but only "
            f"values up to {_LARGEST_STEP_LIMIT} are supported"
        )
    if MOE not in pattern:
        return
    divides, chosen = fields.get("norm_topk_prob", True), fields.get("num_experts_per_tok")
    if divides is not (chosen != 1):
        yield (
            f"norm_topk_prob is {divides!r}, but with num_experts_per_tok {chosen!r} "
            f"only {chosen != 1} is supported"
        )
    groups, open_groups = (fields.get(key, 1) for key in ("n_group", "topk_group"))
    if min(groups, open_groups) < 1:
        yield f"n_group is {groups} and topk_group {open_groups}; they must be at least 1"
    elif open_groups != groups and type(chosen) is int and chosen // open_groups != 2:
        yield (
            f"n_group is {groups} and topk_group {open_groups}, but groups are chosen by their two "
            "best experts only if num_experts_per_tok // topk_group is 2"
        )


def _nemotron_h_unfit(model: ModelConfig) -> Iterator[str]:
    """Yield the groups of experts that transformers would choose otherwise.

    transformers chooses groups by the sum of the two best scores in each, and Megatron by the sum of
    ``topk // group_topk`` scores.
    """
    sizes = model.limiting_expert_groups
    if sizes and model.moe_router_topk // sizes[1] != 2:
        yield (
            f"{model.flag('moe_router_group_topk')} {sizes[1]} with "
            f"{model.flag('moe_router_topk')} {model.moe_router_topk} (the family adds two scores of "
            "each group, and this model another number)"
        )


def _nemotron_h_derive(fields: Fields, pattern: str) -> Fields:
    """Return the epsilon of Mamba's norm, and the options of experts that may be missing."""
    options = dict(mamba_norm_epsilon(fields["layer_norm_epsilon"], pattern))
    if MOE in pattern:
        options["moe_latent_size"] = fields.get("moe_latent_size")
        groups, chosen = (fields.get(key, 1) for key in ("n_group", "topk_group"))
        options["moe_router_num_groups"] = None if groups == chosen else groups
        options["moe_router_group_topk"] = None if groups == chosen else chosen
    return options


def _nemotron_h_written(model: ModelConfig) -> Fields:
    """Return the keys of a new config.json that the tables do not describe.

    The configuration of SGLang reads the groups of Mamba layers also in a model without such layers.
    """
    groups = {} if MAMBA in model.hybrid_layer_pattern else {"n_groups": 1}
    return {
        "hybrid_override_pattern": model.main_layers,
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": model.moe_router_topk != 1,
        "moe_latent_size": model.moe_latent_size,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "time_step_min": NO_STEP_LIMIT,
        **groups,
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    unties=True,
    spelled=_nemotron_h_spelled,
    pattern=_nemotron_h_pattern,
    blocks=(MAMBA, ATTENTION, MLP, MOE),
    fixed={
        "": {"normalization": "RMSNorm"},
        ATTENTION: {"add_bias_linear": False},
        MLP: {"add_bias_linear": False, "squared_relu": True},
        MOE: {
            "add_bias_linear": False,
            "squared_relu": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
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
        ATTENTION: HEADS,
        MLP: MLP_SIZES,
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
        },
        MAMBA: {
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
            "time_step_limit": [0.0, math.inf],
        },
        ATTENTION: {**PLAIN_ATTENTION, "sliding_window": None},
        MOE: {"n_shared_experts": 1},
    },
    repeats={
        "attention_head_dim": "head_dim",
        "num_query_groups": "num_key_value_heads",
        "norm_eps": "layer_norm_epsilon",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    no_effect=LIBRARY
    + """expand hidden_dropout hybrid_override_pattern keep_mtp_spec_in_bf16 layer_types
    layers_block_type mamba_ssm_cache_dtype max_position_embeddings moe_shared_expert_overlap
    mtp_hybrid_override_pattern mtp_layers_block_type mtp_loss_scaling_factor
    mtp_use_repeated_layer norm_topk_prob num_hidden_layers num_logits_to_keep
    num_nextn_predict_layers output_router_logits
    partial_rotary_factor rescale_prenorm_residual rope_parameters
    rope_scaling rope_theta tie_word_embeddings time_step_floor time_step_max
    time_step_rank use_mamba_kernels""",
    rules=_nemotron_h_rules,
    derive=_nemotron_h_derive,
    derived=(
        *MAMBA_NORM,
        "moe_latent_size",
        "moe_router_num_groups",
        "moe_router_group_topk",
    ),
    derived_from="moe_latent_size n_group time_step_min topk_group",
    unfit=_nemotron_h_unfit,
    written=_nemotron_h_written,
    set_aside=(MTP,),
    depths=Depths(
        stored=_nemotron_h_depths,
        derive=lambda fields: {
            "mtp_loss_scaling_factor": fields.get("mtp_loss_scaling_factor", 0.3)
        },
        written=_nemotron_h_depths_written,
        layer="mtp.layers.{n}.",
        outside={
            "enorm.weight": "mtp.layers.{first}.enorm.weight",
            "hnorm.weight": "mtp.layers.{first}.hnorm.weight",
            "eh_proj.weight": "mtp.layers.{first}.eh_proj.weight",
            "final_norm.weight": "mtp.layers.{last}.final_layernorm.weight",
        },
    ),
    outside={
        TABLE: "backbone.embeddings.weight",
        "final_norm.weight": "backbone.norm_f.weight",
        OUTPUT: "lm_head.weight",
    },
    layer="backbone.layers.{n}.",
    loaded={"backbone.": "model."},
    stacked={
        "mixer.experts.fc1": "mixer.experts.up_proj",
        "mixer.experts.fc2": "mixer.experts.down_proj",
    },
    names={
        MAMBA: mamba_names("norm.weight", "mixer"),
        ATTENTION: {
            "norm.weight": "norm.weight",
            "mixer.qkv.weight": Joined(tuple(f"mixer.{part}_proj.weight" for part in "qkv"), qkv),
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
            "mixer.fc1_latent_proj.weight": "mixer.fc1_latent_proj.weight",
            "mixer.fc2_latent_proj.weight": "mixer.fc2_latent_proj.weight",
        },
    },
)
