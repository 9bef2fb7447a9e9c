"""Gated normalisation in plain PyTorch, on any device.

The arithmetic is fp32 (float64 for float64 inputs). Each row depends only on itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu


def run(
    x_TD: Tensor,
    z_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool = False,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Run the op; see ``api.gated_rms_norm``."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    gate_TD = silu(z_TD.to(dtype))
    v_TD = x_TD.to(dtype)
    if not norm_before_gate:
        v_TD = v_TD * gate_TD
    if sum_over_ranks is not None:
        mean_T = sum_over_ranks(v_TD.square().sum(-1)) / group_size
        y_TD = v_TD * torch.rsqrt(mean_T + eps).unsqueeze(-1) * weight.to(dtype)
    else:
        v_TGH = v_TD.view(x_TD.shape[0], -1, group_size)
        normed_TGH = v_TGH * torch.rsqrt(v_TGH.square().mean(-1, keepdim=True) + eps)
        # A weight (D,) is one weight (H,) for each group; a weight (H,) is broadcast to all groups.
        y_TD = (normed_TGH * weight.to(dtype).view(-1, group_size)).view(x_TD.shape)
    if norm_before_gate:
        y_TD = y_TD * gate_TD
    return y_TD.to(x_TD.dtype)
