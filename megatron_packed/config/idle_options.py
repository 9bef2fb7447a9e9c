"""Options without effect in some runs, and the reasons, which a run prints at its start.

``IDLE`` lists these options and ``EFFECTIVE`` all other options; a test fails if an option is in
neither. If an option requests other numbers, another backend or another output than the run gives,
a rule of its section refuses the option instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.config.options import Field
from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields, unchecked
from megatron_packed.config.sections.data import TIKTOKEN, TRAINED_BPE
from megatron_packed.config.sections.memory import FULL, SELECTIVE
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


def _in(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _without(symbols: str) -> Callable[[RunConfig, int], bool]:
    return lambda run, _: not set(symbols) & set(run.model.hybrid_layer_pattern)


def _no_replicas(run: RunConfig, processes: int) -> bool:
    layout = run.layout(processes)
    of_experts = MOE in run.model.hybrid_layer_pattern and layout.expert_dp_size > 1
    return layout.size("dp_cp") == 1 and not of_experts


def _indexed(run: RunConfig) -> set[bool]:
    """Return, as a set, the answers to one question about each data path: is the path the prefix of
    an indexed data set? Indexed data sets are already tokenised.
    """
    paths = (*run.data.train_paths, *run.data.valid_blend.paths, *run.data.test_blend.paths)
    return {os.path.exists(path + ".idx") and not os.path.exists(path) for path in paths}


_EXPERT_OPTIONS = _in(
    "model",
    "moe_router_topk moe_ffn_hidden_size moe_router_score_function moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor "
    "moe_token_drop_policy moe_pad_expert_input_to_capacity moe_token_dispatcher_type "
    "moe_expert_rank_capacity_factor",
)
_ROPE_SCALING = (
    "rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor "
    "rope_scaling_original_max_positions"
)
_SPIKE_OPTIONS = _in("training", "loss_spike_window loss_spike_factor grad_norm_spike_factor")
_STEP_OPTIONS = (
    *_in(
        "optim",
        "min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
        "lr_warmup_fraction lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style weight_decay "
        "clip_grad adam_beta1 adam_beta2 adam_eps",
    ),
    *_in(
        "training",
        "train_samples train_epochs early_stopping_patience exit_interval exit_duration_in_mins on_nonfinite "
        "check_weight_hash_across_dp_replicas_interval check_grad_hash_across_dp_replicas_interval loss_spike_policy",
    ),
    *_SPIKE_OPTIONS,
    *_in(
        "checkpoint",
        "save_interval save_retain save_retain_interval save_best async_save save_optim save_rng",
    ),
    *_in("logging", "log_interval log_params_norm log_num_zeros_in_grad"),
    *_in(
        "profiling",
        "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_shapes",
    ),
)

IDLE: tuple[Idle, ...] = (
    Idle(
        "the pattern has no * layer",
        _without(ATTENTION),
        (
            *_in(
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
        "--position-embedding-type is none",
        lambda run, _: run.model.position_embedding_type == "none",
        _in(
            "model",
            f"rotary_base rotary_percent max_position_embeddings use_rope_scaling {_ROPE_SCALING}",
        ),
    ),
    Idle(
        "--use-rope-scaling is not given",
        lambda run, _: not run.model.use_rope_scaling,
        _in("model", _ROPE_SCALING),
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
        _in("model", "window_size window_attn_skip_freq"),
    ),
    Idle(
        "the pattern has no G layer",
        _without(GATED_DELTA_NET),
        (
            *_in(
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
        ("model.moe_shared_expert_gate",),
    ),
    Idle(
        "the pattern has no M layer",
        _without(MAMBA),
        (
            *_in(
                "model",
                "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_chunk_size "
                "mamba_norm_groups mamba_norm_epsilon mamba_conv_bias",
            ),
            "training.ssd_backend",
        ),
    ),
    Idle(
        "the pattern has no layer with a convolution",
        _without(MAMBA + GATED_DELTA_NET),
        ("training.conv_backend",),
    ),
    Idle(
        "the pattern has no - or E layer",
        _without(MLP + MOE),
        _in("model", "ffn_hidden_size squared_relu swiglu"),
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
        _without(ATTENTION + MLP + MOE),
        ("model.add_bias_linear",),
    ),
    Idle(
        "the pattern has no E layer",
        _without(MOE),
        (*_EXPERT_OPTIONS, "parallel.expert_tensor_parallel_size"),
    ),
    Idle(
        "--moe-router-score-function is sigmoid",
        lambda run, _: run.model.moe_router_score_function == "sigmoid",
        ("model.moe_router_pre_softmax",),
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
        ("model.moe_router_load_balancing_type",),
    ),
    Idle(
        "--moe-expert-capacity-factor is not given",
        lambda run, _: run.model.moe_expert_capacity_factor is None,
        ("model.moe_token_drop_policy",),
    ),
    Idle(
        "every rank has all experts",
        lambda run, _: run.parallel.expert_model_parallel_size == 1,
        _in(
            "model",
            "moe_token_dispatcher_type moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity",
        ),
    ),
    Idle(
        "--moe-token-dispatcher-type is allgather",
        lambda run, _: run.model.moe_token_dispatcher_type == "allgather",  # noqa: S105
        ("model.moe_pad_expert_input_to_capacity",),
    ),
    Idle(
        "--tensor-model-parallel-size is 1",
        lambda run, _: run.parallel.tensor_model_parallel_size == 1,
        _in("parallel", "sequence_parallel expert_tensor_parallel_size"),
    ),
    Idle(
        "--context-parallel-size is 1",
        lambda run, _: run.parallel.context_parallel_size == 1,
        ("parallel.cp_comm_type",),
    ),
    Idle(
        "the run has one process",
        lambda run, processes: processes == 1,
        _in("parallel", "distributed_backend distributed_timeout_minutes"),
    ),
    Idle(
        "no two ranks have the same weights",
        _no_replicas,
        (
            *_in("parallel", "use_distributed_optimizer overlap_grad_reduce overlap_param_gather"),
            "training.check_grad_hash_across_dp_replicas_interval",
        ),
    ),
    Idle(
        "no two ranks have the same weights, and fp32 weights have no masters",
        lambda run, processes: not run.training.bf16 and _no_replicas(run, processes),
        ("training.check_weight_hash_across_dp_replicas_interval",),
    ),
    Idle(
        "--sft is not given",
        lambda run, _: not run.data.sft,
        ("packing.keep_pieces_without_targets",),
    ),
    Idle(
        "no data path is an indexed data set",
        lambda run, _: True not in _indexed(run),
        ("data.mmap_bin_files",),
    ),
    Idle(
        "all data is already tokenised",
        lambda run, _: False not in _indexed(run),
        _in("data", "data_fields max_bad_fraction data_cache_path"),
    ),
    Idle("--split is not given", lambda run, _: run.data.split is None, ("data.split_order",)),
    Idle(
        f"--tokenizer-type is not {TIKTOKEN}",
        lambda run, _: run.data.tokenizer_type != TIKTOKEN,
        _in("data", "tiktoken_num_special_tokens tiktoken_pattern"),
    ),
    Idle(
        f"--tokenizer-type is not {TRAINED_BPE}",
        lambda run, _: run.data.tokenizer_type != TRAINED_BPE,
        ("data.tokenizer_vocab_size",),
    ),
    Idle(
        "--skip-train runs no training step", lambda run, _: run.training.skip_train, _STEP_OPTIONS
    ),
    Idle(
        "--loss-spike-policy is off",
        lambda run, _: run.training.loss_spike_policy == "off",
        _SPIKE_OPTIONS,
    ),
    Idle(
        "the run ends before half of --loss-spike-window is filled",
        lambda run, _: (
            run.training.train_iters is not None
            and run.training.train_iters <= -(-run.training.loss_spike_window // 2)
        ),
        ("training.loss_spike_policy", *_SPIKE_OPTIONS),
    ),
    Idle(
        "--lr-decay-style is constant",
        lambda run, _: run.optim.lr_decay_style == "constant",
        ("optim.min_lr",),
    ),
    Idle(
        "--lr-decay-style is constant, and the warm-up does not depend on the decay",
        lambda run, _: (
            run.optim.lr_decay_style == "constant"
            and run.optim.lr_warmup_fraction is None
            and not run.optim.lr_warmup_samples
        ),
        _in("optim", "lr_decay_iters lr_decay_samples"),
    ),
    Idle(
        "--lr-decay-style is not WSD",
        lambda run, _: run.optim.lr_decay_style != "WSD",
        _in("optim", "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style"),
    ),
    Idle("the run has no warm-up", lambda run, _: not run.warmup_iters, ("optim.lr_warmup_init",)),
    Idle(
        "--eval-iters is 0",
        lambda run, _: not run.training.eval_iters,
        ("training.eval_interval", *_in("data", "valid_data_path test_data_path")),
    ),
    Idle(
        "the run has neither validations nor a test",
        lambda run, _: not run.validates and not run.tests,
        _in("training", "eval_iters manual_gc_eval"),
    ),
    Idle(
        "--valid-metric is not given",
        lambda run, _: run.training.valid_metric is None,
        ("training.valid_metric_samples",),
    ),
    Idle(
        "neither --sample-prompts nor --valid-metric is given",
        lambda run, _: run.training.valid_metric is None and run.logging.sample_prompts is None,
        ("logging.sample_max_new_tokens",),
    ),
    Idle(
        "--manual-gc is not given",
        lambda run, _: not run.training.manual_gc,
        _in("training", "manual_gc_interval manual_gc_eval"),
    ),
    Idle(
        "--cuda-graph-impl is none",
        lambda run, _: not run.cuda_graph.enabled,
        _in(
            "cuda_graph",
            "cuda_graph_modules cuda_graph_max_packed_seqs cuda_graph_strict cuda_graph_audit_interval "
            "cuda_graph_warmup_steps",
        ),
    ),
    Idle(
        f"--recompute-granularity {FULL} is not given",
        lambda run, _: run.memory.recompute_granularity != FULL,
        _in("memory", "recompute_method recompute_num_layers"),
    ),
    Idle(
        f"--recompute-granularity {SELECTIVE} is not given",
        lambda run, _: run.memory.recompute_granularity != SELECTIVE,
        ("memory.recompute_modules",),
    ),
    Idle(
        "--fine-grained-activation-offloading is not given",
        lambda run, _: not run.memory.fine_grained_activation_offloading,
        ("memory.offload_modules",),
    ),
    Idle(
        "nothing is offloaded",
        lambda run, _: not run.memory.offloads,
        _in("memory", "min_offloaded_tensor_size offload_buffers offload_headroom_mib"),
    ),
    Idle(
        "--save is not given",
        lambda run, _: run.checkpoint.save is None,
        _in("checkpoint", "save_retain save_retain_interval async_save save_optim save_rng"),
    ),
    Idle(
        "--load is not given",
        lambda run, _: run.checkpoint.load is None,
        _in("checkpoint", "exit_on_missing_checkpoint load_optim load_rng"),
    ),
    Idle(
        "--finetune loads only the weights",
        lambda run, _: run.checkpoint.finetune,
        _in("checkpoint", "load_optim load_rng"),
    ),
    Idle(
        "no checkpoint is loaded",
        lambda run, _: run.checkpoint.load is None and run.checkpoint.pretrained_checkpoint is None,
        ("checkpoint.dist_ckpt_strictness",),
    ),
    Idle(
        "--wandb-project is not given",
        lambda run, _: run.logging.wandb_project is None,
        _in("logging", "wandb_exp_name wandb_save_dir wandb_entity"),
    ),
    Idle(
        "--mlflow-experiment is not given",
        lambda run, _: run.logging.mlflow_experiment is None,
        _in("logging", "mlflow_run_name mlflow_tracking_uri"),
    ),
    Idle(
        "--profile is not given",
        lambda run, _: not run.profiling.profile,
        _in(
            "profiling",
            "profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_shapes",
        ),
    ),
    Idle(
        "--use-pytorch-profiler is not given",
        lambda run, _: not run.profiling.use_pytorch_profiler,
        ("profiling.record_shapes",),
    ),
    Idle(
        "--record-memory-history is not given",
        lambda run, _: not run.profiling.record_memory_history,
        ("profiling.memory_snapshot_path",),
    ),
)
"""Table of idle options; the first entry that applies gives the reason."""

EFFECTIVE: frozenset[str] = frozenset(
    {
        *_in(
            "model",
            "hybrid_layer_pattern hidden_size normalization norm_epsilon hidden_dropout init_method_std "
            "untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by "
            "apply_layernorm_1p embedding_multiplier residual_multiplier logits_scaling",
        ),
        # Rules refuse every value of these options that would have no effect: attention dropout
        # other than 0, pipeline sizes other than 1, and experts without an E layer.
        "model.attention_dropout",
        "parallel.pipeline_model_parallel_size",
        *_in("model", "num_experts moe_shared_expert_intermediate_size"),
        *_in(
            "parallel",
            "tensor_model_parallel_size context_parallel_size expert_model_parallel_size",
        ),
        # The bucket size has an effect without replicas too: the gradient norm is summed bucket by
        # bucket, so its rounding depends on the bucket size.
        "parallel.ddp_bucket_size",
        *_in(
            "packing",
            "seq_length micro_batch_size global_batch_size packing_method packing_window "
            "max_documents_per_pack pad_packed_seq_alignment max_document_length overlong_policy",
        ),
        *_in(
            "data",
            "data_path train_data_path data_args_path per_split_data_args_path split sft num_workers "
            "tokenizer_type",
        ),
        # Rules refuse these options without a tokenizer that uses them, or without --sft.
        *_in(
            "data",
            "tokenizer_model vocab_file merge_file tokenizer_special_tokens null_tokenizer_eod_id "
            "sft_tokenizer_prompt_format chat_template answer_end",
        ),
        *_in("optim", "lr optimizer_backend"),
        *_in(
            "training",
            "train_iters valid_metric skip_train manual_gc seed bf16 deterministic_mode isolation_self_test device "
            "transformer_impl require_fast_kernels",
        ),
        "cuda_graph.cuda_graph_impl",
        *_in(
            "memory",
            "recompute_granularity offload_layer_inputs fine_grained_activation_offloading",
        ),
        *_in("checkpoint", "save load ckpt_step finetune pretrained_checkpoint"),
        *_in(
            "logging",
            "brief_start log_progress log_jsonl tensorboard_dir report sample_prompts wandb_project "
            "mlflow_experiment",
        ),
        "profiling.record_memory_history",
    }
)
"""Options that always have an effect, or that are refused if they have none."""

_OFF_AT_ZERO = frozenset(
    {
        "model.attention_dropout",
        "model.moe_aux_loss_coeff",
        "model.moe_z_loss_coeff",
        "optim.min_lr",
        "optim.lr_warmup_init",
        "optim.lr_warmup_iters",
        "optim.lr_warmup_samples",
        "optim.lr_warmup_fraction",
        "training.eval_iters",
        "training.manual_gc_interval",
    }
)


def without_effect(run: RunConfig, processes: int) -> dict[str, str]:
    """Return the given options that have no effect, by key, each with the reason.

    An option on the command line or in an @file counts as given, unless its value requests nothing
    (``--eval-iters 0``). An option in a configuration file counts if its value is not the default,
    because the file that ``--print-config`` writes contains all options.
    """
    described = {one.key: one for one in every_field()}
    found: dict[str, str] = {}
    for idle in IDLE:
        new = [key for key in idle.options if key not in found and _asked(run, described[key])]
        if new and idle.applies(run, processes):
            found |= dict.fromkeys(new, idle.reason)
    return found


def sentence(idle: Mapping[str, str], run: RunConfig) -> str:
    """Return one line for the start of a run: ``no effect in this run: --rotary-base (...)``; empty
    if there are no options to list.
    """
    groups: dict[str, list[str]] = {}
    for described in every_field():
        if described.key in idle:
            value = getattr(getattr(run, described.section), described.name)
            groups.setdefault(idle[described.key], []).append(shown_flag(described, value))
    words = [f"{', '.join(flags)} ({reason})" for reason, flags in groups.items()]
    return f"no effect in this run: {'; '.join(words)}" if words else ""


def shown_flag(described: Field, value: Any) -> str:
    """Return the flag that sets a value: ``--no-load-optim`` for a switch that is off."""
    if described.kind.base is not bool:
        return described.flag
    return next(flag for flag, sets in described.switches.items() if sets is value)


def _asked(run: RunConfig, described: Field) -> bool:
    if not run.is_given(described.key):
        return False
    value, default = getattr(getattr(run, described.section), described.name), described.default
    if value in (None, (), "none", "auto") or (value == 0 and described.key in _OFF_AT_ZERO):
        return False
    if described.kind.base is bool:
        return bool(value != default)
    typed = run.origins is not None and run.origins[described.key].startswith(("flag", "@"))
    return typed or value != _derived(run, described)


def _derived(run: RunConfig, described: Field) -> Any:
    """Return the value that the option has when it is not given."""
    if not described.option.derived:
        return described.default
    section = getattr(run, described.section)
    others = {one.name: getattr(section, one.name) for one in section_fields(type(section))}
    return (
        unchecked(type(section), others | {described.name: None})
        .derive(lambda *names: True)
        .get(described.name)
    )
