"""Megatron-LM's flags for other kinds of layers and programs, which are refused by name.
``refused_model.py`` and ``refused_run.py`` have the other refused flags.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedFlags:
    """Flags that are refused for the same reason."""

    reason: str
    nearest: str
    flags: tuple[str, ...]


OTHER_LAYERS: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "multi-latent and sparse attention are not supported",
        "use * layers (full causal attention) with --num-query-groups",
        (
            "--q-lora-rank",
            "--kv-lora-rank",
            "--qk-head-dim",
            "--qk-pos-emb-head-dim",
            "--v-head-dim",
            "--gated-attention-proj-granularity",
            "--dsa-kernel-backend",
            "--dsa-indexer-n-heads",
            "--dsa-indexer-head-dim",
            "--dsa-indexer-topk",
            "--dsa-indexer-loss-coeff",
            "--dsa-indexer-use-sparse-loss",
            "--no-dsa-kernel-fusion",
            "--csa-window-size",
            "--csa-compress-ratios",
            "--csa-compress-rotary-base",
        ),
    ),
    RefusedFlags(
        "multi-decay attention is not supported",
        "use * layers (full causal attention) or M (Mamba-2) layers",
        (
            "--multi-decay-num-channels",
            "--multi-decay-decay-generation",
            "--multi-decay-decay-type",
            "--multi-decay-aggregate-mode",
            "--multi-decay-training-kernel",
            "--multi-decay-qkv-bias",
            "--multi-decay-qk-norm",
            "--multi-decay-window-size",
            "--no-multi-decay-decay-bias",
            "--multi-decay-use-output-gate",
            "--multi-decay-use-nope",
        ),
    ),
    RefusedFlags(
        "delta attention is not supported",
        "use M (Mamba-2) layers in --hybrid-layer-pattern",
        ("--kda-safe-gate", "--kda-lower-bound"),
    ),
    RefusedFlags(
        "there is only one residual stream",
        "models with several streams need Megatron-LM",
        (
            "--enable-hyper-connections",
            "--enable-mhc-connections",
            "--num-residual-streams",
            "--mhc-num-residual-streams",
            "--mhc-sinkhorn-iterations",
            "--mhc-init-gating-factor",
            "--mhc-recompute-layer-num",
            "--use-fused-mhc",
        ),
    ),
    RefusedFlags(
        "n-gram embedding tables are not supported",
        "models with n-gram tables need Megatron-LM; here each token has one embedding",
        (
            "--engram-layer-ids",
            "--engram-target-layer-indices",
            "--engram-hash-table-min-sizes",
            "--engram-max-ngram-size",
            "--engram-embedding-dim-per-ngram",
            "--engram-num-hash-heads-per-ngram",
            "--engram-kernel-size",
            "--engram-table-backend",
            "--engram-seed",
        ),
    ),
    RefusedFlags(
        "elastic (flextron) models are not supported",
        "train a single size, with --hidden-size, --ffn-hidden-size and similar options",
        (
            "--flextron",
            "--enable-router",
            "--binary-mask",
            "--soft-mask",
            "--hard-sample-th",
            "--router-beta",
            "--original-model-sample-prob",
            "--tau-init",
            "--tau-decay",
            "--loss-alpha",
            "--lr-mult-router",
            "--router-gbs",
            "--router-inter-dim",
            "--router-std",
            "--budget-list",
            "--budget-probs",
            "--budget-type",
            "--emb-int-list",
            "--mlp-int-list",
            "--head-int-list",
            "--mamba-int-list",
            "--moe-expert-int-list",
            "--linear-scaler-start",
            "--linear-scaler-end",
            "--slice",
        ),
    ),
)

OTHER_PROGRAMS: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "this program trains models and does not serve requests",
        "use megatron-packed generate to continue a prompt",
        (
            "--prompts",
            "--prompt-file",
            "--output-path",
            "--num-tokens-to-generate",
            "--temperature",
            "--top_k",
            "--top_p",
            "--return-log-probs",
            "--skip-prompt-log-probs",
            "--flash-decode",
            "--enable-chunked-prefill",
            "--max-tokens-to-oom",
            "--incoming-requests-per-sec",
            "--incoming-requests-per-step",
            "--inference-repeat-n",
            "--no-record-throughput",
            "--inference-max-requests",
            "--inference-max-seq-length",
            "--inference-logging-step-interval",
            "--inference-moe-token-dispatcher-type",
            "--inference-dynamic-batching-max-requests",
            "--inference-dynamic-batching-max-tokens",
            "--inference-dynamic-batching-num-cuda-graphs",
            "--inference-dynamic-batching-buffer-size-gb",
            "--inference-dynamic-batching-async-sched-mode",
            "--inference-dynamic-batching-prefix-caching",
            "--inference-dynamic-batching-prefix-caching-eviction-policy",
            "--inference-dynamic-batching-prefix-caching-mamba-gb",
            "--mamba-inference-conv-states-dtype",
            "--mamba-inference-ssm-states-dtype",
            "--prefix-cache-compare",
            "--prefix-cache-stress-groups",
            "--prefix-cache-stress-copies",
            "--prefix-cache-stress-prompt-tokens",
            "--prefix-cache-stress-staged",
        ),
    ),
    RefusedFlags(
        "a teacher would change the loss; distillation is not supported",
        "train on the data alone with --finetune and --load; a teacher needs Megatron-LM",
        (
            "--export-kd-teacher-load",
            "--export-kd-teacher-model-config",
        ),
    ),
    RefusedFlags(
        "no data is downloaded",
        "download the data, and give its files with --data-path",
        ("--finetune-hf-dataset",),
    ),
    RefusedFlags(
        "options describe a model, not code",
        "give its layers in --hybrid-layer-pattern",
        ("--model-recipe", "--model-provider"),
    ),
)
