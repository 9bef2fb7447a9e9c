"""Megatron-LM's flags for data, training, precision, checkpoints and reports that are refused."""

from __future__ import annotations

from megatron_packed.config.megatron.refused_kinds import RefusedFlags

RUN: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "there is no inference engine",
        "use --cuda-graph-impl local for training",
        ("--inference-cuda-graph-scope", "--inference-rng-tracker"),
    ),
    RefusedFlags(
        "--mock-data has no settings",
        "use --mock-data alone, or real documents with --data-path",
        ("--sft-mock-dataset-config-json", "--varlen-mock-dataset-config-json"),
    ),
    RefusedFlags(
        "tokenizers are read only from local files, and no remote code is run",
        "use --tokenizer-type and --tokenizer-model",
        (
            "--tokenizer-metadata",
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
            "--fim-data",
            "--use-varlen-dataset",
            "--varlen-sbhd-validation",
        ),
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
        "the batch size does not depend on the number of processes or on a list of samples",
        "use --rampup-batch-size, or --global-batch-size with another value when the run is resumed",
        ("--decrease-batch-size-if-needed", "--step-batch-size-schedule"),
    ),
    RefusedFlags(
        "all parameters have the same learning rate",
        "use --lr, --min-lr and --lr-decay-style",
        ("--decoupled-lr", "--decoupled-min-lr"),
    ),
    RefusedFlags(
        "AdamW with fp32 states is the only optimizer",
        "use --optimizer adam with --adam-beta1, --adam-beta2 and --adam-eps",
        (
            "--optimizer",
            "--sgd-momentum",
            "--muon-momentum",
            "--main-grads-dtype",
            "--main-params-dtype",
            "--exp-avg-dtype",
            "--exp-avg-sq-dtype",
        ),
    ),
    RefusedFlags(
        "optimizer state always stays on the device; another place would change memory only",
        "use --use-distributed-optimizer to reduce it",
        (
            "--optimizer-cpu-offload",
            "--optimizer-offload-fraction",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-torch-optimizer-for-cpu-offload",
        ),
    ),
    RefusedFlags(
        "weights are always initialised from --seed, identically on all ranks",
        "use --load with --finetune to start from saved weights",
        ("--data-parallel-random-init", "--no-initialization"),
    ),
    RefusedFlags(
        "steps cannot be repeated or skipped on request",
        "use --on-nonfinite skip, and --deterministic-mode to compare runs",
        ("--iterations-to-skip",),
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
            "--fp4-format",
            "--fp4-recipe",
            "--fp4-param-gather",
            "--te-precision-config-file",
        ),
    ),
    RefusedFlags(
        "gradients are accumulated and reduced in fp32, so bf16 would round them differently",
        "use --overlap-grad-reduce to hide the time of reductions",
        ("--grad-reduce-in-bf16",),
    ),
    RefusedFlags(
        "there is only one kind of checkpoint",
        "use --save-interval, --save-retain and --async-save",
        ("--non-persistent-save-interval", "--non-persistent-ckpt-type", "--replication"),
    ),
    RefusedFlags(
        "a training run converts no checkpoint",
        "use megatron-packed convert",
        (
            "--ckpt-convert-format",
            "--ckpt-convert-save",
        ),
    ),
    RefusedFlags(
        "the layout is never read from a checkpoint, which can be loaded into any layout",
        "give the layout's options again",
        ("--use-mp-args-from-checkpoint-args",),
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
        "give fewer --offload-modules",
        ("--delta-offload-bytes-across-pp-ranks",),
    ),
)
