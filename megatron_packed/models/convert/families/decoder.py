"""Parts that several families share: rotary options, patterns and windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.config.layer_pattern import MOST_LAYERS
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.family import Family, Fields
from megatron_packed.models.convert.families.field_types import shown_value
from megatron_packed.models.convert.families.symbols import ATTENTION, MAMBA

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Keys of config.json and options of the stack for constant factors, which are 1 when left out."""
LLAMA3 = "llama3"
"""``rope_type`` of the scaled positions of Llama 3.1 and later."""
_SCALING = {
    "rope_parameters.factor": "rope_scaling_factor",
    "rope_parameters.low_freq_factor": "rope_scaling_low_freq_factor",
    "rope_parameters.high_freq_factor": "rope_scaling_high_freq_factor",
    "rope_parameters.original_max_position_embeddings": "rope_scaling_original_max_positions",
}
ROPE_SCALING = ("use_rope_scaling", *_SCALING.values())
"""Fields of `ModelConfig` that `rope_scaling` returns."""
ROPE_SCALING_KEYS = " ".join(_SCALING) + " rope_type "
"""Keys that `rope_scaling` reads."""
KEYS_OF_DERIVED = {mine: key for key, mine in _SCALING.items()} | {
    **{name: name for name in MULTIPLIERS},
    "moe_latent_size": "moe_latent_size",
    "moe_router_group_topk": "topk_group",
    "moe_router_num_groups": "n_group",
    "mtp_loss_scaling_factor": "mtp_loss_scaling_factor",
    "rotary_base": "rope_theta",
    "softmax_scale": "attention_multiplier",
    "window_size": "sliding_window",
}
"""Fields of `ModelConfig` that families derive, with the key that messages name for each."""
WINDOW = ("window_size", "window_attn_skip_freq")
"""Fields of `ModelConfig` that `window` returns."""
MAMBA_NORM = ("mamba_norm_epsilon",)
"""Field of `ModelConfig` that `mamba_norm_epsilon` returns."""
SIZES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
}
"""Keys of config.json for the sizes of a model, with the fields of `ModelConfig`."""
HEADS = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
}
"""The same for attention."""
DELTA_SIZES = {
    name: name
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}
"""The same for gated delta nets."""
MLP_SIZES = {"intermediate_size": "ffn_hidden_size"}
"""The same for MLPs."""
EXPERT_SIZES = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
"""The same for experts in Qwen's families."""
RMS_NORM_SWIGLU: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
}
"""Fields of `ModelConfig` that are the same in most families."""
PLAIN_ATTENTION: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0}
"""Keys of config.json for attention, with the only supported values."""
ATTENTION_WORDS = ("full_attention", "attention")
"""Words for attention in ``layer_types``: that of transformers 5, and that of older files."""


_LIFTED = ("rope_theta", "rope_type", "partial_rotary_factor")
"""Rotary options that become flat keys; the others keep the prefix ``rope_parameters.``."""


def flat_rotary(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with flat rotary options, with derived values filled in.

    transformers 5 nests the rotary options in ``rope_parameters``; older files have ``rope_theta``
    and, for scaled positions, ``rope_scaling``. A nested value counts before a flat one, as in
    transformers. The head size and the number of key-value heads may be null or missing; they are
    derived.

    Args:
        defaults: values of keys that may be missing, such as ``rope_theta``.
    Raises:
        ValueError: ``rope_scaling`` and ``rope_parameters`` contradict each other.
    """
    flat = {key: fields[key] for key in fields if key not in ("rope_parameters", "rope_scaling")}
    rotary = _rotary(fields, defaults)
    for key, value in rotary.items():
        flat[key if key in _LIFTED else f"rope_parameters.{key}"] = value
    flat = {**defaults, **flat}
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    derived: dict[str, Any] = {"num_key_value_heads": heads}
    if isinstance(heads, int) and isinstance(hidden, int):
        derived["head_dim"] = hidden // max(heads, 1)  # fewer heads are refused as such
    return {**flat, **{key: value for key, value in derived.items() if flat.get(key) is None}}


def _rotary(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary options of the nested object that counts, with the key ``rope_type``.

    transformers takes ``rope_scaling`` before ``rope_parameters``, and other libraries only one of
    them. A file with both is read if both mean the same.
    """
    rotary_options = {}
    for name in ("rope_scaling", "rope_parameters"):
        if fields.get(name):
            nested = dict(fields[name])
            rotary_options[name] = {"rope_type": nested.pop("type", "default"), **nested}
    flat = {**defaults, **{key: fields[key] for key in _LIFTED if key in fields}}
    if len(rotary_options) == 2 and {**flat, **rotary_options["rope_scaling"]} != {
        **flat,
        **rotary_options["rope_parameters"],
    }:
        raise ValueError(
            f"rope_scaling is {shown_value(fields['rope_scaling'])}, which contradicts rope_parameters "
            f"{shown_value(fields['rope_parameters'])}; keep the key that the model was trained with"
        )
    return next(iter(rotary_options.values()), {})


def rope_scaling(fields: Fields) -> dict[str, Any]:
    """Return the options of scaled positions, from flat keys."""
    if fields.get("rope_type", "default") != LLAMA3:
        return {"use_rope_scaling": False}
    return {"use_rope_scaling": True} | {mine: fields.get(key) for key, mine in _SCALING.items()}


def rope_scaling_rules(fields: Fields) -> Iterator[str]:
    """Check the keys of scaled positions."""
    kind = fields.get("rope_type", "default")
    if kind not in ("default", LLAMA3):
        yield f"rope_type is {shown_value(kind)}, but only 'default' and {LLAMA3!r} are supported"
    for key in _SCALING:
        if kind == LLAMA3 and fields.get(key) is None:
            yield f"{key} is missing"
        elif kind == "default" and key in fields:
            yield f"{key} is {fields[key]!r}, but only rope_type {LLAMA3!r} uses it"


def rope_unscaled(fields: Fields) -> Iterator[str]:
    """Check that positions are not scaled."""
    kind = fields.get("rope_type", "default")
    if kind != "default":
        yield f"rope_type is {shown_value(kind)}, but only 'default' is supported"


def rope_scaling_written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for scaled positions, as old and new files are read."""
    if not model.use_rope_scaling:
        return {}
    numbers = {key.partition(".")[2]: getattr(model, mine) for key, mine in _SCALING.items()}
    return {"rope_scaling": {"rope_type": LLAMA3, **numbers}}


def hidden_layers(fields: Fields) -> int:
    """Return the number of Hugging Face layers; raises ValueError with a sentence."""
    layers = fields.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers is {layers!r}; it must be a number from 1 to {MOST_LAYERS:,}"
        )
    return layers


def pattern_of(family: Family, fields: Fields) -> str:
    """Return the layer pattern of a model; raises ValueError with a sentence."""
    return family.pattern(fields) if family.pattern else family.blocks[0] * hidden_layers(fields)


def typed_pattern(fields: Fields, symbols: Mapping[str, str], after: str) -> str:
    """Return the pattern of a model whose ``layer_types`` list the kind of every layer.

    Args:
        symbols: symbol of each word of the list.
        after: symbol of the layer after each mixer.
    """
    key = "layer_types"
    layers, number = fields.get(key), hidden_layers(fields)
    if not isinstance(layers, list) or len(layers) != number:
        raise ValueError(
            f"{key} is {shown_value(layers)}; it must list the {number} layers of num_hidden_layers"
        )
    return "".join(symbol + after for symbol in spelled_layers(layers, symbols, key))


def spelled_layers(layers: list[Any], symbols: Mapping[str, str], key: str) -> str:
    """Return the symbols of the words in ``layers``; raises ValueError for an unknown word.

    Args:
        symbols, key: as for `typed_pattern`.
    """
    unknown = [word for word in layers if not isinstance(word, str) or word not in symbols]
    if unknown:
        raise ValueError(
            f"{key} has the entry {unknown[0]!r}, but only {', '.join(symbols)} are supported"
        )
    return "".join(symbols[word] for word in layers)


def window(tokens: Any, windowed: list[bool], symbols_per_layer: int) -> dict[str, Any]:
    """Return the options of windowed attention.

    Args:
        tokens: number of tokens that a token can attend to, itself included; None for no window.
        windowed: True for each Hugging Face layer with the window.
        symbols_per_layer: symbols of the pattern for each Hugging Face layer.
    """
    if tokens is None or not any(windowed):
        return dict.fromkeys(WINDOW)
    size = f"{tokens - 1},0" if type(tokens) is int and tokens > 0 else repr(tokens)
    if all(windowed):
        return {"window_size": size, "window_attn_skip_freq": None}
    runs = [(has, len(list(run)) * symbols_per_layer) for has, run in groupby(windowed)]
    listed = "+".join(f"[{int(has)}]*{length}" for has, length in runs)
    return {"window_size": size, "window_attn_skip_freq": listed}


def window_of_layers(model: ModelConfig, symbols_per_layer: int) -> tuple[int | None, list[bool]]:
    """Return the window in tokens, and True for each Hugging Face layer that has it.

    Args:
        symbols_per_layer: symbols of the pattern for each Hugging Face layer; the first is attention.
    """
    windows = [model.window_of(number) for number in range(0, model.num_layers, symbols_per_layer)]
    tokens = next((window for window in windows if window is not None), None)
    return tokens, [window is not None for window in windows]


def plain_window(model: ModelConfig) -> dict[str, Any]:
    """Return the options of windows in the form in which `window` returns them.

    In the list of ``--window-attn-skip-freq``, other layers get the number of the attention layer
    before them.
    """
    tokens, windows = None, []
    for number, symbol in enumerate(model.main_layers):
        if symbol == ATTENTION:
            windows.append(model.window_of(number))
            tokens = windows[-1] or tokens
        else:
            windows.append(windows[-1] if windows else None)
    return window(tokens, [size is not None for size in windows], 1)


def head_width_unfit(model: ModelConfig) -> Iterator[str]:
    """Yield the width of a head of attention if the heads do not split the hidden size."""
    if ATTENTION in model.hybrid_layer_pattern:
        width = model.hidden_size // model.num_attention_heads
        if model.head_dim != width:
            yield f"{flags.KV_CHANNELS} {model.head_dim} (the family has {width})"


def mamba_names(norm: str, mixer: str) -> dict[str, str]:
    """Return the names of Mamba layers, with those of the norm and of the mixer in the files."""
    weights = ("in_proj", "conv1d", "norm", "out_proj")
    parts = [f"{name}.weight" for name in weights] + ["conv1d.bias", "A_log", "D", "dt_bias"]
    return {"norm.weight": norm, **{f"mixer.{part}": f"{mixer}.{part}" for part in parts}}


def mamba_norm_epsilon(epsilon: Any, pattern: str) -> dict[str, Any]:
    """Return the epsilon of the norm inside Mamba layers, which is that of all norms."""
    return {"mamba_norm_epsilon": epsilon} if MAMBA in pattern else {}
