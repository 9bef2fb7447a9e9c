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
        ),
    ),
    RefusedFlags(
        "context-parallel ranks exchange the heads of gated delta nets",
        "give headwise",
        ("--linear-cp-mode",),
    ),
    RefusedFlags(
        "only the layer pattern sets the layers of multi-token prediction",
        "write them after a / in --hybrid-layer-pattern, once for each depth, as in M*ME/*E/*E",
        ("--mtp-hybrid-override-pattern",),
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
        "the kernel of the scan sets the precision of its states, so they would be rounded "
        "differently",
        "use --ssd-backend to choose the kernel",
        ("--mamba-training-ssm-states-dtype",),
    ),
    RefusedFlags(
        "the fused loss is part of this package; another one would be rounded differently",
        "give native",
        ("--cross-entropy-fusion-impl",),
    ),
    RefusedFlags(
        "this way of routing tokens is not supported",
        "use --moe-router-topk with --moe-router-score-function",
        (
            "--moe-input-jitter-eps",
            "--moe-apply-probs-on-input",
            "--moe-router-dtype",
        ),
    ),
    RefusedFlags(
        "this variant of an expert layer is not supported",
        "use --num-experts, --moe-ffn-hidden-size and --moe-shared-expert-intermediate-size",
        ("--moe-upcycling-granularity",),
    ),
    RefusedFlags(
        "this way of dispatching tokens is not supported",
        "use --moe-token-dispatcher-type allgather or alltoall",
        (
            "--moe-flex-dispatcher-backend",
            "--moe-flex-dispatcher-num-sms",
            "--moe-deepep-num-sms",
            "--moe-hybridep-num-sms",
            "--moe-enable-deepep",
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
        "gradients are reduced in buckets of --ddp-bucket-size, and weights are gathered after "
        "the optimizer step",
        "use --use-distributed-optimizer, --overlap-grad-reduce and --overlap-param-gather",
        (
            "--num-distributed-optimizer-instances",
            "--use-megatron-fsdp",
            "--megatron-fsdp-version",
            "--use-torch-fsdp2",
        ),
    ),
    RefusedFlags(
        "CUDA graphs are captured per layer or for whole steps",
        "give --cuda-graph-impl local or full_iteration",
        ("--cuda-graph-granularity",),
    ),
)
