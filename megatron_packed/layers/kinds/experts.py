"""Mixtures of experts as a kind of layer; the mixer is in `layers.moe.layer`."""

from __future__ import annotations

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.config.kinds.experts import KIND, LIMITING_GROUPS
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.hybrid_layer import HybridMoELayer
from megatron_packed.layers.kinds.mixer_kind import (
    HIDDEN,
    NO_STATE,
    IsolationCase,
    MegatronNames,
    MixerKind,
    RankCounts,
)
from megatron_packed.layers.kinds.mlp import MLP_FILLS
from megatron_packed.layers.moe.layer import MoE
from megatron_packed.layers.parameters import normal, residual_normal

ULPS_OF_GROUPED_PRODUCTS = 4
"""Allowed difference of grouped products. Such a product may split its sums by the number of rows
of an expert, so rows of other documents may be rounded differently.
"""
ULPS_OF_MOVED_ROWS = 8
"""Allowed difference on a CPU. Rows are sorted by expert, so a change of one document moves rows of
the others. On some CPUs the rounding of a row depends on its place in a product. The AVX2 kernels of
MKL 2024.2 moved random small models by up to 2.6 ulp, and other kernels by 0.
"""
_LEFT_OUT = (
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    *LIMITING_GROUPS,
)
"""Options that small models lack. Groups may not divide their experts, and limit tokens one by one."""


def _small_sizes(config: ModelConfig, ranks: RankCounts) -> dict[str, object]:
    experts = min(config.num_experts or 1, max(8, config.moe_router_topk))
    width = HIDDEN * ranks.heads
    return {
        **dict.fromkeys(_LEFT_OUT),
        "num_experts": -(-experts // ranks.experts) * ranks.experts,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width
        if config.moe_shared_expert_intermediate_size
        else None,
        "moe_latent_size": HIDDEN // 2 if config.moe_latent_size else None,
        # Only the loss per document does not couple documents by design.
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff if config.balances_documents else 0.0,
        "moe_pad_expert_input_to_capacity": False,
    }


def _coupled(config: ModelConfig) -> list[str]:
    couplings = []
    if config.moe_expert_capacity_factor is not None:
        factor = config.moe_expert_capacity_factor
        couplings.append(
            f"{flags.MOE_EXPERT_CAPACITY_FACTOR} {factor:g} (documents compete for the capacity of an expert)"
        )
    per_pack = config.moe_router_load_balancing_type != "none" and not config.balances_documents
    if per_pack and config.moe_aux_loss_coeff and config.balances_experts:
        shared_tokens = "step" if config.balances_all_ranks else "pack"
        couplings.append(
            f"{flags.MOE_AUX_LOSS_COEFF} {config.moe_aux_loss_coeff:g} (a loss over all tokens of a {shared_tokens})"
        )
    return couplings


def _allowed_ulps(quantity: str, device: torch.device, backends: Backends) -> int:
    if device.type == "cpu":
        return ULPS_OF_MOVED_ROWS
    return ULPS_OF_GROUPED_PRODUCTS if backends.grouped_mlp != "reference" else 0


MIXER = MixerKind(
    kind=KIND,
    build=lambda config, build, place: MoE(config, build, depth=place.depth),
    layer=HybridMoELayer,
    state=NO_STATE,
    fills={
        **MLP_FILLS,
        "router.weight": normal,
        "experts.fc1": normal,
        "experts.fc2": residual_normal,
        "shared_expert_gate.weight": normal,
        "fc1_latent_proj.weight": normal,
        "fc2_latent_proj.weight": residual_normal,
    },
    isolation=IsolationCase(
        changes=_small_sizes,
        absent={
            **dict.fromkeys(_LEFT_OUT),
            "num_experts": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_latent_size": None,
            "moe_aux_loss_coeff": 0.0,
            "moe_pad_expert_input_to_capacity": False,
        },
        allowed_ulps=_allowed_ulps,
        coupled=_coupled,
    ),
    megatron=MegatronNames(
        modules={
            "norm.": ("pre_mlp_layernorm.",),
            "mixer.router.": ("mlp.router.",),
            "mixer.experts.fc1": ("mlp.experts.experts.linear_fc1.weight",),
            "mixer.experts.fc2": ("mlp.experts.experts.linear_fc2.weight",),
            "mixer.shared_expert.fc1.": ("mlp.shared_experts.linear_fc1.",),
            "mixer.shared_expert.fc2.": ("mlp.shared_experts.linear_fc2.",),
            "mixer.shared_expert_gate.weight": ("mlp.shared_experts.gate_weight",),
            "mixer.fc1_latent_proj.": ("mlp.fc1_latent_proj.",),
            "mixer.fc2_latent_proj.": ("mlp.fc2_latent_proj.",),
        }
    ),
)
