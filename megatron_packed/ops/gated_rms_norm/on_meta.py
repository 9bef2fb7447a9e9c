"""Gated RMS normalisation on the meta device: shapes, and the statistics that the kernels save."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_packed.ops.gated_rms_norm.api import BACKWARD_PROGRAMS
from megatron_packed.ops.on_meta import Memory, of_shape, workspace


def run(
    x_TD: Tensor, z_TD: Tensor, weight: Tensor, eps: float, *, group_size: int, **options: Any
) -> Tensor:
    """Return a tensor of the shape of x; see `api.gated_rms_norm`."""
    tokens, channels = x_TD.shape
    groups = max(channels // group_size, 1)  # ranks may share a group
    sums = workspace(min(max(1, BACKWARD_PROGRAMS // groups), tokens), channels)
    memory = Memory(saved=[workspace(tokens, groups)], backward=[sums])
    return of_shape(x_TD.shape, x_TD, z_TD, weight, memory=memory)
