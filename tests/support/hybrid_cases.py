"""Tiny models, packs and comparisons that the model tests share."""

import numpy as np
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch

VOCAB = 61
CPU_BUILD = Build(backends=Backends(), device="cpu", dtype=torch.float32)
CHUNK = 8

# Shorter than the convolution, one chunk, a chunk and one token, several chunks.
AWKWARD = [1, 2, 3, CHUNK, CHUNK + 1, 5, 2 * CHUNK + 3, 4]
MANY = [1 + i % 3 for i in range(104)]

LOGITS = torch.tensor([[2.0, 0.5, -1.0, 1.0], [0.0, 3.0, 0.1, -2.0], [1.0, -1.0, 0.2, 0.9]])
"""Router logits of three tokens and four experts, whose choices are plain to see."""

PATTERNS = ["M", "G", "*", "-", "E", "M*-E", "ME*M-", "*EG-"]

VARIANTS = {
    "plain": {},
    "rope": {"position_embedding_type": "rope"},
    "half rope, qkv bias, swiglu": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "add_qkv_bias": True,
        "squared_relu": False,
        "swiglu": True,
    },
    "gate, norms of heads": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.25,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
    },
    "gate, one norm for all heads, norms of outputs": {
        "attention_output_gate": True,
        "qk_layernorm": True,
        "qk_layernorm_scope": "all_heads",
        "add_qkv_bias": True,
        "attention_norm_placement": "output",
    },
    "window, scales of scores and positions": {
        "window_size": "3,0",
        "softmax_scale": 0.5,
        "position_embedding_type": "rope",
        "rotary_base": 50.0,
        "use_rope_scaling": True,
        "rope_scaling_original_max_positions": 64,
    },
    "layer norms stored minus one": {
        "normalization": "LayerNorm",
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "num_query_groups": 1,
        "position_embedding_type": "rope",  # otherwise the bias of keys has no effect
    },
    "layer norm, gelu, tied": {
        "normalization": "LayerNorm",
        "squared_relu": False,
        "untie_embeddings_and_output_weights": False,
    },
    "sigmoid router": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 24,
    },
    "multipliers, one norm group": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
        "mamba_norm_groups": 1,
        "mamba_norm_epsilon": 0.1,
        "mamba_conv_bias": False,
    },
    "gated shared expert": {
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
    },
    "latent experts": {
        "moe_latent_size": 12,
        "num_experts": 12,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_shared_expert_intermediate_size": 24,
    },
}

_ALONE = {
    "rope": "*",
    "half rope, qkv bias, swiglu": "*-E",
    "gate, one norm for all heads, norms of outputs": "*",
    "window, scales of scores and positions": "*",
    "sigmoid router": "E",
    "gated shared expert": "E",
    "latent experts": "E",
}
"""Layers that a variant changes, for variants that leave other layers as they are."""
PATTERNS_AND_VARIANTS = [
    (pattern, variant)
    for pattern in PATTERNS
    for variant in VARIANTS
    if set(pattern) & set(_ALONE.get(variant, pattern))
]
"""Each pattern with the variants that change it, and the plain one."""


def tiny_config(pattern: str, **changes) -> ModelConfig:
    values = {
        "hybrid_layer_pattern": pattern,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_state_dim": 16,
        "mamba_num_groups": 2,
        "mamba_chunk_size": CHUNK,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        # The norm of a short vector multiplies rounding errors: 1e-2 keeps float32 within 1e-5.
        "linear_norm_epsilon": 1e-2,
        "num_experts": 5,
        "moe_ffn_hidden_size": 16,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "squared_relu": True,
        "init_method_std": 0.2,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 16,
    }
    if "E" not in pattern:
        changes = {
            name: value
            for name, value in changes.items()
            if not name.startswith(("moe_shared", "moe_latent", "num_experts"))
        }
        values["num_experts"] = None
    return ModelConfig(**values | changes)


def tiny_model(
    pattern: str, *, dtype=torch.float32, seed=7, max_positions=256, backends=None, **changes
) -> HybridModel:
    config = tiny_config(pattern, **changes)
    model = HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=max_positions,
        dtype=dtype,
        seed=seed,
        backends=backends,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Equal scales would hide their order, and zeros would hide that one is added.
            heads = "q_norm" in name or "k_norm" in name
            if heads or (config.apply_layernorm_1p and "norm" in name):
                parameter += torch.linspace(-0.4, 0.1, len(parameter))
        for layer in model.moe_layers:
            layer.mixer.router.weight.mul_(4)  # rounding then changes no expert choice
            if layer.mixer.router.expert_bias is not None:
                layer.mixer.router.expert_bias.copy_(torch.linspace(-0.1, 0.1, config.num_experts))
    return model


def make_documents(lengths, seed=0):
    """Return random documents; three of four tokens are targets, but never the first."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, VOCAB, n), rng.random(n) < 0.75) for n in lengths]


def awkward_pack(seed: int = 0, **options) -> MicroBatch:
    """Return a pack of documents of awkward lengths; ``options`` are those of `make_pack`."""
    return make_pack(make_documents(AWKWARD, seed), **options)


def make_pack(documents, tail=0, spare=0, aux_scale=0.0, targets=None) -> MicroBatch:
    total = sum(len(tokens) for tokens, _ in documents) + tail
    targets = targets or max(1, count_targets(documents))
    return MicroBatch.build(documents, total, len(documents) + spare, (1 / targets, aux_scale))


def count_targets(documents) -> int:
    return sum(int(mask[1:].sum()) for _, mask in documents)


def gradients(model) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter's gradient; zeros if it has none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def run_packed(model, documents, **pack):
    """Return (logits of real tokens, per-token loss, loss, gradients) of one pack."""
    model.zero_grad()
    batch = make_pack(documents, **pack)
    real = batch.num_real_tokens
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.packed)[:real]
    output = model(batch)
    output.loss.backward()
    return logits, output.per_token_loss_T[:real], output.loss.detach(), gradients(model)


def run_alone(model, documents):
    """Return the same results from one pack for each document; autograd sums the gradients."""
    model.zero_grad()
    targets = max(1, count_targets(documents))
    logits, losses, total = [], [], 0.0
    for document in documents:
        batch = make_pack([document], targets=targets)
        with torch.no_grad():
            logits.append(model.logits(batch.tokens, batch.packed))
        output = model(batch)
        output.loss.backward()
        losses.append(output.per_token_loss_T)
        total = total + output.loss.detach()
    return torch.cat(logits), torch.cat(losses), total, gradients(model)


def sum_without_restart(values_QLN, seq_idx_QL):
    """Return the running sum over a chunk as in mamba-ssm: in float32, ignoring documents."""
    return values_QLN.float().cumsum(dim=1).to(values_QLN.dtype)


def relative_error(value, reference) -> float:
    """Return max |difference| / max |reference|; 0 if both tensors are zero."""
    difference = (value.double() - reference.double()).abs().max().item()
    scale = reference.double().abs().max().item()
    return difference if scale == 0 else difference / scale


def beyond_rounding(result, reference, tolerance) -> dict[str, float]:
    """Return the relative errors of logits, losses and gradients that are beyond ``tolerance``.

    The gradients of A_log, dt_bias and D may err ten times as much. Each is one sum per head, whose
    terms over all tokens cancel: with SSE kernels of MKL 2024.2 it erred by 2.9e-5.
    """
    errors = {
        "logits": relative_error(result[0], reference[0]),
        "per-token loss": relative_error(result[1], reference[1]),
        "loss": relative_error(result[2], reference[2]),
    }
    assert result[3].keys() == reference[3].keys()
    errors |= {
        name: relative_error(result[3][name], gradient) for name, gradient in reference[3].items()
    }
    per_head = (".A_log", ".dt_bias", ".D")
    return {
        name: error
        for name, error in errors.items()
        if not error <= tolerance * (10 if name.endswith(per_head) else 1)
    }
