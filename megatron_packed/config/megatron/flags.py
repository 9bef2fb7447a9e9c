"""Megatron-LM's flags that are not options of this project.

``ALWAYS`` holds flags that are accepted because their effect is always on. ``REFUSED`` holds groups
of flags that are not supported, each with a reason and the nearest alternative. A flag may be in both:
for example, ``--moe-router-dtype fp32`` is accepted and other values are refused. Every other flag
of Megatron is an option of a section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.config.megatron.refused_kinds import OTHER_LAYERS, OTHER_PROGRAMS, RefusedFlags
from megatron_packed.config.run import RunConfig


@dataclass(frozen=True)
class Always:
    """Flag of Megatron that is accepted because its effect is always on.

    Args:
        reason: the fact that makes the flag unnecessary.
        values: the accepted values; None for a switch, () if ``differs`` decides.
        differs: function of (values, run) that returns the problem of the values; empty if they are
            accepted.
    """

    reason: str
    values: tuple[str, ...] | None = None
    differs: Callable[[tuple[str, ...], RunConfig], str] | None = None


def _other_number_of_layers(values: tuple[str, ...], run: RunConfig) -> str:
    pattern = run.model.hybrid_layer_pattern
    if not isinstance(pattern, str) or values == (str(len(pattern)),):
        return ""
    return (
        f"must be the length of --hybrid-layer-pattern ({len(pattern)}), which sets the "
        "number of layers"
    )


def _no_query_groups(values: tuple[str, ...], run: RunConfig) -> str:
    """Return a problem unless ``--num-query-groups`` is given and is not the number of heads.

    Megatron's default number of query groups is 1 (multi-query attention). A user should not get it
    by omitting a number.
    """
    model = run.model
    grouped = (
        model.num_query_groups is not None and model.num_query_groups != model.num_attention_heads
    )
    return (
        ""
        if grouped
        else ("needs --num-query-groups with a smaller number than --num-attention-heads")
    )


def _eager_update(values: tuple[str, ...], run: RunConfig) -> str:
    return (
        ""
        if run.cuda_graph.captures_steps
        else "needs --cuda-graph-impl full_iteration, which captures the update"
    )


def _other_spec(values: tuple[str, ...], run: RunConfig) -> str:
    if values and values[-1] in ("hybrid_stack_spec", "mamba_stack_spec"):
        return ""
    return (
        "only the hybrid stack (hybrid_stack_spec) is supported; choose layers with "
        "--hybrid-layer-pattern"
    )


def _spikes_ignored(values: tuple[str, ...], run: RunConfig) -> str:
    if run.training.loss_spike_policy != "off":
        return ""
    return "contradicts --loss-spike-policy off; remove that option, its default is warn"


ALWAYS: dict[str, Always] = {
    "--num-layers": Always(
        "--hybrid-layer-pattern sets the number of layers", (), _other_number_of_layers
    ),
    "--group-query-attention": Always("--num-query-groups sets the groups", None, _no_query_groups),
    "--spec": Always("only the hybrid stack is supported", (), _other_spec),
    "--is-hybrid-model": Always("every model is a hybrid stack"),
    "--model-provider": Always("every model is a hybrid stack", ("hybrid", "mamba")),
    "--use-mcore-models": Always("there is only one implementation of the model"),
    "--enable-experimental": Always("no option needs this switch"),
    "--experimental-attention-variant": Always(
        "G layers are gated delta nets", ("gdn", "gated_delta_net")
    ),
    "--linear-cp-mode": Always(
        "context-parallel ranks exchange the heads of gated delta nets", ("headwise",)
    ),
    "--no-position-embedding": Always("positions have no learned embedding"),
    "--no-masked-softmax-fusion": Always(
        "no attention kernel needs Megatron's fused mask and softmax"
    ),
    "--attention-softmax-in-fp32": Always("every attention kernel computes its softmax in fp32"),
    "--moe-grouped-gemm": Always("all experts are computed in one grouped matrix product"),
    "--moe-permute-fusion": Always("one kernel permutes the tokens on every GPU"),
    "--moe-router-dtype": Always("the router computes in fp32", ("fp32",)),
    "--moe-upcycling-granularity": Always("each expert is initialised independently", ("1",)),
    "--num-distributed-optimizer-instances": Always(
        "optimizer state is sharded over all data-parallel ranks or none", ("1",)
    ),
    "--min-dynamic-context-parallel-size": Always(
        "every pack is split over the same number of ranks", ("1",)
    ),
    "--calculate-per-token-loss": Always(
        "the loss is the mean over the target tokens of the global batch"
    ),
    "--cuda-graph-granularity": Always("graphs are captured per layer", ("layer",)),
    "--optimizer-cuda-graph": Always(
        "full_iteration captures the optimizer update too", None, _eager_update
    ),
    "--cuda-graph-dynamic-microbatches": Always(
        "each graph covers one micro-batch, so the number of micro-batches may vary"
    ),
    "--te-rng-tracker": Always("captured modules draw no random numbers"),
    "--reset-position-ids": Always("positions restart in every document"),
    "--reset-attention-mask": Always("attention stays inside each document"),
    "--dataloader-inter-document-masking": Always("attention stays inside each document"),
    "--eod-mask-loss": Always(
        "no target follows the last token of a document; the token itself is a target"
    ),
    "--dataloader-type": Always(
        "--seed sets the order, and a resumed run continues where it stopped", ("single",)
    ),
    "--num-dataset-builder-threads": Always("no sample index is built", ()),
    "--no-create-attention-mask-in-dataloader": Always(
        "attention uses document offsets instead of a mask"
    ),
    "--vocab-extra-ids": Always("only the tokenizer's file can add tokens", ("0",)),
    "--null-tokenizer-pad-id": Always(
        "masking never depends on the number of a token", (), lambda values, run: ""
    ),
    "--exit-signal-handler": Always(
        "on SIGTERM, SIGINT and SIGUSR1 a run always saves a checkpoint and stops"
    ),
    "--cross-entropy-loss-fusion": Always(
        "the output projection and the loss are computed together, in chunks"
    ),
    "--cross-entropy-fusion-impl": Always("the fused loss is part of this package", ("native",)),
    "--empty-unused-memory-level": Always(
        "the cache of PyTorch's allocator is never emptied", ("0",)
    ),
    "--rerun-mode": Always("no step is repeated for validation", ("disabled",)),
    "--check-for-spiky-loss": Always(
        "--loss-spike-policy reports loss spikes", None, _spikes_ignored
    ),
    "--check-for-large-grads": Always(
        "--loss-spike-policy reports spikes of the gradient norm", None, _spikes_ignored
    ),
    "--optimizer": Always("the optimizer is AdamW", ("adam",)),
    "--override-opt-param-scheduler": Always(
        "the schedule is a function of the options and the iteration"
    ),
    "--override-opt_param-scheduler": Always(
        "the schedule is a function of the options and the iteration"
    ),
    "--weight-decay-incr-style": Always("weight decay is constant", ("constant",)),
    "--main-grads-dtype": Always("gradients accumulate in fp32", ("fp32",)),
    "--main-params-dtype": Always("master weights are fp32", ("fp32",)),
    "--exp-avg-dtype": Always("moments are fp32", ("fp32",)),
    "--exp-avg-sq-dtype": Always("moments are fp32", ("fp32",)),
    "--accumulate-allreduce-grads-in-fp32": Always("gradients are accumulated and reduced in fp32"),
    "--ckpt-fully-parallel-save": Always(
        "ranks that hold the same tensors share the work of writing them"
    ),
    "--ckpt-fully-parallel-load": Always(
        "all ranks read in parallel: each checks some of the files and loads its part"
    ),
    "--ckpt-assume-constant-structure": Always(
        "the options fix the contents of a checkpoint, which never change during a run"
    ),
    "--dist-ckpt-optim-fully-reshardable": Always("every checkpoint can be loaded into any layout"),
    "--use-persistent-ckpt-worker": Always(
        "a single thread writes all checkpoints of --async-save"
    ),
    "--log-throughput": Always("throughput is always logged"),
    "--log-memory-interval": Always("peak memory is printed with every logged iteration", ()),
    "--logging-level": Always("messages have level 20 (INFO) and above", ("20",)),
    "--log-timers-to-tensorboard": Always("the time of each iteration is written to TensorBoard"),
    "--log-memory-to-tensorboard": Always(
        "peak memory is written to TensorBoard with every logged iteration"
    ),
    "--log-validation-ppl-to-tensorboard": Always(
        "the validation perplexity is written to TensorBoard with the validation loss"
    ),
    "--timing-log-level": Always("the time of each iteration is always logged", ("0",)),
    "--tensorboard-log-interval": Always(
        "every logged iteration is written to TensorBoard", ("1",)
    ),
    "--cpu-offloading-num-layers": Always("the number of offloaded layers cannot be set", ("0",)),
    "--activation-offload-fraction": Always(
        "all tensors that the selected modules save are offloaded", ("1", "1.0")
    ),
    "--delta-offload-bytes-across-pp-ranks": Always(
        "there are no pipeline stages to balance", ("0",)
    ),
}

REFUSED: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "multi-latent and other kinds of attention are not supported",
        "use * layers (causal attention) with --num-query-groups",
        (
            "--multi-latent-attention",
            "--experimental-attention-variant",
            "--apply-query-key-layer-scaling",
        ),
    ),
    RefusedFlags(
        "context-parallel ranks exchange the heads of gated delta nets",
        "give headwise, or leave it out",
        ("--linear-cp-mode",),
    ),
    RefusedFlags(
        "multi-token prediction is not supported",
        "leave it out; the model predicts only the next token",
        (
            "--mtp-num-layers",
            "--mtp-hybrid-override-pattern",
            "--mtp-use-repeated-layer",
            "--mtp-loss-scaling-factor",
        ),
    ),
    RefusedFlags(
        "only the layer pattern sets the order and number of layers",
        "give the layers in --hybrid-layer-pattern",
        (
            "--num-layers",
            "--spec",
            "--moe-layer-freq",
            "--linear-attention-freq",
            "--hybrid-attention-ratio",
            "--hybrid-mlp-ratio",
        ),
    ),
    RefusedFlags(
        "this variant of a norm or residual is not supported",
        "use --normalization and --norm-epsilon",
        ("--fp32-residual-connection",),
    ),
    RefusedFlags(
        "fusions are not switched one by one; each op uses the fastest kernel that supports the "
        "run",
        "leave it out, or use --attention-backend, --ssd-backend and --conv-backend",
        (
            "--use-flash-attn",
            "--no-rope-fusion",
            "--no-bias-dropout-fusion",
            "--no-bias-swiglu-fusion",
            "--use-fused-weighted-squared-relu",
            "--disable-mamba-mem-eff-path",
            "--mamba-training-ssm-states-dtype",
            "--moe-router-fusion",
            "--cross-entropy-fusion-impl",
            "--delay-wgrad-compute",
        ),
    ),
    RefusedFlags(
        "the kernel that computes a weight gradient always adds it to the fp32 sum",
        "leave it out",
        ("--no-gradient-accumulation-fusion",),
    ),
    RefusedFlags(
        "this way of routing tokens is not supported",
        "use --moe-router-topk with --moe-router-score-function",
        (
            "--moe-router-num-groups",
            "--moe-router-group-topk",
            "--moe-router-force-load-balancing",
            "--moe-router-padding-for-quantization",
            "--moe-router-padding-for-fp8",
            "--moe-input-jitter-eps",
            "--moe-apply-probs-on-input",
            "--moe-router-dtype",
        ),
    ),
    RefusedFlags(
        "this variant of an expert layer is not supported",
        "use --num-experts, --moe-ffn-hidden-size and --moe-shared-expert-intermediate-size",
        ("--moe-latent-size", "--moe-upcycling-granularity"),
    ),
    RefusedFlags(
        "this way of dispatching tokens is not supported",
        "use --moe-token-dispatcher-type allgather or alltoall",
        (
            "--moe-shared-expert-overlap",
            "--moe-flex-dispatcher-backend",
            "--moe-flex-dispatcher-num-sms",
            "--moe-deepep-num-sms",
            "--moe-hybridep-num-sms",
            "--moe-enable-deepep",
            "--overlap-moe-expert-parallel-comm",
            "--moe-paged-stash",
            "--moe-paged-stash-page-size",
            "--moe-paged-stash-buffer-size-factor-cuda",
            "--moe-paged-stash-buffer-size-factor-cpu",
        ),
    ),
    RefusedFlags(
        "pipeline parallelism is not supported",
        "use --tensor-model-parallel-size, --context-parallel-size or --expert-model-parallel-size",
        (
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
            "--account-for-embedding-in-pipeline-split",
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "--no-overlap-p2p-communication",
            "--defer-embedding-wgrad-compute",
            "--use-ring-exchange-p2p",
        ),
    ),
    RefusedFlags(
        "every pack is split over one context-parallel group, by heads or in a zigzag",
        "use --context-parallel-size and --cp-comm-type",
        (
            "--hierarchical-context-parallel-sizes",
            "--hybrid-context-parallel",
            "--max-seqlen-per-dp-cp-rank",
            "--cp-partition-mode",
            "--dynamic-context-parallel",
            "--min-dynamic-context-parallel-size",
        ),
    ),
    RefusedFlags(
        "tensor-parallel collectives do not overlap with matrix products, and the order of "
        "ranks is fixed",
        "leave it out, the result is the same",
        (
            "--tp-comm-overlap",
            "--no-tp-comm-overlap-ag",
            "--disable-tp-comm-overlap-ag",
            "--use-tp-pp-dp-mapping",
            "--no-clone-scatter-output-in-embedding",
            "--disable-clone-scatter-output-in-embedding",
        ),
    ),
    RefusedFlags(
        "gradients are reduced in buckets of --ddp-bucket-size, and weights are gathered after "
        "the optimizer step",
        "leave it out, the result is the same; --overlap-grad-reduce, --overlap-param-gather "
        "and --use-distributed-optimizer are available",
        (
            "--overlap-param-gather-with-optimizer-step",
            "--num-distributed-optimizer-instances",
            "--data-parallel-sharding-strategy",
            "--outer-dp-sharding-strategy",
            "--use-megatron-fsdp",
            "--megatron-fsdp-version",
            "--use-torch-fsdp2",
            "--ddp-num-buckets",
            "--ddp-average-in-collective",
            "--ddp-pad-buckets-for-high-nccl-busbw",
        ),
    ),
    RefusedFlags(
        "decisions of rank 0 and lists of checkpoints are sent over gloo, so that they do not "
        "wait for a GPU",
        "leave it out",
        ("--disable-gloo-process-groups",),
    ),
    RefusedFlags(
        "process groups are created from torchrun's environment with NCCL's own settings",
        "set NCCL's environment variables, or use --distributed-timeout-minutes",
        (
            "--nccl-communicator-config-path",
            "--use-sharp",
            "--local-rank",
            "--high-priority-stream-groups",
        ),
    ),
    RefusedFlags(
        "CUDA graphs are captured per layer or for whole steps",
        "give --cuda-graph-impl local or full_iteration",
        ("--cuda-graph-granularity",),
    ),
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
        "only one validation set is supported",
        "give all of it with --valid-data-path, or one part of it in each run",
        ("--multiple-validation-sets",),
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
        "evaluation runs a fixed number of iterations while training",
        "use --eval-interval and --eval-iters",
        ("--full-validation",),
    ),
    RefusedFlags(
        "the batch size is constant during a run",
        "use --global-batch-size, with another value when the run is resumed",
        ("--rampup-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule"),
    ),
    RefusedFlags(
        "the learning rate has one schedule, set by the options of the current run",
        "use --lr, --min-lr and --lr-decay-style",
        (
            "--use-checkpoint-opt-param-scheduler",
            "--use-checkpoint-opt_param-scheduler",
            "--decoupled-lr",
            "--decoupled-min-lr",
        ),
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

REFUSED += OTHER_LAYERS + OTHER_PROGRAMS
REFUSAL_OF: dict[str, RefusedFlags] = {flag: group for group in REFUSED for flag in group.flags}
