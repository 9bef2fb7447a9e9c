"""Scan by mamba-ssm on the meta device: its shape, and the states and sums of these kernels."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.memory_purpose import Purpose
from megatron_packed.ops.on_meta import PROCESSORS, Memory, of_shape, workspace


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
