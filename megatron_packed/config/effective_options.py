"""Options that are not in the table of idle options."""

from __future__ import annotations

from megatron_packed.config.idle_model_options import keys_in

EFFECTIVE: frozenset[str] = frozenset(
    {
        *keys_in(
            "model",
            "hybrid_layer_pattern hidden_size normalization norm_epsilon hidden_dropout init_method_std "
            "untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by "
            "apply_layernorm_1p embedding_multiplier residual_multiplier logits_scaling",
        ),
        # Rules refuse every value of these options that would have no effect: attention dropout
        # other than 0, pipeline sizes other than 1, and experts without an E layer.
        "model.attention_dropout",
        "parallel.pipeline_model_parallel_size",
        *keys_in("model", "num_experts moe_shared_expert_intermediate_size moe_latent_size"),
        *keys_in(
            "parallel",
            "tensor_model_parallel_size context_parallel_size expert_model_parallel_size",
        ),
        # The bucket size has an effect without replicas too: the gradient norm is summed bucket by
        # bucket, so its rounding depends on the bucket size.
        "parallel.ddp_bucket_size",
        *keys_in(
            "packing",
            "seq_length micro_batch_size global_batch_size rampup_batch_size packing_method packing_window "
            "max_documents_per_pack pad_packed_seq_alignment max_document_length overlong_policy",
        ),
        *keys_in(
            "data",
            "mock_data data_path train_data_path data_args_path per_split_data_args_path split sft "
            "num_workers tokenizer_type padded_vocab_size",
        ),
        # Rules refuse these options without a tokenizer that uses them, or without --sft.
        *keys_in(
            "data",
            "tokenizer_model vocab_file merge_file tokenizer_special_tokens null_tokenizer_eod_id ",
        ),
        *keys_in("optim", "lr optimizer_backend"),
        *keys_in(
            "training",
            "train_iters valid_metric skip_train manual_gc seed bf16 deterministic_mode isolation_self_test device "
            "transformer_impl require_fast_kernels",
        ),
        "cuda_graph.cuda_graph_impl",
        *keys_in(
            "memory",
            "recompute_granularity offload_layer_inputs fine_grained_activation_offloading",
        ),
        *keys_in("checkpoint", "save load ckpt_step finetune begin_phase pretrained_checkpoint"),
        *keys_in(
            "logging",
            "brief_start log_progress log_jsonl tensorboard_dir report sample_prompts wandb_project "
            "mlflow_experiment",
        ),
        "profiling.record_memory_history",
    }
)
"""Options that always have an effect, or that are refused if they have none."""
