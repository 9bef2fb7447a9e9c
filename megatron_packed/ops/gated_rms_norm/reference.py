"""Gated normalisation in plain PyTorch, on any device.

The arithmetic is fp32 (float64 for float64 inputs). Each row depends only on itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

if TYPE_CHECKING:
    from megatron_packed.ops.gated_rms_norm.api import GatedRMSNormInputs


def not_supported_reasons(inputs: GatedRMSNormInputs) -> list[str]:
    """Return an empty list: the reference supports all inputs."""
    return []


def run(
    x_TD: Tensor,
    z_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    group_size: int,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run the op; see ``api.gated_rms_norm``."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    gated_TD = x_TD.to(dtype) * silu(z_TD.to(dtype))
    if sum_over_ranks is not None:
        mean_T = sum_over_ranks(gated_TD.square().sum(-1)) / group_size
        return (gated_TD * torch.rsqrt(mean_T + eps).unsqueeze(-1) * weight_D.to(dtype)).to(
            x_TD.dtype
        )
    gated_TGH = gated_TD.view(x_TD.shape[0], -1, group_size)
    normed_TGH = gated_TGH * torch.rsqrt(gated_TGH.square().mean(-1, keepdim=True) + eps)
    return (normed_TGH.view(x_TD.shape) * weight_D.to(dtype)).to(x_TD.dtype)
