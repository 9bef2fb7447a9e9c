"""Options without effect in some runs, and the reasons, which a run prints at its start.

``IDLE`` lists these options and `effective_options.EFFECTIVE` all other options; a test fails if an
option is in neither. If an option requests other numbers, another backend or another output than the run gives,
a rule of its section refuses the option instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_packed.config.idle_model_options import MODEL_IDLE, Idle, keys_in
from megatron_packed.config.idle_parallel_options import PARALLEL_IDLE
from megatron_packed.config.options import Field
from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields, unchecked
from megatron_packed.config.sections.data_parts.tokenizer import TIKTOKEN, TRAINED_BPE
from megatron_packed.config.sections.memory import FULL, SELECTIVE


def _indexed(run: RunConfig) -> set[bool]:
    """Return, as a set, the answers to one question about each data path: is the path the prefix of
    an indexed data set? Indexed data sets are already tokenised.
    """
    paths = (*run.data.train_paths, *run.data.valid_blend.paths, *run.data.test_blend.paths)
    return {os.path.exists(path + ".idx") and not os.path.exists(path) for path in paths}


_SPIKE_OPTIONS = keys_in("training", "loss_spike_window loss_spike_factor grad_norm_spike_factor")
_STEP_OPTIONS = (
    *keys_in(
        "optim",
        "min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
        "lr_warmup_fraction lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style weight_decay "
        "weight_decay_incr_style start_weight_decay end_weight_decay weight_decay_incr_iters "
        "weight_decay_incr_samples clip_grad adam_beta1 adam_beta2 adam_eps",
    ),
    *keys_in(
        "training",
        "train_samples train_epochs early_stopping_patience exit_interval exit_duration_in_mins on_nonfinite "
        "check_weight_hash_across_dp_replicas_interval check_grad_hash_across_dp_replicas_interval loss_spike_policy",
    ),
    *_SPIKE_OPTIONS,
    *keys_in(
        "checkpoint",
        "save_interval save_retain save_retain_interval save_best async_save save_optim save_rng "
        "use_checkpoint_opt_param_scheduler",
    ),
    *keys_in("logging", "log_interval log_params_norm log_num_zeros_in_grad"),
    *keys_in(
        "profiling",
        "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_shapes",
    ),
)

IDLE: tuple[Idle, ...] = (
    *MODEL_IDLE,
    *PARALLEL_IDLE,
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
        keys_in("data", "data_fields max_bad_fraction data_cache_path"),
    ),
    Idle(
        "--mock-data reads no text",
        lambda run, _: run.data.mock_data,
        keys_in(
            "data",
            "chat_template sft_tokenizer_prompt_format answer_end multi_turn unprinted_policy "
            "chat_template_date chat_template_kwargs special_tokens_in_text data_rules",
        ),
    ),
    Idle(
        "--sft is not given, and text has no turns",
        lambda run, _: not run.data.sft,
        keys_in(
            "data",
            "multi_turn unprinted_policy chat_template_date chat_template_kwargs data_rules",
        ),
    ),
    Idle(
        "--sft-tokenizer-prompt-format makes one document of a conversation",
        lambda run, _: run.data.sft_tokenizer_prompt_format is not None,
        ("data.multi_turn",),
    ),
    Idle("--split is not given", lambda run, _: run.data.split is None, ("data.split_order",)),
    Idle(
        "--mock-data makes other documents for each part",
        lambda run, _: run.data.mock_data,
        ("data.split_order",),
    ),
    Idle(
        f"--tokenizer-type is not {TIKTOKEN}",
        lambda run, _: run.data.tokenizer_type != TIKTOKEN,
        keys_in("data", "tiktoken_num_special_tokens tiktoken_pattern"),
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
        keys_in("optim", "lr_decay_iters lr_decay_samples"),
    ),
    Idle(
        "--lr-decay-style is not WSD",
        lambda run, _: run.optim.lr_decay_style != "WSD",
        keys_in("optim", "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style"),
    ),
    Idle(
        "--weight-decay-incr-style is constant",
        lambda run, _: not run.optim.weight_decay_changes,
        keys_in("optim", "weight_decay_incr_iters weight_decay_incr_samples"),
    ),
    Idle(
        "the weight decay rises from --start-weight-decay to --end-weight-decay",
        lambda run, _: run.optim.weight_decay_changes,
        ("optim.weight_decay",),
    ),
    Idle("the run has no warm-up", lambda run, _: not run.warmup_iters, ("optim.lr_warmup_init",)),
    Idle(
        "--eval-iters is 0, and --full-validation is not given",
        lambda run, _: not run.training.eval_iters and not run.training.full_validation,
        ("training.eval_interval", "data.valid_data_path"),
    ),
    Idle("--eval-iters is 0", lambda run, _: not run.training.eval_iters, ("data.test_data_path",)),
    Idle(
        "--split leaves no data for validation",
        lambda run, _: run.data.split is not None and not run.data.has_validation,
        ("training.eval_interval",),
    ),
    Idle(
        "the run has neither validations nor a test",
        lambda run, _: not run.validates and not run.tests,
        keys_in("training", "eval_iters manual_gc_eval"),
    ),
    Idle(
        "--full-validation reads all validation data, and the run has no test",
        lambda run, _: run.training.full_validation and not run.tests,
        ("training.eval_iters",),
    ),
    Idle(
        "the run has no validations",
        lambda run, _: not run.validates,
        keys_in("training", "full_validation multiple_validation_sets validation_set_names"),
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
        keys_in("training", "manual_gc_interval manual_gc_eval"),
    ),
    Idle(
        "--cuda-graph-impl is none",
        lambda run, _: not run.cuda_graph.enabled,
        keys_in(
            "cuda_graph",
            "cuda_graph_modules cuda_graph_max_packed_seqs cuda_graph_strict cuda_graph_audit_interval "
            "cuda_graph_warmup_steps",
        ),
    ),
    Idle(
        f"--recompute-granularity {FULL} is not given",
        lambda run, _: run.memory.recompute_granularity != FULL,
        keys_in("memory", "recompute_method recompute_num_layers"),
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
        keys_in("memory", "min_offloaded_tensor_size offload_buffers offload_headroom_mib"),
    ),
    Idle(
        "--save is not given",
        lambda run, _: run.checkpoint.save is None,
        keys_in("checkpoint", "save_retain save_retain_interval async_save save_optim save_rng"),
    ),
    Idle(
        "--load is not given",
        lambda run, _: run.checkpoint.load is None,
        keys_in(
            "checkpoint",
            "exit_on_missing_checkpoint load_optim load_rng use_checkpoint_opt_param_scheduler",
        ),
    ),
    Idle(
        "--finetune loads only the weights",
        lambda run, _: run.checkpoint.finetune,
        keys_in("checkpoint", "load_optim load_rng use_checkpoint_opt_param_scheduler"),
    ),
    Idle(
        "--no-load-optim leaves out the schedule, too",
        lambda run, _: not run.checkpoint.load_optim,
        ("checkpoint.use_checkpoint_opt_param_scheduler",),
    ),
    Idle(
        "no checkpoint is loaded",
        lambda run, _: run.checkpoint.load is None and run.checkpoint.pretrained_checkpoint is None,
        keys_in("checkpoint", "dist_ckpt_strictness use_checkpoint_args"),
    ),
    Idle(
        "--wandb-project is not given",
        lambda run, _: run.logging.wandb_project is None,
        keys_in("logging", "wandb_exp_name wandb_save_dir wandb_entity"),
    ),
    Idle(
        "--mlflow-experiment is not given",
        lambda run, _: run.logging.mlflow_experiment is None,
        keys_in("logging", "mlflow_run_name mlflow_tracking_uri"),
    ),
    Idle(
        "--profile is not given",
        lambda run, _: not run.profiling.profile,
        keys_in(
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
