"""Attention as a kind of layer; the mixer is in `layers.attention`."""

from __future__ import annotations

from functools import partial

import torch

from megatron_packed.config.kinds.attention import KIND
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Attention, window_tables
from megatron_packed.layers.attention_heads import attended_heads
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.mixer_kind import (
    IsolationCase,
    MegatronNames,
    MixerKind,
    RankCounts,
    TableBuilder,
)
from megatron_packed.layers.parameters import norm_scale, normal, residual_normal, zeros
from megatron_packed.lazy_exports import lazy_function
from megatron_packed.ops.varlen_attention.api import prepare_tables

LARGEST_WINDOW = 48
"""Largest window of the isolation self-test, so that windows end inside its documents."""
ULPS_OF_UNORDERED_SUMS = 2
"""Allowed difference of gradients without deterministic mode. The kernels then add gradients in a
changing order, and one pair of equal runs may show it and the next may not.
"""


def _tables(config: ModelConfig, build: Build) -> TableBuilder | None:
    """Return the builder of the tables of a pack; None if attention reads none."""
    if build.cp.uses_zigzag:
        return None
    if not build.cp.exchanges_heads:
        from megatron_packed.layers.contiguous_attention import rank_offsets

        return partial(rank_offsets, config.attention_windows, build.cp)
    queries, keys = attended_heads(config, build.tp, build.cp)
    prepare = partial(
        prepare_tables,
        build.backends.varlen_attention,
        num_heads=queries,
        num_kv_heads=keys,
        head_dim=config.head_dim,
        dtype=build.dtype,
        deterministic=build.backends.deterministic,
    )
    return partial(window_tables, config.attention_windows, prepare)


def _small_sizes(config: ModelConfig, ranks: RankCounts) -> dict[str, object]:
    groups = min(config.num_query_groups, ranks.heads)
    heads_per_group = config.num_attention_heads // config.num_query_groups
    return {"num_query_groups": groups, "num_attention_heads": groups * heads_per_group}


def _windows(config: ModelConfig) -> list[dict[str, object]]:
    """Return the changes of a model for each window; attention without a window comes first."""
    windows = {window and min(window, LARGEST_WINDOW) for window in config.attention_windows}
    return [{"window_size": w and f"{w - 1},0"} for w in sorted(windows, key=bool)]


def _allowed_ulps(quantity: str, device: torch.device, backends: Backends) -> int:
    ordered = device.type == "cpu" or backends.deterministic
    return 0 if ordered or quantity != "input gradients" else ULPS_OF_UNORDERED_SUMS


MIXER = MixerKind(
    kind=KIND,
    build=lambda config, build, place: Attention(
        config, build, number=place.number, rotary=place.rotary
    ),
    layer=ProjectedLayer,
    state=lazy_function("megatron_packed.layers.decoding.attention_cache", "AttentionCache"),
    fills={
        "qkv.weight": normal,
        "qkv.bias": zeros,
        "proj.weight": residual_normal,
        "proj.bias": zeros,
        "q_norm.weight": norm_scale,
        "q_norm.bias": zeros,
        "k_norm.weight": norm_scale,
        "k_norm.bias": zeros,
    },
    isolation=IsolationCase(changes=_small_sizes, variants=_windows, allowed_ulps=_allowed_ulps),
    tables=_tables,
    megatron=MegatronNames(
        modules={
            "norm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
            "mixer.qkv.": ("self_attention.linear_qkv.",),
            "mixer.proj.": ("self_attention.linear_proj.",),
            "mixer.q_norm.": ("self_attention.q_layernorm.",),
            "mixer.k_norm.": ("self_attention.k_layernorm.",),
        },
        without=("attention_norm_placement", "qk_layernorm_scope"),
    ),
)
