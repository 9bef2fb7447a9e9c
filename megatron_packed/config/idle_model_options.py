"""Options of the model and of experts that have no effect in some models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.model_parts.window import window_sides


@dataclass(frozen=True)
class Idle:
    """Options without effect in one kind of run.

    Args:
        reason: the property of this kind of run that makes the options idle.
        applies: function of (run, processes) that returns True for this kind of run.
        options: keys, such as ``model.rotary_base``.
    """

    reason: str
    applies: Callable[[RunConfig, int], bool]
    options: tuple[str, ...]


def keys_in(section: str, names: str) -> tuple[str, ...]:
    """Return the keys of the named options of a section."""
    return tuple(f"{section}.{name}" for name in names.split())


def without_layers(symbols: str) -> Callable[[RunConfig, int], bool]:
    """Return the rule that applies to patterns without any of the symbols."""
    return lambda run, _: not set(symbols) & set(run.model.hybrid_layer_pattern)


_EXPERT_OPTIONS = keys_in(
    "model",
    "moe_router_topk moe_ffn_hidden_size moe_router_score_function moe_router_pre_softmax "
    "moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor "
    "moe_token_drop_policy moe_pad_expert_input_to_capacity moe_token_dispatcher_type "
    "moe_expert_rank_capacity_factor moe_router_force_load_balancing moe_aux_loss_per_document",
)
_ROPE_SCALING = (
    "rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor "
    "rope_scaling_original_max_positions"
)

MODEL_IDLE: tuple[Idle, ...] = (
    Idle(
        "the pattern has no * layer",
        without_layers(ATTENTION),
        (
            *keys_in(
                "model",
                "num_attention_heads num_query_groups kv_channels add_qkv_bias position_embedding_type "
                "rotary_base rotary_percent max_position_embeddings attention_output_gate qk_layernorm "
                "qk_layernorm_scope attention_norm_placement softmax_scale window_size "
                f"window_attn_skip_freq use_rope_scaling {_ROPE_SCALING}",
            ),
            "training.attention_backend",
        ),
    ),
    Idle(
        "the pattern has no / part",
        lambda run, _: not run.model.mtp_depths,
        keys_in("model", "mtp_num_layers mtp_use_repeated_layer mtp_loss_scaling_factor"),
    ),
    Idle(
        "the pattern has one / part",
        lambda run, _: run.model.mtp_depths == 1,
        ("model.mtp_use_repeated_layer",),
    ),
    Idle(
        "--position-embedding-type is none",
        lambda run, _: run.model.position_embedding_type == "none",
        keys_in(
            "model",
            f"rotary_base rotary_percent max_position_embeddings use_rope_scaling {_ROPE_SCALING}",
        ),
    ),
    Idle(
        "--use-rope-scaling is not given",
        lambda run, _: not run.model.use_rope_scaling,
        keys_in("model", _ROPE_SCALING),
    ),
    Idle(
        "--qk-layernorm is not given",
        lambda run, _: not run.model.qk_layernorm,
        ("model.qk_layernorm_scope",),
    ),
    Idle(
        "--window-size is not given",
        lambda run, _: run.model.window_size is None,
        ("model.window_attn_skip_freq",),
    ),
    Idle(
        "the window covers the longest document",
        lambda run, _: (
            run.model.window_size is not None
            and window_sides(run.model.window_size)[0] + 1 >= run.packing.max_document_length
        ),
        keys_in("model", "window_size window_attn_skip_freq"),
    ),
    Idle(
        "the pattern has no G layer",
        without_layers(GATED_DELTA_NET),
        (
            *keys_in(
                "model",
                "linear_num_key_heads linear_num_value_heads linear_key_head_dim "
                "linear_value_head_dim linear_conv_kernel_dim linear_norm_epsilon "
                "linear_allow_neg_eigval",
            ),
            "training.gated_delta_rule_backend",
        ),
    ),
    Idle(
        "--moe-shared-expert-intermediate-size is not given",
        lambda run, _: run.model.moe_shared_expert_intermediate_size is None,
        keys_in("model", "moe_shared_expert_gate moe_shared_expert_overlap"),
    ),
    Idle(
        "the pattern has no M layer",
        without_layers(MAMBA),
        (
            *keys_in(
                "model",
                "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_chunk_size "
                "mamba_norm_groups mamba_norm_epsilon mamba_conv_bias",
            ),
            "training.ssd_backend",
            "parallel.mamba_cp_comm_type",
        ),
    ),
    Idle(
        "the pattern has no layer with a convolution",
        without_layers(MAMBA + GATED_DELTA_NET),
        ("training.conv_backend",),
    ),
    Idle(
        "the pattern has no - or E layer",
        without_layers(MLP + MOE),
        keys_in("model", "ffn_hidden_size squared_relu swiglu"),
    ),
    Idle(
        "the pattern has no - layer, and --moe-ffn-hidden-size sets the width of experts",
        lambda run, _: (
            MLP not in run.model.hybrid_layer_pattern
            and run.model.moe_ffn_hidden_size != run.model.ffn_hidden_size
        ),
        ("model.ffn_hidden_size",),
    ),
    Idle(
        "the pattern has no layer that can have a bias",
        without_layers(ATTENTION + MLP + MOE),
        ("model.add_bias_linear",),
    ),
    Idle(
        "the pattern has no E layer",
        without_layers(MOE),
        (*_EXPERT_OPTIONS, "parallel.expert_tensor_parallel_size"),
    ),
    Idle(
        "--moe-router-score-function is sigmoid",
        lambda run, _: run.model.moe_router_score_function == "sigmoid",
        ("model.moe_router_pre_softmax",),
    ),
    Idle(
        "tokens may use all groups of experts",
        lambda run, _: run.model.limiting_expert_groups is None,
        keys_in("model", "moe_router_num_groups moe_router_group_topk"),
    ),
    Idle(
        "--moe-router-enable-expert-bias is not given",
        lambda run, _: not run.model.moe_router_enable_expert_bias,
        ("model.moe_router_bias_update_rate",),
    ),
    Idle(
        "--moe-router-load-balancing-type is none",
        lambda run, _: run.model.moe_router_load_balancing_type == "none",
        ("model.moe_aux_loss_coeff",),
    ),
    Idle(
        "--moe-aux-loss-coeff is 0",
        lambda run, _: not run.model.moe_aux_loss_coeff,
        keys_in("model", "moe_router_load_balancing_type moe_aux_loss_per_document"),
    ),
    Idle(
        "--moe-expert-capacity-factor is not given",
        lambda run, _: run.model.moe_expert_capacity_factor is None,
        ("model.moe_token_drop_policy",),
    ),
    Idle(
        "every rank has all experts",
        lambda run, _: run.parallel.expert_model_parallel_size == 1,
        keys_in(
            "model",
            "moe_token_dispatcher_type moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity",
        ),
    ),
    Idle(
        "--moe-token-dispatcher-type is allgather",
        lambda run, _: run.model.moe_token_dispatcher_type == "allgather",  # noqa: S105
        ("model.moe_pad_expert_input_to_capacity",),
    ),
)
"""Rows of `idle_options.IDLE` that depend on the model."""
