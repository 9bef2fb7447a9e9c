"""Flags of small models, at least one for each Hugging Face family that a new config.json can have."""

from __future__ import annotations

COMMON = """--hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --kv-channels 8
    --ffn-hidden-size 48 --disable-bias-linear --normalization RMSNorm --seq-length 128 --lr 1e-2
    --global-batch-size 2 --no-isolation-self-test --device cpu --sft"""
MAMBA = """--mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16
    --mamba-chunk-size 8 --squared-relu"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16"
SIGMOID = (
    EXPERTS
    + """ --moe-router-score-function sigmoid
    --moe-shared-expert-intermediate-size 24"""
)
ROPE = "--swiglu --position-embedding-type rope --rotary-base 5000"
UNTIED = "--untie-embeddings-and-output-weights"
NET = """--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8
    --linear-value-head-dim 12 --linear-conv-kernel-dim 3"""
GATED = "--apply-layernorm-1p --attention-output-gate --qk-layernorm --rotary-percent 0.5"
QWEN = f"{ROPE} {GATED} {NET}"
SHARED = "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate"
MODELS = {
    "nemotron_h, tied": (
        f"ME*M- {MAMBA} {SIGMOID} --moe-router-enable-expert-bias "
        "--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size 280"
    ),
    "nemotron_h, latent experts": (
        f"ME*E/*E/*E {MAMBA} {SIGMOID} {UNTIED} --moe-router-enable-expert-bias --moe-latent-size 12 "
        "--num-experts 12 --moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 2"
    ),
    "nemotron_h, without E": f"*M-M/M/M {MAMBA} {UNTIED} --mtp-use-repeated-layer",
    "nemotron_h, without a bias of experts": (
        f"E*ME {MAMBA} {SIGMOID} --moe-router-topk 1 --moe-router-topk-scaling-factor 2.5"
    ),
    "nemotron_h, without M": f"*-* {UNTIED} --squared-relu",
    "llama": f"*-*- {ROPE} {UNTIED} --norm-epsilon 1e-6",
    "llama, scaled": (
        f"*-*- {ROPE} --use-rope-scaling --rope-scaling-factor 4 --rope-scaling-low-freq-factor 1.5 "
        "--rope-scaling-original-max-positions 32"
    ),
    "mixtral": f"*E*E {ROPE} {EXPERTS}",
    "qwen2": f"*-*- {ROPE} --add-qkv-bias",
    "qwen3": (
        f"*-*- {ROPE} {UNTIED} --qk-layernorm --window-size 2,0 "
        "--window-attn-skip-freq [1]+[0]+[0,1]"
    ),
    "qwen3_moe": f"*E*E {ROPE} {EXPERTS} --qk-layernorm --moe-router-pre-softmax",
    "qwen3_next": f"GE*E/*E {QWEN} {EXPERTS} {SHARED} {UNTIED}",
    "qwen3_5_text": f"G-*-G-/*-/*- {QWEN} --norm-epsilon 1e-6 --mtp-use-repeated-layer",
    "qwen3_5_moe_text, given": f"*EGE {QWEN} {EXPERTS} {SHARED}",
    "olmo_hybrid": (
        f"G-*-G- {NET} {UNTIED} --swiglu --linear-allow-neg-eigval --qk-layernorm "
        "--qk-layernorm-scope all_heads --attention-norm-placement output"
    ),
    "olmo_hybrid, other epsilons": (
        f"*-G- {NET} {ROPE} --norm-epsilon 1e-6 --linear-norm-epsilon 1e-5 --qk-layernorm "
        "--qk-layernorm-scope all_heads --attention-norm-placement output"
    ),
    "granitemoehybrid": (
        f"ME*E {MAMBA} {EXPERTS} --moe-shared-expert-intermediate-size 24 --swiglu "
        "--embedding-multiplier 3 --residual-multiplier 0.5 --logits-scaling 4 --softmax-scale 0.2"
    ).replace("--squared-relu", ""),
    "granitemoehybrid, without E": (
        f"M-*- {MAMBA} {ROPE} --norm-epsilon 1e-6 --mamba-norm-epsilon 1e-6 "
        "--disable-mamba-conv-bias"
    ).replace("--squared-relu", ""),
    "granitemoehybrid, all attention": f"*-*- {ROPE} --softmax-scale 0.2",
    "granitemoehybrid, all attention and experts": (
        f"*E*E {EXPERTS} --moe-shared-expert-intermediate-size 24 --swiglu"
    ),
    "granitemoehybrid, all Mamba": f"M-M- {MAMBA} --swiglu --residual-multiplier 0.5".replace(
        "--squared-relu", ""
    ),
    "bamba, all attention": f"*-*- {ROPE} --rotary-percent 0.5",
    "bamba, all Mamba": f"M-M- {MAMBA} --swiglu".replace("--squared-relu", ""),
    "bamba": f"M-*- {MAMBA} {UNTIED} {ROPE} --rotary-percent 0.5".replace("--squared-relu", ""),
    "mamba2, given": f"MM {MAMBA}",
    "mistral": f"*-*- {ROPE} --window-size 3,0",
    "mistral, given": f"*- {ROPE}",
}
"""Flags of models. The first family that fits is the one named, or it is given."""
