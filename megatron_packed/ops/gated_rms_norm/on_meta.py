"""Gated RMS normalisation on the meta device: shapes, and the statistics that the kernels save."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from megatron_packed.ops.gated_rms_norm.api import rows_of_tile, tiles_of_program
from megatron_packed.ops.on_meta import Memory, of_shape, workspace


def run(
    x_TD: Tensor, z_TD: Tensor, weight: Tensor, eps: float, *, group_size: int, **options: Any
) -> Tensor:
    """Return a tensor of the shape of x; see `api.gated_rms_norm`."""
    tokens, channels = x_TD.shape
    groups = max(channels // group_size, 1)  # ranks may share a group
    rows = rows_of_tile(1 << (min(group_size, channels) - 1).bit_length())
    programs = math.ceil(tokens / (rows * tiles_of_program(tokens, groups, rows)))
    sums = workspace(programs, channels)  # of the weight's gradient
    memory = Memory(saved=[workspace(tokens, groups)], backward=[sums])
    return of_shape(x_TD.shape, x_TD, z_TD, weight, memory=memory)
