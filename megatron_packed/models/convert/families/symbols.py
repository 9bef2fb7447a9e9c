"""Symbols of the layers that families have."""

from __future__ import annotations

from megatron_packed.config.kinds import attention, experts, gated_delta_net, mamba, mlp

MAMBA = mamba.KIND.symbol
GATED_DELTA_NET = gated_delta_net.KIND.symbol
ATTENTION = attention.KIND.symbol
MLP = mlp.KIND.symbol
MOE = experts.KIND.symbol
