"""Random tiny models of transformers with odd settings, for each supported family."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers

from support import hybrid_cases as cases

NO_STEP_LIMIT = 1e-12
"""transformers clamps the step of Mamba from below; Megatron's kernels do not."""
WRONG_BEFORE = (5, 23)
"""First version of transformers whose Mamba layers give each head the right one of several groups."""


def computes_wrong_groups(model: Any) -> bool:
    """Return whether the installed transformers computes wrong logits of a model, without mamba-ssm."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    groups = {"mamba2": "n_groups"}.get(model.config.model_type, "mamba_n_groups")
    concerned = model.config.model_type in ("bamba", "granitemoehybrid", "mamba2")
    return concerned and version < WRONG_BEFORE and getattr(model.config, groups) > 1


def nemotron_h_super(draw: random.Random, number: int) -> Any:
    """Return a model with latent experts, as Nemotron 3 Super and Ultra have them.

    Two of three models have groups of experts. transformers then chooses the groups by two scores.
    """
    pattern = "E" + "".join(draw.choices("M*E", k=draw.randint(1, 4)))
    groups, chosen = draw.choice([(1, 1), (4, 2), (3, 1)])
    more = {"n_group": groups, "topk_group": chosen, "n_routed_experts": 12}
    if chosen < groups:
        more["num_experts_per_tok"] = draw.randint(2 * chosen, 3 * chosen - 1)
    return nemotron_h(draw, number, pattern, moe_latent_size=draw.choice([8, 12, 44]), **more)


def nemotron_h(draw: random.Random, number: int, pattern: str | None = None, **more: Any) -> Any:
    pattern = pattern or "".join(draw.choices("M*-E", k=draw.randint(1, 6)))
    sizes: dict[str, Any] = {
        "hidden_size": draw.choice([16, 24, 40]),
        "num_attention_heads": 4,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "head_dim": draw.choice([4, 8, 10]),
        "intermediate_size": draw.choice([12, 48]),
        "ssm_state_size": draw.choice([4, 16]),
        "mamba_num_heads": draw.choice([2, 4, 6]),
        "mamba_head_dim": draw.choice([4, 8]),
        "n_groups": draw.choice([1, 2]),
        "chunk_size": draw.choice([4, 8, 16]),
        "n_routed_experts": draw.choice([4, 5, 8]),
        "moe_intermediate_size": draw.choice([8, 16]),
        "moe_shared_expert_intermediate_size": 24,
        "num_experts_per_tok": draw.randint(1, 4),
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        "time_step_min": NO_STEP_LIMIT,
        **more,
    }
    sizes["norm_topk_prob"] = sizes["num_experts_per_tok"] > 1
    made = filled_model(
        draw,
        "NemotronH",
        vocab_size=cases.VOCAB,
        layers_block_type=None,
        hybrid_override_pattern=pattern,
        **sizes,
    )
    for layer, symbol in zip(made.model.layers, pattern):
        if symbol == "E":
            bias = layer.mixer.gate.e_score_correction_bias
            bias.copy_(torch.linspace(-0.3, 0.3, bias.numel()))
    return made


def common(draw: random.Random, *, head_dim: bool = True, **more: Any) -> dict[str, Any]:
    """Return sizes that all families with attention have.

    Args:
        head_dim: False if the width of a head must be hidden size / heads.
    """
    heads = draw.choice([2, 4, 8])
    sizes = {
        "vocab_size": cases.VOCAB,
        "hidden_size": draw.choice([16, 24, 40]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, heads // 2, heads]),
        "intermediate_size": draw.choice([12, 48]),
        "num_hidden_layers": draw.randint(1, 3),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": None,  # its embedding would have no gradient in transformers
    }
    if head_dim:
        sizes["head_dim"] = draw.choice([4, 8, 12])
    else:
        sizes["hidden_size"] = heads * draw.choice([4, 8, 12])
    return sizes | more


def rotary(draw: random.Random, scaled: bool) -> dict[str, Any]:
    theta = draw.choice([1e4, 5e5])
    if not scaled:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": draw.choice([2.0, 8.0]),
        "low_freq_factor": draw.choice([1.0, 1.5]),
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": draw.choice([16, 64]),
    }


def llama(draw: random.Random, number: int) -> Any:
    return filled_model(draw, "Llama", **common(draw), rope_parameters=rotary(draw, number % 2 > 0))


def mixtral(draw: random.Random, number: int) -> Any:
    return filled_model(
        draw,
        "Mixtral",
        **common(draw),
        num_local_experts=draw.randint(3, 6),
        num_experts_per_tok=draw.randint(2, 3),
        sliding_window=None,
        rope_parameters=rotary(draw, draw.random() < 0.3),
    )


def mistral(draw: random.Random, number: int) -> Any:
    return filled_model(
        draw,
        "Mistral",
        **common(draw),
        sliding_window=draw.choice([1, 3, 7, 40]) if number % 2 else None,
        rope_parameters=rotary(draw, draw.random() < 0.3),
    )


def windows(draw: random.Random, number: int, layers: int) -> dict[str, Any]:
    """Return the scaled positions of a Qwen model and, if ``number`` is odd, windows of layers."""
    rope = {"rope_parameters": rotary(draw, draw.random() < 0.3)}
    if number % 2 == 0:
        return rope
    options = {
        **rope,
        "use_sliding_window": True,
        "sliding_window": draw.choice([2, 5, 40]),
        "max_window_layers": draw.randrange(layers),
    }
    if number % 4 == 1:
        words = ["sliding_attention", "full_attention"]
        options["layer_types"] = [words[0], *draw.choices(words, k=layers - 1)]
        draw.shuffle(options["layer_types"])
    return options


def qwen2(draw: random.Random, number: int) -> Any:
    sizes = common(draw, head_dim=False)
    return filled_model(draw, "Qwen2", **sizes, **windows(draw, number, sizes["num_hidden_layers"]))


def qwen3(draw: random.Random, number: int) -> Any:
    sizes = common(draw)
    return filled_model(draw, "Qwen3", **sizes, **windows(draw, number, sizes["num_hidden_layers"]))


def qwen3_moe(draw: random.Random, number: int) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 4} if number % 4 == 3 else {}
    return filled_model(
        draw,
        "Qwen3Moe",
        **common(draw),
        num_experts=draw.randint(3, 6),
        num_experts_per_tok=draw.randint(2, 3),
        moe_intermediate_size=draw.choice([8, 12]),
        norm_topk_prob=number % 2 == 0,
        rope_parameters=rotary(draw, draw.random() < 0.3),
        **window,
    )


def delta_net(draw: random.Random) -> dict[str, Any]:
    keys = draw.choice([1, 2, 3])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 8, 12]),
        "linear_value_head_dim": draw.choice([4, 8, 16]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
    }


def kinds(draw: random.Random, layers: int) -> list[str]:
    """Return the kinds of the layers of a hybrid; both kinds occur if there are two layers."""
    words = ["linear_attention", "full_attention"]
    listed = words[:layers] + draw.choices(words, k=max(layers - 2, 0))
    draw.shuffle(listed)
    return listed


def qwen_hybrid(draw: random.Random, **more: Any) -> dict[str, Any]:
    sizes = common(draw, head_dim=False, head_dim_=draw.choice([8, 16, 32]))
    sizes["head_dim"] = sizes.pop("head_dim_")
    layers = sizes["num_hidden_layers"]
    rope = {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]), **rotary(draw, False)}
    listed = kinds(draw, layers)
    return {**sizes, **delta_net(draw), "layer_types": listed, "rope_parameters": rope, **more}


def experts(draw: random.Random) -> dict[str, Any]:
    return {
        "num_experts": draw.randint(3, 6),
        "num_experts_per_tok": draw.randint(2, 3),
        "moe_intermediate_size": draw.choice([8, 12]),
        "shared_expert_intermediate_size": draw.choice([12, 20]),
    }


def qwen3_next(draw: random.Random, number: int) -> Any:
    return filled_model(
        draw, "Qwen3Next", **qwen_hybrid(draw), **experts(draw), norm_topk_prob=number % 4 != 3
    )


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}


def qwen3_5(draw: random.Random, number: int) -> Any:
    return with_vision(draw, number, "Qwen3_5", qwen_hybrid(draw))


def qwen3_5_moe(draw: random.Random, number: int) -> Any:
    text = {**qwen_hybrid(draw), **experts(draw)}
    del text["intermediate_size"]
    return with_vision(draw, number, "Qwen3_5Moe", text)


def with_vision(draw: random.Random, number: int, name: str, text: dict[str, Any]) -> Any:
    """Return a model of text alone, or one with vision if ``number`` is odd."""
    if number % 2 == 0:
        return filled_model(draw, name, kind="Text", **text)
    return filled_model(
        draw,
        name,
        model="ForConditionalGeneration",
        text_config=text,
        vision_config={**VISION, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def olmo_hybrid(draw: random.Random, number: int) -> Any:
    sizes = common(draw, head_dim=False, num_hidden_layers=draw.randint(2, 3))
    net = {**delta_net(draw), "linear_allow_neg_eigval": number % 3 != 2}
    # transformers saves the convolution in three equal parts, so their sum must be a multiple of 3.
    net["linear_num_value_heads"] = 3 * net["linear_num_key_heads"]
    net["linear_key_head_dim"] = net["linear_key_head_dim"] // 4 * 12
    theta = None if number % 2 else 5e5
    return filled_model(
        draw,
        "OlmoHybrid",
        **sizes,
        **net,
        layer_types=kinds(draw, sizes["num_hidden_layers"]),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def mamba2(draw: random.Random, number: int) -> Any:
    heads, expand = draw.choice([2, 4]), draw.choice([1, 2])
    hidden = draw.choice([16, 24, 40])
    return filled_model(
        draw,
        "Mamba2",
        vocab_size=cases.VOCAB,
        hidden_size=hidden,
        expand=expand,
        num_heads=heads,
        head_dim=hidden * expand // heads,
        n_groups=draw.choice([1, 2]),
        state_size=draw.choice([4, 16]),
        chunk_size=draw.choice([4, 6, 16]),
        num_hidden_layers=draw.randint(1, 3),
        layer_norm_epsilon=1e-5 if number % 2 == 0 else 1e-3,
        use_conv_bias=number % 2 == 0,
        tie_word_embeddings=draw.random() < 0.5,
    )


def mamba_sizes(draw: random.Random, hidden: int) -> dict[str, Any]:
    heads, expand = draw.choice([2, 4]), draw.choice([1, 2, 3])
    return {
        "mamba_n_heads": heads,
        "mamba_expand": expand,
        "mamba_d_head": expand * hidden // heads,
        "mamba_n_groups": draw.choice([1, 2]),
        "mamba_d_state": draw.choice([4, 16]),
        "mamba_chunk_size": draw.choice([4, 6, 16]),
    }


def bamba(draw: random.Random, number: int) -> Any:
    sizes = common(draw, head_dim=False, num_hidden_layers=draw.randint(2, 3))
    sizes["hidden_size"] = sizes["num_attention_heads"] * draw.choice([4, 12])  # half must be even
    layers = sizes["num_hidden_layers"]
    return filled_model(
        draw,
        "Bamba",
        **sizes,
        **mamba_sizes(draw, sizes["hidden_size"]),
        attn_layer_indices=sorted(draw.sample(range(layers), draw.randint(1, layers - 1))),
        mamba_conv_bias=number % 2 == 0,
        rope_parameters=rotary(draw, False),
    )


def granitemoehybrid(draw: random.Random, number: int) -> Any:
    sizes = common(draw, head_dim=False, num_hidden_layers=draw.randint(2, 3))
    return filled_model(
        draw,
        "GraniteMoeHybrid",
        **sizes,
        **mamba_sizes(draw, sizes["hidden_size"]),
        layer_types=kinds(draw, sizes["num_hidden_layers"]),
        num_local_experts=draw.randint(3, 5) if number % 2 == 0 else 0,
        num_experts_per_tok=draw.randint(2, 3),
        mamba_conv_bias=draw.random() < 0.8,
        rope_parameters=rotary(draw, False),
        shared_intermediate_size=draw.choice([12, 20]),
        position_embedding_type="rope" if number % 4 == 1 else None,
        embedding_multiplier=draw.choice([1.0, 3.0]),
        residual_multiplier=draw.choice([1.0, 0.22]),
        logits_scaling=draw.choice([1.0, 6.0]),
        attention_multiplier=draw.choice([0.5, 0.0625]),
    )


FAMILIES: dict[str, Callable[[random.Random, int], Any]] = {
    made.__name__: made
    for made in (
        nemotron_h,
        nemotron_h_super,
        llama,
        mixtral,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        olmo_hybrid,
        mistral,
        qwen2,
        qwen3,
        qwen3_moe,
        mamba2,
        bamba,
        granitemoehybrid,
    )
}
"""Functions of (random numbers, number of the model). The number chooses between variants."""


def filled_model(
    draw: random.Random, name: str, *, kind: str = "", model: str = "ForCausalLM", **options: Any
) -> Any:
    """Return a model of transformers with random weights, by its name and the options of its class."""
    config = getattr(transformers, f"{name}{kind}Config")(**options)
    return filled(getattr(transformers, name + model)(config), draw)


def filled(model: Any, draw: random.Random) -> Any:
    """Fill every parameter with random values large enough to show every part of the model."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()
