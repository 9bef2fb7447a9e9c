"""Mamba-2 scan on the meta device: its shape, and the states and sums of this package's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_packed.memory_purpose import Purpose
from megatron_packed.ops.on_meta import PROCESSORS, Memory, of_shape, workspace
from megatron_packed.ops.ssd.api import LARGEST_STATE, inputs_of

if TYPE_CHECKING:
    from megatron_packed.ops.parts_of_pack import PartOfPack

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
        return MambaSSM.run(*scanned, chunk_size=chunk_size)
    from megatron_packed.ops.ssd.triton_tiles import plan_of

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


class MambaSSM:
    """Scan by mamba-ssm: its shape, and the states and sums of its kernels."""

    @staticmethod
    def run(
        x_TNP: Tensor,
        dt_TN: Tensor,
        A_log_N: Tensor,
        B_TGS: Tensor,
        C_TGS: Tensor,
        *tensors: Tensor,
        chunk_size: int,
    ) -> Tensor:
        """Return a tensor of the output's shape. The arguments are those of `api.ssd`."""
        (tokens, heads, width), (groups, size) = x_TNP.shape, B_TGS.shape[1:]
        chunks = -(-tokens // chunk_size)
        per_token = (heads, chunks, chunk_size)
        shape = (chunks, heads, width, size)
        in_fp32 = workspace(*shape, purpose=Purpose.STATES)
        in_dtype = workspace(*shape, dtype=x_TNP.dtype, purpose=Purpose.STATES)
        scores = workspace(chunks, groups, chunk_size**2)
        # The kernels split the heads of a group so that all processors have work.
        programs = -(-chunks * heads // PROCESSORS)
        per_group = max(heads // groups, 1)
        splits = -(-per_group // max(min(programs, per_group), 1))
        parts = 1 if splits == 1 else splits + 1  # partial sums, and one for their total
        blocks = -(-width // 32) + 2 * -(-size // 32) + -(-chunk_size // 32)
        memory = Memory(
            saved=[workspace(2, *per_token)],  # steps and their sums
            forward=[in_fp32, in_dtype, scores],
            backward=[
                *([in_fp32] * 2 + [in_dtype] * 2),  # states and their gradients
                *[scores] * (1 + parts),
                workspace(2, parts, tokens, groups, size),  # of B and C
                workspace(blocks, *per_token),  # partial sums of the other gradients
            ],
        )
        return of_shape(x_TNP.shape, x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, *tensors, memory=memory)
