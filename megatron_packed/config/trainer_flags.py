"""Flags of Hugging Face trainers (Trainer, TRL, axolotl, Unsloth) and what to give in their place.

The parser refuses each of these flags with the flag of this project, or with the reason why there
is none. `docs/coming_from_trainers.md` has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_packed.config import trainer_values as values
from megatron_packed.config.errors import Problem

ANOTHER = "is a flag of another trainer"
FLAG = re.compile(r"--[a-z][a-z0-9-]*[a-z0-9]")
_VALUE = "{value}"


@dataclass(frozen=True, kw_only=True)
class TrainerFlags:
    """Flags of other trainers with the same answer."""

    names: str
    """The flags, separated by spaces, without dashes and with underscores."""
    cure: str
    """Text of the cure, in which ``{value}`` stands for the converted value."""
    rule: str = ANOTHER
    """Clause that says what is wrong with the flag."""
    convert: Callable[[str], str | None] = str
    """Function that returns the value for this project, or None if the value needs no flag."""
    blank: str = "N"
    """Text in place of the value if no value is given."""
    without: str = "leave it out"
    """Cure for values that need no flag."""

    @property
    def spelled(self) -> list[str]:
        return self.names.split()


TRAINER_FLAGS: tuple[TrainerFlags, ...] = (
    TrainerFlags(
        names="epochs num_epochs num_train_epochs max_epochs n_epochs",
        cure="give --train-epochs {value}",
    ),
    TrainerFlags(
        names="max_steps num_steps num_train_steps num_training_steps max_train_steps",
        cure="give --train-iters {value}",
        convert=values.steps,
        without="give --train-epochs or --train-iters",
    ),
    TrainerFlags(names="learning_rate", cure="give --lr {value}"),
    TrainerFlags(
        names="lr_scheduler lr_scheduler_type",
        cure="give --lr-decay-style {value}",
        convert=values.schedule,
        blank="linear, cosine, constant or WSD",
    ),
    TrainerFlags(names="warmup_ratio", cure="give --lr-warmup-fraction {value}"),
    TrainerFlags(
        names="warmup_steps num_warmup_steps warmup_iters",
        cure="give {value}",
        convert=values.warmup,
        blank="--lr-warmup-iters N",
    ),
    TrainerFlags(
        names="lr_scheduler_kwargs cosine_min_lr_ratio min_lr_ratio lr_end",
        cure="give the final learning rate with --min-lr",
    ),
    TrainerFlags(
        names="per_device_train_batch_size per_gpu_train_batch_size train_batch_size batch_size",
        rule="counts sequences, and a sequence of --seq-length tokens holds several documents",
        cure="give --micro-batch-size {value}",
    ),
    TrainerFlags(
        names="gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
        rule="follows from the batch sizes",
        cure="give --global-batch-size, which is --micro-batch-size x data-parallel ranks x {value}",
    ),
    TrainerFlags(
        names="""max_seq_length max_seq_len max_length max_sequence_length sequence_len
            sequence_length model_max_length block_size cutoff_len""",
        cure="give --seq-length {value}",
    ),
    TrainerFlags(
        names="max_grad_norm gradient_clipping gradient_clip_val",
        cure="give --clip-grad {value}",
    ),
    TrainerFlags(names="adam_epsilon", cure="give --adam-eps {value}"),
    TrainerFlags(names="optim optim_args", rule="the optimizer is AdamW", cure="leave it out"),
    TrainerFlags(names="logging_steps", cure="give --log-interval {value}"),
    TrainerFlags(names="eval_steps", cure="give --eval-interval {value}"),
    TrainerFlags(names="save_steps checkpointing_steps", cure="give --save-interval {value}"),
    TrainerFlags(names="save_total_limit", cure="give --save-retain {value}"),
    TrainerFlags(
        names="eval_strategy evaluation_strategy evals_per_epoch do_eval",
        rule="validations are counted in iterations",
        cure="give --eval-interval",
        convert=values.on,
    ),
    TrainerFlags(
        names="save_strategy saves_per_epoch",
        rule="checkpoints are counted in iterations",
        cure="give --save-interval",
        convert=values.on,
    ),
    TrainerFlags(
        names="logging_strategy logging_first_step",
        rule="logged steps are counted in iterations",
        cure="give --log-interval",
        convert=values.on,
    ),
    TrainerFlags(names="output_dir save_path", cure="give --save {value}", blank="DIR"),
    TrainerFlags(
        names="overwrite_output_dir do_train",
        rule="a run trains from the start unless --load names a folder with checkpoints",
        cure="leave it out",
    ),
    TrainerFlags(
        names="resume_from_checkpoint auto_resume_from_checkpoints resume",
        cure="give --load with the folder of --save",
        convert=values.on,
    ),
    TrainerFlags(names="logging_dir", cure="give --tensorboard-dir {value}", blank="DIR"),
    TrainerFlags(
        names="report_to log_with",
        cure="give {value}",
        convert=values.tracker,
        blank=" or ".join(values.TRACKERS.values()),
    ),
    TrainerFlags(
        names="run_name wandb_name wandb_run_name",
        cure="give --wandb-exp-name {value}, or --mlflow-run-name {value}",
        blank="NAME",
    ),
    TrainerFlags(
        names="""model_name_or_path model_name model_id base_model pretrained_model_name_or_path
            model""",
        rule="weights of Hugging Face are converted once",
        cure="run `megatron-packed convert --from-hf {value} --save weights`, and give "
        "@weights/model.args and --pretrained-checkpoint weights",
        convert=values.model,
        blank="DIR",
    ),
    TrainerFlags(
        names="dataset dataset_name dataset_id datasets dataset_path train_file train_files",
        rule="training data are files, local or on the Hugging Face Hub",
        cure="give --data-path {value}",
        convert=values.data_set,
        blank="FILE",
    ),
    TrainerFlags(
        names="validation_file eval_dataset eval_file valid_file test_datasets",
        rule="validation data are files",
        cure="give them with --valid-data-path, or give --split",
    ),
    TrainerFlags(
        names="val_set_size val_size",
        cure="give --split {value}",
        convert=values.split,
        blank="95,5",
    ),
    TrainerFlags(
        names="validation_split_percentage",
        cure="give --split {value}",
        convert=values.percent,
        blank="95,5",
    ),
    TrainerFlags(
        names="tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path",
        cure="give --tokenizer-type HuggingFaceTokenizer and, with --tokenizer-model, the path of "
        "a tokenizer.json",
    ),
    TrainerFlags(
        names="chat_template_path template", cure="give --chat-template {value}", blank="FILE"
    ),
    TrainerFlags(
        names="""packing sample_packing eval_packing eval_sample_packing multipack group_by_length
            train_sampling_strategy padding_free pad_to_sequence_len pad_to_max_length
            length_column_name packing_strategy""",
        rule="documents are always packed, and documents in a pack do not see each other",
        cure="leave it out",
    ),
    TrainerFlags(
        names="""train_on_inputs assistant_only_loss completion_only_loss train_on_responses_only
            roles_to_train""",
        rule="with --sft the answers are the targets",
        cure="give --sft",
    ),
    TrainerFlags(
        names="gradient_checkpointing use_gradient_checkpointing activation_checkpointing",
        cure="give --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        convert=values.on,
    ),
    TrainerFlags(
        names="gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        cure="give --recompute-granularity or --recompute-modules",
    ),
    TrainerFlags(
        names="half_precision_backend fp16_full_eval",
        rule="float16 is not supported",
        cure="give --bf16",
        convert=values.on,
    ),
    TrainerFlags(
        names="dtype torch_dtype mixed_precision",
        cure="give {value}",
        convert=values.dtype,
        blank="--bf16",
        without="leave it out for float32",
    ),
    TrainerFlags(
        names="deepspeed fsdp fsdp_config fsdp_version zero_stage dp_shard_size",
        rule="DeepSpeed and FSDP are not used",
        cure="give --use-distributed-optimizer for sharded optimizer states, and "
        "--tensor-model-parallel-size for large models",
        convert=values.on,
    ),
    TrainerFlags(
        names="""flash_attn flash_attention use_flash_attention_2 use_flash_attn xformers_attention
            sdp_attention eager_attention attn_implementation""",
        rule="the fastest attention kernel of the machine is chosen",
        cure="leave it out, or force a kernel with --attention-backend",
    ),
    TrainerFlags(
        names="""use_liger_kernel use_liger liger_kernel_config liger_rope liger_rms_norm
            liger_glu_activation liger_fused_linear_cross_entropy flash_attn_cross_entropy
            flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp cut_cross_entropy""",
        rule="fused kernels are chosen automatically",
        cure="leave it out; --require-fast-kernels refuses slow ones",
    ),
    TrainerFlags(
        names="torch_compile torch_compile_backend torch_compile_mode",
        rule="layers are not compiled",
        cure="give --cuda-graph-impl local to replay them as CUDA graphs",
        convert=values.on,
    ),
    TrainerFlags(
        names="""lora_r lora_rank r lora_alpha lora_dropout lora_target_modules lora_target_linear
            lora_target lora_modules_to_save lora_model_dir lora use_lora use_peft peft adapter
            use_rslora use_dora target_modules merge_adapters qlora use_qlora load_in_4bit
            load_in_8bit quantization_bit bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_config_kwargs
            use_bnb_nested_quant loftq_config finetuning_type""",
        rule="LoRA and quantized weights are not supported, and all weights are trained",
        cure="leave it out; `megatron-packed plan` estimates the memory",
    ),
    TrainerFlags(
        names="neftune_noise_alpha label_smoothing_factor label_smoothing",
        rule="noise on embeddings and label smoothing are not supported",
        cure="leave it out",
    ),
    TrainerFlags(
        names="""push_to_hub hub_model_id hub_token hub_strategy hub_private_repo push_model
            hub_path""",
        rule="nothing is uploaded",
        cure="export the model with `megatron-packed convert --to-hf`, and upload its folder",
    ),
    TrainerFlags(names="dataloader_num_workers", cure="give --num-workers {value}"),
    TrainerFlags(
        names="""dataset_num_proc dataset_processes preprocessing_num_workers
            dataset_prepared_path overwrite_cache dataloader_pin_memory
            dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last
            remove_unused_columns streaming""",
        rule="data is tokenised once, stored in a cache and read ahead",
        cure="leave it out; --data-cache-path names the cache",
    ),
    TrainerFlags(
        names="per_device_eval_batch_size eval_batch_size eval_accumulation_steps",
        rule="validation uses the batches of training",
        cure="leave it out; --eval-iters limits their number",
    ),
    TrainerFlags(
        names="auto_find_batch_size",
        rule="batch sizes are not searched during a run",
        cure="let `megatron-packed plan` estimate the memory of a --micro-batch-size",
    ),
    TrainerFlags(
        names="trust_remote_code",
        rule="code of a model or a tokenizer is never executed",
        cure="leave it out",
    ),
    TrainerFlags(names="use_cpu no_cuda", cure="give --device cpu", convert=values.on),
    TrainerFlags(names="full_determinism", cure="give --deterministic-mode", convert=values.on),
    TrainerFlags(
        names="ddp_backend", cure="give --distributed-backend {value}", blank="nccl or gloo"
    ),
    TrainerFlags(
        names="ddp_timeout",
        cure="give --distributed-timeout-minutes {value}",
        convert=values.minutes,
    ),
    TrainerFlags(
        names="sequence_parallel_degree sequence_parallel_size",
        cure="give --context-parallel-size {value}",
    ),
    TrainerFlags(
        names="tensor_parallel_size tp_size", cure="give --tensor-model-parallel-size {value}"
    ),
    TrainerFlags(
        names="local_rank ddp_find_unused_parameters ddp_bucket_cap_mb use_cache disable_tqdm",
        rule="does not concern this project",
        cure="leave it out",
    ),
)


@cache
def _by_name() -> dict[str, TrainerFlags]:
    return {name: group for group in TRAINER_FLAGS for name in group.spelled}


def answer(name: str, texts: Sequence[str], shown: str | None = None) -> Problem | None:
    """Return the refusal of another trainer's flag, with its cure; None for other flags.

    Args:
        name: the flag or the key, with or without dashes.
        texts: its values.
        shown: text that names the flag in the problem; ``name`` when not given.
    Example:
        ``answer("num_train_epochs", ["3"])`` has the cure ``give --train-epochs 3``.
    """
    group = _by_name().get(name.lstrip("-").lower().replace("-", "_"))
    if group is None:
        return None
    value = " ".join(texts)
    return Problem(shown or name, value, group.rule, cure_of(group, value))


def cure_of(group: TrainerFlags, value: str) -> str:
    """Return the cure for a value; an empty value leaves a placeholder."""
    if not value:
        return group.cure.replace(_VALUE, group.blank)
    converted = group.convert(value)
    return group.without if converted is None else group.cure.replace(_VALUE, converted)


def flags_in(problem: Problem) -> list[str]:
    """Return the flags of this project that a cure names."""
    return FLAG.findall(problem.cure)
