"""Options without effect in a run: each is reported with the reason, and every option declares its
conditions or always has an effect.
"""

import re

import pytest

from megatron_packed.config import launch_checks
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.parser.command_line import every_field, known_flags
from megatron_packed.config.parser.parse import parse_or_exit, parse_with_sources
from megatron_packed.config.parser.print_config import config_yaml
from megatron_packed.config.sections.cuda_graph import TRANSFORMER_ENGINE
from support.command_lines import argv_of, processes_of

MOE = "--hybrid-layer-pattern ME --num-experts 4 --disable-bias-linear"
NO_ATTENTION, NO_MAMBA, NO_EXPERTS = (f"the pattern has no {symbol} layer" for symbol in "*ME")
# Each entry is a change of the valid command line, and a dict of the options that then have no
# effect, with the reason. In a change, ^N sets the number of processes.
CASES = {
    "": {},
    (
        "--hybrid-layer-pattern M- --num-query-groups 2 --kv-channels 8 --add-qkv-bias --rotary-base 5000 "
        "--position-embedding-type rope --rotary-percent 0.5 --max-position-embeddings 128 --attention-backend sdpa"
    ): {
        NO_ATTENTION: (
            "num_attention_heads num_query_groups kv_channels add_qkv_bias rotary_base "
            "position_embedding_type rotary_percent max_position_embeddings "
            "attention_backend"
        )
    },
    "--rotary-base 10000 --rotary-percent 1.0 --max-position-embeddings 128": {
        "--position-embedding-type is none": "rotary_base rotary_percent max_position_embeddings"
    },
    "--position-embedding-type rope --rotary-base 5000 --max-position-embeddings 128": {},
    (
        "--hybrid-layer-pattern *- --mamba-head-dim 32 --mamba-state-dim 16 --mamba-num-groups 1 --mamba-num-heads 2 "
        "--mamba-chunk-size 64 --ssd-backend reference --conv-backend reference"
    ): {
        NO_MAMBA: (
            "mamba_head_dim mamba_state_dim mamba_num_groups mamba_num_heads "
            "mamba_chunk_size ssd_backend"
        ),
        "no layer with a convolution": "conv_backend",
    },
    (
        "--linear-num-key-heads 4 --linear-value-head-dim 64 --linear-allow-neg-eigval "
        "--gated-delta-rule-backend reference"
    ): {
        "the pattern has no G layer": (
            "linear_num_key_heads linear_value_head_dim linear_allow_neg_eigval "
            "gated_delta_rule_backend"
        )
    },
    (
        "--position-embedding-type rope --rope-scaling-factor 4 --qk-layernorm-scope all_heads "
        "--window-attn-skip-freq 4"
    ): {
        "--use-rope-scaling is not given": "rope_scaling_factor",
        "--qk-layernorm is not given": "qk_layernorm_scope",
        "--window-size is not given": "window_attn_skip_freq",
    },
    "--window-size 127,0 --window-attn-skip-freq 4": {
        "the window covers the longest document": "window_size window_attn_skip_freq"
    },
    "--mtp-num-layers 0 --mtp-loss-scaling-factor 0.3 --mtp-use-repeated-layer": {
        "the pattern has no / part": "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer"
    },
    "--hybrid-layer-pattern M*-/*- --mtp-loss-scaling-factor 0.3 --mtp-use-repeated-layer": {
        "the pattern has one / part": "mtp_use_repeated_layer"
    },
    f"{MOE} ~--num-attention-heads --moe-shared-expert-gate --moe-shared-expert-overlap": {
        "--moe-shared-expert-intermediate-size is not given": "moe_shared_expert_gate moe_shared_expert_overlap"
    },
    f"{MOE} ~--num-attention-heads --moe-router-num-groups 2 --moe-router-group-topk 2": {
        "all groups of experts": "moe_router_num_groups moe_router_group_topk"
    },
    f"{MOE} ~--num-attention-heads --moe-router-num-groups 2": {
        "all groups of experts": "moe_router_num_groups"
    },
    (
        "--hybrid-layer-pattern * --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1 --moe-router-topk 4 "
        "--moe-token-drop-policy position --ffn-hidden-size 64 --swiglu --expert-tensor-parallel-size 1"
    ): {
        NO_EXPERTS: (
            "moe_aux_loss_coeff moe_expert_capacity_factor moe_router_topk "
            "moe_token_drop_policy expert_tensor_parallel_size"
        ),
        "the pattern has no - or E layer": "ffn_hidden_size swiglu",
    },
    "--hybrid-layer-pattern M --disable-bias-linear --moe-router-load-balancing-type none --moe-aux-loss-coeff 0": {
        "no layer that can have a bias": "add_bias_linear",
        NO_ATTENTION: "num_attention_heads",
    },
    (
        f"~--num-attention-heads {MOE} --moe-router-score-function sigmoid --moe-router-pre-softmax "
        "--moe-router-bias-update-rate 0.01 --moe-token-drop-policy probs --moe-router-load-balancing-type aux_loss "
        "--moe-token-dispatcher-type alltoall"
    ): {
        "is sigmoid": "moe_router_pre_softmax",
        "--moe-router-enable-expert-bias is not given": "moe_router_bias_update_rate",
        "--moe-expert-capacity-factor is not given": "moe_token_drop_policy",
        "--moe-aux-loss-coeff is 0": "moe_router_load_balancing_type",
        "every rank has all experts": "moe_token_dispatcher_type",
    },
    (
        f"~--num-attention-heads {MOE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1 "
        "--ffn-hidden-size 64 --moe-ffn-hidden-size 32"
    ): {
        "--moe-router-load-balancing-type is none": "moe_aux_loss_coeff",
        "--moe-ffn-hidden-size sets the width": "ffn_hidden_size",
    },
    (
        f"^2 ~--num-attention-heads {MOE} --expert-model-parallel-size 2 --moe-pad-expert-input-to-capacity "
        "--moe-expert-capacity-factor 1 --moe-token-drop-policy position"
    ): {"is allgather": "moe_pad_expert_input_to_capacity"},
    f"^2 ~--num-attention-heads {MOE} --expert-model-parallel-size 2 --moe-comm-overlap-parts 2": {
        "is allgather": "moe_comm_overlap_parts"
    },
    f"~--num-attention-heads {MOE} --moe-token-dispatcher-type alltoall --moe-comm-overlap-parts 2": {
        "every rank has all experts": "moe_token_dispatcher_type moe_comm_overlap_parts"
    },
    (
        "--sequence-parallel --cp-comm-type a2a --cp-partition-mode zigzag --linear-cp-mode chunkwise "
        "--mamba-cp-comm-type state --cp-comm-overlap-parts 2 "
        "--overlap-grad-reduce --use-distributed-optimizer --ddp-bucket-size 9 "
        "--check-weight-hash-across-dp-replicas-interval 5 --check-grad-hash-across-dp-replicas-interval 5 "
        "--distributed-backend gloo --distributed-timeout-minutes 3"
    ): {
        "--tensor-model-parallel-size is 1": "sequence_parallel",
        "--context-parallel-size is 1": (
            "cp_comm_type cp_partition_mode mamba_cp_comm_type cp_comm_overlap_parts"
        ),
        "the pattern has no G layer": "linear_cp_mode",
        "no two ranks have the same weights": (
            "overlap_grad_reduce use_distributed_optimizer "
            "check_weight_hash_across_dp_replicas_interval "
            "check_grad_hash_across_dp_replicas_interval"
        ),
        "the run has one process": "distributed_backend distributed_timeout_minutes",
    },
    (
        "^2 --overlap-grad-reduce --use-distributed-optimizer --ddp-bucket-size 9 --distributed-backend gloo "
        "--check-weight-hash-across-dp-replicas-interval 5 --check-grad-hash-across-dp-replicas-interval 5"
    ): {},
    "^2 --context-parallel-size 2 --cp-comm-type p2p --mamba-cp-comm-type state --cp-comm-overlap-parts 2": {
        "no layer exchanges heads in more than one part": "cp_comm_overlap_parts"
    },
    "^2 --context-parallel-size 2 --mamba-num-groups 2 --num-attention-heads 2 --cp-comm-overlap-parts 4": {
        "no layer exchanges heads in more than one part": "cp_comm_overlap_parts"
    },
    "^2 --context-parallel-size 2 --num-attention-heads 4 --cp-comm-overlap-parts 2": {},
    "^2 --context-parallel-size 2 --cp-partition-mode contiguous": {
        "attention exchanges heads, not keys and values": "cp_partition_mode"
    },
    "^2 --context-parallel-size 2 --cp-comm-type all_gather --cp-partition-mode contiguous": {},
    (
        f"^2 {MOE} ~--num-attention-heads --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall "
        "--all-to-all-backend symmetric_memory"
    ): {"no all-to-all has parts of equal, static sizes": "all_to_all_backend"},
    "^2 --context-parallel-size 2 --all-to-all-backend symmetric_memory": {},
    "--bf16 --check-weight-hash-across-dp-replicas-interval 5": {},
    "^2 --cuda-graph-impl full_iteration --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": {
        "graphs of whole steps gather the weights at the end": "overlap_param_gather"
    },
    "^2 --tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce": {
        "no two ranks have the same weights": "overlap_grad_reduce"
    },
    "^2 --tensor-model-parallel-size 2 --tp-comm-overlap --disable-tp-comm-overlap-ag": {
        "--sequence-parallel is not given": "tp_comm_overlap tp_comm_overlap_ag"
    },
    "^2 --tensor-model-parallel-size 2 --sequence-parallel --disable-tp-comm-bulk-dgrad": {
        "--tp-comm-overlap is not given": "tp_comm_bulk_dgrad"
    },
    (
        "^2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
        "--tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-wgrad"
    ): {"--tp-comm-overlap-rs-dgrad runs this collective in another way": "tp_comm_bulk_wgrad"},
    (
        "^2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
        "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-wgrad"
    ): {"every collective is switched off": "tp_comm_overlap"},
    (
        f"^2 {MOE} ~--num-attention-heads --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 64 "
        "--moe-shared-expert-overlap"
    ): {"tensor-parallel ranks dispatch different tokens": "moe_shared_expert_overlap"},
    (
        "^2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
        "--transformer-impl transformer_engine --bf16"
    ): {"layers of TransformerEngine run their collectives themselves": "tp_comm_overlap"},
    (
        "^2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --lora-rank 4 "
        "--lora-keep-balancing"
    ): {
        "projections with adapters run their collectives apart": "tp_comm_overlap",
        "the pattern has no E layer": "lora_keep_balancing",
    },
    "--valid-data-path valid.jsonl --skip-train --eval-interval 1 --lora-rank 4 --lora-dropout 0.1": {
        "--skip-train runs no training step": "lora_dropout"
    },
    "--lora-alpha 16 --lora-rslora --lora-target-modules attention": {
        "--lora-rank is not given": "lora_alpha lora_rslora lora_target_modules"
    },
    (
        f"{MOE} ~--num-attention-heads --lora-rank 4 --moe-aux-loss-coeff 0.01 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.01 --moe-z-loss-coeff 0.1"
    ): {
        "adapters train without it": "moe_aux_loss_coeff moe_router_bias_update_rate moe_z_loss_coeff"
    },
    f"{MOE} ~--num-attention-heads --lora-rank 4 --moe-aux-loss-coeff 0.01 --lora-keep-balancing": {},
    "--lora-rank 4 --lora-dropout 0.1 --lora-modules-to-save embedding.*": {},
    "--keep-pieces-without-targets": {"--sft is not given": "keep_pieces_without_targets"},
    "--sft --keep-pieces-without-targets": {},
    "--no-mmap-bin-files --tiktoken-pattern v1 --tiktoken-num-special-tokens 900 --tokenizer-vocab-size 900": {
        "no data path is an indexed data set": "mmap_bin_files",
        "is not TikTokenizer": "tiktoken_pattern tiktoken_num_special_tokens",
        "is not TrainedBPETokenizer": "tokenizer_vocab_size",
    },
    "--use-checkpoint-args": {"no checkpoint is loaded": "use_checkpoint_args"},
    "--use-checkpoint-opt_param-scheduler": {
        "--load is not given": "use_checkpoint_opt_param_scheduler"
    },
    "--load ckpt --save ckpt --no-load-optim --use-checkpoint-opt_param-scheduler": {
        "--no-load-optim leaves out the schedule": "use_checkpoint_opt_param_scheduler"
    },
    "~--data-path --mock-data --sft --chat-template chatml --answer-end document": {
        "--mock-data reads no text": "chat_template answer_end"
    },
    (
        "--multi-turn last --unprinted-policy count --chat-template-date 2026-11-28 --data-rules 1 "
        "--chat-template-kwargs {}"
    ): {
        "text has no turns": "multi_turn unprinted_policy chat_template_date chat_template_kwargs data_rules"
    },
    "--sft --sft-tokenizer-prompt-format default --multi-turn last --unprinted-policy count": {
        "makes one document of a conversation": "multi_turn"
    },
    "--sft --special-tokens-in-text letters --chat-template-date 2026-11-28": {},
    "--sft --split-order shuffled": {"--split is not given": "split_order"},
    "~--data-path --mock-data --split 8,1,1 --split-order shuffled --eval-interval 5": {
        "--mock-data makes other documents for each part": "split_order"
    },
    "--data-path corpus_text --no-mmap-bin-files --max-bad-fraction 0.5 --data-cache-path .": {
        "is already tokenised": "max_bad_fraction data_cache_path"
    },
    (
        "--min-lr 1e-4 --lr-decay-style constant --lr-decay-iters 9 --lr-warmup-init 1e-5 --lr-wsd-decay-iters 3 "
        "--lr-wsd-decay-style cosine"
    ): {
        "is constant": "min_lr lr_decay_iters",
        "the run has no warm-up": "lr_warmup_init",
        "is not WSD": "lr_wsd_decay_iters lr_wsd_decay_style",
    },
    "--use-precision-aware-optimizer --moment-rounding nearest": {
        "weights and moments are fp32": "use_precision_aware_optimizer",
        "all moments are fp32": "moment_rounding",
    },
    "--bf16 --use-precision-aware-optimizer": {},
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --moment-rounding nearest": {},
    "--weight-decay-incr-iters 9": {
        "--weight-decay-incr-style is constant": "weight_decay_incr_iters"
    },
    "--weight-decay-incr-samples 9": {
        "--weight-decay-incr-style is constant": "weight_decay_incr_samples"
    },
    "--weight-decay 0.2 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear": {
        "the weight decay rises": "weight_decay"
    },
    "--lr-decay-style constant --lr-decay-iters 9 --lr-warmup-fraction 0.2 --lr-warmup-init 1e-5": {},
    "--eval-iters 10 --manual-gc --no-manual-gc-eval": {
        "neither validations nor a test": "eval_iters manual_gc_eval"
    },
    "--full-validation --multiple-validation-sets": {
        "the run has no validations": "full_validation multiple_validation_sets"
    },
    "--full-validation --eval-iters 9 --eval-interval 5 --valid-data-path valid.jsonl": {
        "--full-validation reads all validation data": "eval_iters"
    },
    "--full-validation --eval-iters 0 --eval-interval 5 --valid-data-path valid.jsonl": {},
    "--test-data-path valid.jsonl --eval-iters 0": {"--eval-iters is 0": "test_data_path"},
    "--split 100,0,0 --eval-interval 5": {"--split leaves no data": "eval_interval"},
    "--split 90,10 --eval-interval 5": {},
    "--valid-data-path valid.jsonl --eval-interval 5 --eval-iters 0": {
        "--eval-iters is 0": "valid_data_path eval_interval"
    },
    "--valid-data-path valid.jsonl --skip-train --eval-interval 1 --clip-grad 0.5 --log-interval 2": {
        "--skip-train runs no training step": "clip_grad log_interval"
    },
    "--loss-spike-policy off --loss-spike-window 4 --loss-spike-factor 2 --grad-norm-spike-factor 2": {
        "--loss-spike-policy is off": "loss_spike_window loss_spike_factor grad_norm_spike_factor"
    },
    "--loss-spike-policy skip --loss-spike-factor 2 --loss-spike-window 19 --train-iters 10": {
        "before half of": "loss_spike_policy loss_spike_window loss_spike_factor"
    },
    "--loss-spike-policy skip --loss-spike-window 18 --train-iters 10": {},
    "--valid-metric-samples 5 --sample-max-new-tokens 7": {
        "--valid-metric is not given": "valid_metric_samples",
        "neither --sample-prompts nor --valid-metric": "sample_max_new_tokens",
    },
    "--grad-reduce-in-bf16 --main-grads-dtype bf16": {
        "the weights are fp32": "grad_reduce_in_bf16 main_grads_dtype"
    },
    "--bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all": {
        "gradients are accumulated in fp32": "ddp_param_name_patterns_for_fp32_local_accumulation"
    },
    "^2 --bf16 --grad-reduce-in-bf16 --no-ddp-reduce-scatter-with-fp32-accumulation": {},
    "--manual-gc-interval 5 --no-manual-gc-eval": {
        "--manual-gc is not given": "manual_gc_interval",
        "neither validations nor a test": "manual_gc_eval",
    },
    "--cuda-graph-warmup-steps 3": {"--cuda-graph-impl is none": "cuda_graph_warmup_steps"},
    "--recompute-method block --recompute-num-layers 9 --recompute-modules mlp": {
        "granularity full": "recompute_method recompute_num_layers",
        "granularity selective": "recompute_modules",
    },
    "--recompute-activations --recompute-method uniform --recompute-num-layers 9": {
        "granularity full": "recompute_method recompute_num_layers"
    },
    "--offload-modules mlp_act --offload-buffers 4 --offload-headroom-mib 0 --min-offloaded-tensor-size 1": {
        "--fine-grained-activation-offloading is not given": "offload_modules",
        "nothing is offloaded": "offload_buffers offload_headroom_mib min_offloaded_tensor_size",
    },
    "--save-retain 2 --save-retain-interval 4 --async-save --no-save-optim --no-save-rng": {
        "--save is not given": "save_retain save_retain_interval async_save save_optim save_rng"
    },
    "--exit-on-missing-checkpoint --no-load-optim --no-load-rng --dist-ckpt-strictness log_all": {
        "--load is not given": "exit_on_missing_checkpoint load_optim load_rng",
        "no checkpoint is loaded": "dist_ckpt_strictness",
    },
    "--load empty --finetune --no-load-optim --dist-ckpt-strictness log_all": {
        "--finetune loads only the weights": "load_optim"
    },
    "--wandb-exp-name a --wandb-save-dir b --mlflow-run-name c": {
        "--wandb-project is not given": "wandb_exp_name wandb_save_dir",
        "--mlflow-experiment is not given": "mlflow_run_name",
    },
    (
        "--profile-step-start 10 --profile-step-end 3 --profile-ranks 5 --use-pytorch-profiler --record-shapes "
        "--memory-snapshot-path a.pickle"
    ): {
        "--profile is not given": (
            "profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_shapes"
        ),
        "--record-memory-history is not given": "memory_snapshot_path",
    },
    "--profile --profile-step-start 2 --profile-step-end 4 --record-shapes": {
        "--use-pytorch-profiler is not given": "record_shapes"
    },
    "--no-sequence-parallel --no-overlap-grad-reduce --eval-iters 0 --lr-warmup-init 0 --cuda-graph-modules full": {},
}


def reasons(change: str) -> dict[str, str]:
    """Return the options without effect of a case, each with its reason."""
    return {name: reason for reason, names in CASES[change].items() for name in names.split()}


@pytest.mark.parametrize("change", CASES)
def test_what_changes_nothing_is_found_with_its_reason(
    right, tmp_path, monkeypatch, change
) -> None:
    expected = reasons(change)
    if TRANSFORMER_ENGINE in change:  # its options must not depend on packages of this machine
        monkeypatch.setattr(launch_checks, "is_installed", lambda package: True)
    (tmp_path / "corpus_text.idx").write_bytes(b"1")
    parsed = parse_with_sources(argv_of(right, change), processes_of(change))
    found = {key.partition(".")[2]: reason for key, reason in parsed.idle.items()}
    assert found.keys() == expected.keys()
    for name, reason in found.items():
        assert expected[name] in reason, (name, reason)


# Options that have an effect in every run, or that a rule refuses if they have none.
ALWAYS_EFFECTIVE = {
    "model": "hybrid_layer_pattern hidden_size normalization norm_epsilon hidden_dropout init_method_std "
    "untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by "
    "apply_layernorm_1p embedding_multiplier residual_multiplier logits_scaling "
    # Rules refuse experts without an E layer.
    "num_experts moe_shared_expert_intermediate_size moe_latent_size",
    "parallel": "tensor_model_parallel_size context_parallel_size expert_model_parallel_size "
    "pipeline_model_parallel_size "
    # The gradient norm is summed bucket by bucket, so its rounding depends on the bucket size.
    "ddp_bucket_size",
    "packing": "seq_length micro_batch_size global_batch_size rampup_batch_size packing_method packing_window "
    "max_documents_per_pack pad_packed_seq_alignment max_document_length overlong_policy",
    "data": "mock_data data_path train_data_path data_args_path per_split_data_args_path split sft "
    "num_workers tokenizer_type padded_vocab_size "
    # Rules refuse these without a tokenizer that uses them.
    "tokenizer_model vocab_file merge_file tokenizer_special_tokens null_tokenizer_eod_id",
    "optim": "lr optimizer_backend",
    "training": "train_iters valid_metric skip_train manual_gc seed bf16 deterministic_mode isolation_self_test "
    "device transformer_impl require_fast_kernels",
    "cuda_graph": "cuda_graph_impl",
    "memory": "recompute_granularity offload_layer_inputs fine_grained_activation_offloading",
    "checkpoint": "save load ckpt_step finetune begin_phase pretrained_checkpoint load_adapter",
    "logging": "brief_start log_progress log_jsonl tensorboard_dir report sample_prompts wandb_project "
    "mlflow_experiment",
    "profiling": "record_memory_history",
}


def test_an_option_without_conditions_always_has_an_effect() -> None:
    """Every option declares ``only_if``, or is in the list of options that always have an effect."""
    listed = {
        f"{section}.{name}" for section, names in ALWAYS_EFFECTIVE.items() for name in names.split()
    }
    assert listed == {field.key for field in every_field() if not field.option.conditions}


def test_every_condition_has_a_case() -> None:
    seen = [case for change in CASES for case in reasons(change).items()]
    names: dict[str, set[str]] = {}
    for field in every_field():
        for condition in field.option.conditions:
            names.setdefault(condition.reason, set()).add(field.name)
    for reason, fields in names.items():
        assert any(name in fields and part in reason for name, part in seen), reason


def test_reasons_name_flags_that_exist() -> None:
    flags = known_flags()
    for field in every_field():
        for condition in field.option.conditions:
            assert set(re.findall(r"--[\w-]+", condition.reason)) <= flags, condition.reason


def test_what_print_config_writes_has_no_options_without_effect_of_its_own(right, tmp_path) -> None:
    """When the printed file is read again, only the options that were given are reported as idle,
    although the file contains all options.
    """
    parsed = parse_with_sources(
        argv_of(right, "--hybrid-layer-pattern M --mamba-num-groups 2 --min-lr 1e-4")
    )
    (tmp_path / "run.yaml").write_text(config_yaml(parsed))
    again = parse_with_sources(["--config", "run.yaml"])
    assert (
        without_effect(again.config, 1)
        == {"model.num_attention_heads": NO_ATTENTION}
        == parsed.idle
    )


def test_one_line_on_stderr_and_a_mark_in_what_is_printed(right, capsys, monkeypatch) -> None:
    argv = argv_of(
        right,
        "--hybrid-layer-pattern M- --no-load-optim --rotary-base 5 --no-load-rng --eval-iters 3",
    )
    line = (
        "no effect in this run: --num-attention-heads, --rotary-base (the pattern has no * layer); --eval-iters (the "
        "run has neither validations nor a test); --no-load-optim, --no-load-rng (--load is not given)\n"
    )
    parse_or_exit(argv)
    assert capsys.readouterr().err == line
    with pytest.raises(SystemExit):
        parse_or_exit([*argv, "--print-config"])
    marked = [
        text.split("# ")[1] for text in capsys.readouterr().out.splitlines() if "no effect" in text
    ]
    assert marked == [
        "flag --num-attention-heads, no effect: the pattern has no * layer",
        "flag --rotary-base, no effect: the pattern has no * layer",
        "flag --eval-iters, no effect: the run has neither validations nor a test",
        "flag --no-load-optim, no effect: --load is not given",
        "flag --no-load-rng, no effect: --load is not given",
    ]
    with pytest.raises(SystemExit):
        parse_or_exit([*argv, "--explain"], lambda config: "explained\n")
    assert capsys.readouterr() == ("explained\n", line)
    parse_or_exit(argv, launched=False)  # a program that only inspects a run prints no such line
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_or_exit(argv)
    assert capsys.readouterr().err == ""
