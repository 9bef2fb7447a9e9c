"""Mamba-2 scan on the meta device: its shape, and the states and sums of this package's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_packed.memory_purpose import Purpose
from megatron_packed.ops.on_meta import Memory, of_shape, workspace
from megatron_packed.ops.ssd import mamba_ssm_on_meta
from megatron_packed.ops.ssd.api import inputs_of
from megatron_packed.ops.ssd.parts import PartOfPack
from megatron_packed.ops.ssd.triton_tiles import LARGEST_STATE, plan_of

PASSES_STATES = True
"""`run` accepts a part of a pack."""

_FACTORS = 4
"""Numbers for each token and head: steps, sums and decays."""


def run(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    *tensors: Tensor,
    chunk_size: int,
    part: PartOfPack | None = None,
) -> Tensor:
    """Return a tensor of the output's shape. The arguments are those of `triton_kernels.run`."""
    scanned = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, *tensors)
    (_, heads, width), (groups, size) = x_TNP.shape, B_TGS.shape[1:]
    if part is None and (x_TNP.dtype != torch.bfloat16 or size > LARGEST_STATE):
        return mamba_ssm_on_meta.run(*scanned, chunk_size=chunk_size)
    plan = plan_of(inputs_of(x_TNP, B_TGS, C_TGS, 1))

    def states(count: int, dtype: torch.dtype = torch.float32) -> Any:
        return workspace(count, heads, width, size, dtype=dtype, purpose=Purpose.STATES)

    per_token = (heads, plan.chunks, plan.length)
    sums = 2 * plan.blocks + 3 * plan.blocks * plan.tiles["gradients"].parts
    parts = 0 if part is None else part.parts  # states of all parts travel
    backward = [
        workspace(_FACTORS + sums, *per_token),
        workspace(plan.chunks, groups * plan.splits, plan.length**2, dtype=x_TNP.dtype),
        states(2 * plan.segments + parts + (parts > 0)),
        states(2 * plan.chunks, x_TNP.dtype),  # states of chunks and their gradients
    ]
    if plan.splits > 1:
        backward.append(workspace(2, plan.splits, len(x_TNP), groups, size))  # of B and C
    memory = Memory(
        saved=[states(int(parts > 0))],  # the state that enters the part
        forward=[workspace(_FACTORS, *per_token), states(plan.segments + parts)],
        backward=backward,
    )
    return of_shape(x_TNP.shape, *scanned, memory=memory)
