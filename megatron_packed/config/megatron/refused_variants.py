"""Megatron-LM's flags for variants of the model and of its numerics that are refused.

Each of them would change the trained model or its rounding, so no cure is to leave it out.
"""

from __future__ import annotations

from megatron_packed.config.megatron.refused_kinds import RefusedFlags

VARIANTS: tuple[RefusedFlags, ...] = (
    RefusedFlags(
        "this variant of rotary or relative positions would change attention",
        "use --rotary-base, --rotary-percent, --use-rope-scaling and --rope-scaling-factor; "
        "other positions need Megatron-LM",
        (
            "--enable-gpt-oss",
            "--mrope-section",
            "--mscale",
            "--mscale-all-dim",
            "--no-rope-freq",
            "--no-yarn-correction-range-round-to-int",
            "--relative-attention-max-distance",
            "--relative-attention-num-buckets",
            "--rope-type",
            "--rotary-interleaved",
            "--rotary-scaling-factor",
            "--rotary-seq-len-interpolation-factor",
            "--yarn-beta-fast",
            "--yarn-beta-slow",
            "--yarn-correction-range-round-to-int",
            "--yarn-original-max-position-embeddings",
        ),
    ),
    RefusedFlags(
        "this activation function or order of gate and input would change every MLP",
        "use --swiglu, --squared-relu or GELU, the default; other activations need Megatron-LM",
        (
            "--activation-func-clamp-value",
            "--glu-linear-offset",
            "--moe-mlp-glu-interleave-size",
            "--moe-shared-expert-glu-interleave-size",
            "--openai-gelu",
            "--quick-geglu",
        ),
    ),
    RefusedFlags(
        "this normalisation or clipping of queries and keys would change attention",
        "use --qk-layernorm; other variants need Megatron-LM",
        (
            "--export-qk-l2-norm",
            "--qk-clip",
            "--qk-clip-alpha",
            "--qk-clip-threshold",
            "--qk-l2-norm",
        ),
    ),
    RefusedFlags(
        "sinks in the softmax would change attention",
        "give vanilla; other variants need Megatron-LM",
        ("--softmax-type",),
    ),
    RefusedFlags(
        "multi-latent and sparse attention are not supported",
        "use * layers (causal attention); models with other attention need Megatron-LM",
        (
            "--cache-mla-latents",
            "--disable-dsa-indexer-rotate-activation",
            "--disable-dsa-indexer-scoring-relu",
            "--dsa-indexer-k-norm-epsilon",
            "--dsa-indexer-k-norm-fp32",
            "--dsa-indexer-rope-interleaved",
            "--dsa-indexer-skip-topk-offset",
            "--dsa-indexer-topk-freq",
            "--mla-down-proj-fusion",
            "--no-dsa-indexer-rotate-activation",
            "--no-dsa-indexer-scoring-relu",
        ),
    ),
    RefusedFlags(
        "adding the residual after the norm would change every layer",
        "use --attention-norm-placement; the order of BERT needs Megatron-LM",
        ("--apply-residual-connection-post-layernorm",),
    ),
    RefusedFlags(
        "scales of muP would change initial weights, learning rates, attention and logits",
        "use --embedding-multiplier, --residual-multiplier, --logits-scaling and --softmax-"
        "scale; learning rates by width need Megatron-LM",
        (
            "--mup-attn-scale-power",
            "--mup-base-head-dim",
            "--mup-base-hidden-size",
            "--mup-embedding-mult",
            "--mup-output-mult",
            "--mup-width-mult",
            "--use-mup",
        ),
    ),
    RefusedFlags(
        "initial weights come from one normal distribution, so training would start elsewhere",
        "use --init-method-std for all weights; other distributions need Megatron-LM, and its"
        " weights can be loaded",
        (
            "--embedding-init-method-std",
            "--init-method-xavier-uniform",
        ),
    ),
    RefusedFlags(
        "norms and biases have no weight decay, so norms of queries and keys would train "
        "differently",
        "use --weight-decay for the matrices; decay of norms needs Megatron-LM",
        (
            "--apply-wd-to-qk-layernorm",
            "--no-weight-decay-cond-type",
        ),
    ),
    RefusedFlags(
        "all layers with the same symbol have the same sizes",
        "give one size per kind of layer; models with other sizes per layer need Megatron-LM",
        (
            "--heterogeneous-layers-config-encoded-json",
            "--heterogeneous-layers-config-path",
        ),
    ),
    RefusedFlags(
        "gated delta products are other layers than gated delta nets",
        "use G layers in --hybrid-layer-pattern; gated delta products need Megatron-LM",
        (
            "--gdp-cutedsl-kernel",
            "--gdp-num-chunk-states-to-recompute",
            "--gdp-num-householder",
        ),
    ),
    RefusedFlags(
        "this kind of multi-token prediction is not supported, and would change the loss",
        "all weights learn from the losses of all depths; other kinds need Megatron-LM",
        (
            "--freeze-base-for-mtp",
            "--mtp-detach-heads",
            "--mtp-hsm",
            "--mtp-standalone",
            "--qad-train-target",
        ),
    ),
    RefusedFlags(
        "all weights are trained",
        "use --lr 0 to measure a loss without training; frozen layers need Megatron-LM",
        ("--freeze-all-layers",),
    ),
    RefusedFlags(
        "this choice of experts would change which tokens each expert sees",
        "use --moe-router-enable-expert-bias or --moe-aux-loss-coeff to balance experts",
        (
            "--moe-enable-routing-replay",
            "--moe-router-force-biased",
            "--moe-router-quantile-balancing-ema",
        ),
    ),
    RefusedFlags(
        "a dense checkpoint is not made into experts",
        "convert the weights before the run, and give them with --load and --finetune",
        ("--moe-use-upcycling",),
    ),
    RefusedFlags(
        "the vocabulary is always padded to a multiple",
        "use --make-vocab-size-divisible-by 1 for a vocabulary without padding",
        (
            "--disable-pad-vocab-size",
            "--no-pad-vocab-size",
        ),
    ),
    RefusedFlags(
        "the precision of single operations cannot be chosen, so results would be rounded "
        "differently",
        "use --bf16, or fp32 without it; --deterministic-mode repeats the bits of a run",
        (
            "--batch-invariant-backend",
            "--batch-invariant-mode",
            "--disable-bf16-reduced-precision-matmul",
            "--fp16-lm-cross-entropy",
            "--output-logit-dtype",
        ),
    ),
    RefusedFlags(
        "training in FP8, FP4 or with the kitchen library would change the precision of "
        "matrix products",
        "use --bf16",
        (
            "--fp4-quantizer-factory",
            "--fp8-interval",
            "--fp8-output-proj",
            "--fp8-quantizer-factory",
            "--keep-fp8-transpose-cache",
            "--kitchen-attention-backend",
            "--moe-combine-bwd-dtype",
            "--moe-dispatch-fwd-dtype",
            "--reuse-grad-buf-for-mxfp8-param-ag",
            "--use-kitchen-attention",
        ),
    ),
    RefusedFlags(
        "AdamW is the only optimizer, and another one would train another model",
        "use --optimizer adam with --adam-beta1, --adam-beta2 and --adam-eps",
        (
            "--lion-beta1",
            "--lion-beta2",
            "--muon-coefficient-type",
            "--muon-extra-scale-factor",
            "--muon-fp32-matmul-prec",
            "--muon-nesterov",
            "--muon-no-split-qkv",
            "--muon-num-ns-steps",
            "--muon-scalar-optimizer",
            "--muon-scale-mode",
            "--muon-tp-mode",
            "--muon-use-syrk",
            "--no-use-layer-wise-param-layout",
        ),
    ),
    RefusedFlags(
        "documents are trained as they are; no part is moved to their middle or end",
        "rearrange the texts before megatron-packed preprocess",
        (
            "--fim-eod-token",
            "--fim-fragment-rate",
            "--fim-middle-token",
            "--fim-no-prefix",
            "--fim-pad-token",
            "--fim-prefix-token",
            "--fim-rate",
            "--fim-split-sample",
            "--fim-spm-rate",
            "--fim-suffix-token",
        ),
    ),
    RefusedFlags(
        "the tokenizer's file decides about white space, which changes the tokens",
        "use --tokenizer-model with the wanted rules",
        (
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
    ),
)
