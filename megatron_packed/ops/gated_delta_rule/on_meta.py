"""Gated delta rule on the meta device: its shape, what the kernels save, and their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_packed.memory_purpose import Purpose
from megatron_packed.ops.gated_delta_rule.precision import tile_dtype
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, segment_tokens
from megatron_packed.ops.on_meta import Memory, of_shape, workspace

if TYPE_CHECKING:
    from megatron_packed.ops.gated_delta_rule.tables import DeltaRuleTables
    from megatron_packed.ops.parts_of_pack import PartOfPack


def run(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    *tensors: Tensor,
    allow_neg_eigval: bool,
    tables: DeltaRuleTables | None = None,
    part: PartOfPack | None = None,
    **options: Any,
) -> Tensor:
    """Return a tensor of the output's shape. The arguments are those of `triton_kernels.run`."""
    (tokens, key_heads, key_dim), heads = q_TGK.shape, v_TNV.shape[1]
    dtype = tile_dtype(q_TGK.dtype, allow_neg_eigval)
    value_dim, slots = v_TNV.shape[2], -(-tokens // CHUNK)

    def states(slots: int, rows: int, dtype: torch.dtype = torch.float32) -> Any:
        return workspace(slots, heads, rows, key_dim, dtype=dtype, purpose=Purpose.STATES)

    # A part sends a message and receives those of the other parts.
    own, others = (0, 0) if part is None else (1, part.parts - 1)
    sent, received = (states(messages, value_dim + key_dim) for messages in (own, others))
    joints = max(tokens - 1, 0) // segment_tokens(heads) + own
    if tables is not None:
        joints = tables.joints_5J.shape[1]
    at_joints = states(joints, value_dim)
    written = workspace(*v_TNV.shape, dtype=dtype)
    memory = Memory(
        saved=[
            workspace(2, key_heads, tokens),  # inverse norms of q and k
            workspace(6, heads, tokens),  # decays and beta
            workspace(2, heads, tokens, CHUNK, dtype=dtype),  # scores and inverse of each chunk
            at_joints,
            states(joints, key_dim),  # the matrices of the walks before the joints
            sent,
        ],
        forward=[received, states(own, value_dim)],  # and the state that they make
        backward=[
            states(slots, value_dim, dtype),
            states(slots + own, value_dim, dtype),  # gradients of the states
            sent,
            received,
            at_joints,  # gradients of the states there
            # What tokens write, and the exact gradient of v.
            *[written] * (1 if dtype == v_TNV.dtype else 2),
            workspace(4, heads, tokens),  # gradients of the gates
            # Parts of the gradient of q, then of k.
            workspace(tokens, heads, key_dim, dtype=dtype),
            workspace(2, heads, tokens, CHUNK, dtype=dtype),  # terms between two tokens
        ],
    )
    return of_shape(v_TNV.shape, v_TNV, q_TGK, k_TGK, *tensors, memory=memory)
