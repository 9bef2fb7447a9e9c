"""Megatron-LM's flags for the model, its kernels and its parallel layout that are refused."""

from __future__ import annotations

from megatron_packed.config.megatron.refused_kinds import RefusedFlags

MODEL: tuple[RefusedFlags, ...] = (
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
)
