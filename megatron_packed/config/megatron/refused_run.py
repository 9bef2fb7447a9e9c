"""Megatron-LM's flags for data, training, precision, checkpoints and reports that are refused."""

from __future__ import annotations

from megatron_packed.config.megatron.refused_kinds import RefusedFlags

RUN: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "there is no inference engine",
        "give --cuda-graph-impl local for training, or leave it out",
        ("--inference-cuda-graph-scope", "--inference-rng-tracker"),
    ),
    RefusedFlags(
        "non-finite values are always detected, on the device and without a host sync",
        "use --on-nonfinite stop|skip",
        ("--no-check-for-nan-in-loss-and-grad",),
    ),
    RefusedFlags(
        "there is no mock data",
        "give real documents with --data-path",
        ("--mock-data", "--sft-mock-dataset-config-json", "--varlen-mock-dataset-config-json"),
    ),
    RefusedFlags(
        "tokenizers are read only from local files, and no remote code is run",
        "use --tokenizer-type and --tokenizer-model",
        (
            "--tokenizer-metadata",
            "--trust-remote-code",
            "--tokenizer-library",
            "--vocab-extra-ids",
            "--tokenizer-hf-no-use-fast",
            "--tokenizer-hf-no-include-special-tokens",
            "--tokenizer-sentencepiece-legacy",
            "--tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
    ),
    RefusedFlags(
        "there is a single data loader, whose order depends only on --seed",
        "give JSONL files or indexed data sets with --data-path",
        (
            "--dataloader-type",
            "--object-storage-cache-path",
            "--mid-level-dataset-surplus",
            "--dataloader-fast-cache-load",
            "--fim-data",
            "--use-varlen-dataset",
            "--varlen-sbhd-validation",
        ),
    ),
    RefusedFlags(
        "the vocabulary is always padded to a multiple",
        "use --vocab-size and --make-vocab-size-divisible-by",
        ("--padded-vocab-size",),
    ),
    RefusedFlags(
        "messages have a single level",
        "leave it out; --log-jsonl records all numbers",
        ("--logging-level",),
    ),
    RefusedFlags(
        "packing has its own options",
        "use --packing-method, --packing-window and --max-documents-per-pack",
        (
            "--sequence-packing-scheduler",
            "--thd-tail-padding-policy",
            "--no-pad-packed-seq-by-appending-dummy-seq",
            "--rl-use-sequence-packing",
            "--rl-sequence-packing-max-sequences-per-bin",
            "--rl-sequence-packing-algo",
        ),
    ),
    RefusedFlags(
        "the batch size is constant during a run",
        "use --global-batch-size, with another value when the run is resumed",
        ("--rampup-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule"),
    ),
    RefusedFlags(
        "all parameters have the same learning rate",
        "use --lr, --min-lr and --lr-decay-style",
        ("--decoupled-lr", "--decoupled-min-lr"),
    ),
    RefusedFlags(
        "weight decay is constant",
        "use --weight-decay",
        ("--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style"),
    ),
    RefusedFlags(
        "AdamW with fp32 states is the only optimizer",
        "use --optimizer adam with --adam-beta1, --adam-beta2 and --adam-eps",
        (
            "--optimizer",
            "--sgd-momentum",
            "--muon-momentum",
            "--use-precision-aware-optimizer",
            "--main-grads-dtype",
            "--main-params-dtype",
            "--exp-avg-dtype",
            "--exp-avg-sq-dtype",
        ),
    ),
    RefusedFlags(
        "optimizer state always stays on the device",
        "leave it out",
        (
            "--optimizer-cpu-offload",
            "--optimizer-offload-fraction",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-torch-optimizer-for-cpu-offload",
        ),
    ),
    RefusedFlags(
        "PyTorch's allocator manages device memory",
        "leave it out",
        ("--empty-unused-memory-level",),
    ),
    RefusedFlags(
        "weights are always initialised from --seed, identically on all ranks",
        "leave it out; use --load with --finetune to start from saved weights",
        ("--data-parallel-random-init", "--no-initialization", "--init-model-with-meta-device"),
    ),
    RefusedFlags(
        "steps cannot be repeated or skipped on request",
        "use --on-nonfinite skip, and --deterministic-mode to compare runs",
        ("--rerun-mode", "--iterations-to-skip"),
    ),
    RefusedFlags(
        "training in fp16 is not supported",
        "use --bf16, which needs no loss scale",
        (
            "--fp16",
            "--loss-scale",
            "--initial-loss-scale",
            "--min-loss-scale",
            "--loss-scale-window",
            "--hysteresis",
        ),
    ),
    RefusedFlags(
        "training in FP8 or FP4 is not supported",
        "use --bf16",
        (
            "--fp8-format",
            "--fp8-recipe",
            "--fp8-margin",
            "--fp8-amax-history-len",
            "--fp8-amax-compute-algo",
            "--no-fp8-wgrad",
            "--disable-fp8-wgrad",
            "--fp8-param-gather",
            "--first-last-layers-bf16",
            "--num-layers-at-start-in-bf16",
            "--num-layers-at-end-in-bf16",
            "--fp4-format",
            "--fp4-recipe",
            "--fp4-param-gather",
            "--te-precision-config-file",
        ),
    ),
    RefusedFlags(
        "gradients are accumulated and reduced in fp32",
        "leave it out",
        ("--grad-reduce-in-bf16",),
    ),
    RefusedFlags(
        "there is only one kind of checkpoint",
        "use --save-interval, --save-retain and --async-save",
        ("--non-persistent-save-interval", "--non-persistent-ckpt-type", "--replication"),
    ),
    RefusedFlags(
        "checkpoints have one format: safetensors and a JSON manifest, written by all ranks",
        "leave it out",
        (
            "--ckpt-format",
            "--use-dist-ckpt",
            "--no-ckpt-fully-parallel-save",
            "--dist-ckpt-save-pre-mcore-014",
            "--ckpt-convert-format",
            "--ckpt-convert-save",
            "--auto-detect-ckpt-format",
        ),
    ),
    RefusedFlags(
        "options are never read from a checkpoint, only compared with it",
        "give the model's options again",
        (
            "--use-checkpoint-args",
            "--use-mp-args-from-checkpoint-args",
            "--no-use-tokenizer-model-from-checkpoint-args",
            "--disable-use-tokenizer-model-from-checkpoint-args",
        ),
    ),
    RefusedFlags(
        "tensors saved for recomputation are not split among ranks separately",
        "give --sequence-parallel, which splits them",
        ("--distribute-saved-activations",),
    ),
    RefusedFlags(
        "recomputation of MoE layers is selected like that of other modules",
        "give --recompute-granularity selective --recompute-modules moe",
        ("--moe-layer-recompute",),
    ),
    RefusedFlags(
        "the number of offloaded layers cannot be set",
        "give --offload-layer-inputs with --recompute-granularity full --recompute-method block "
        "--recompute-num-layers, or --fine-grained-activation-offloading",
        ("--cpu-offloading-num-layers",),
    ),
    RefusedFlags(
        "all tensors that the selected modules save are offloaded",
        "give fewer --offload-modules",
        ("--activation-offload-fraction",),
    ),
    RefusedFlags(
        "there are no pipeline stages to balance",
        "leave it out, or give fewer --offload-modules",
        ("--delta-offload-bytes-across-pp-ranks",),
    ),
    RefusedFlags(
        "copies to the host are captured in the graphs",
        "leave it out; a replay launches the copies too",
        ("--delay-offload-until-cuda-graph",),
    ),
    RefusedFlags(
        "these statistics are not collected",
        "use --log-jsonl, which records every measured value of each iteration",
        (
            "--log-energy",
            "--log-straggler",
            "--timing-log-level",
            "--timing-log-option",
            "--moe-per-layer-logging",
            "--log-moe-overload-factor",
        ),
    ),
    RefusedFlags(
        "values for TensorBoard cannot be selected one by one",
        "use --tensorboard-dir",
        (
            "--log-world-size-to-tensorboard",
            "--tensorboard-log-interval",
            "--tensorboard-queue-size",
        ),
    ),
    RefusedFlags(
        "this tracking service is not supported",
        "use --wandb-project, --mlflow-experiment or --tensorboard-dir",
        ("--one-logger-project",),
    ),
    RefusedFlags(
        "phases of a step have labels for torch.profiler only",
        "use --profile with --use-pytorch-profiler",
        ("--nvtx-ranges",),
    ),
)
