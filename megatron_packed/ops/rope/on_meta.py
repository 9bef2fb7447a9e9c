"""Rotary embedding on the meta device: shapes. The kernel saves its tables only."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.on_meta import kernel


def run(
    q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor, cos_PR: Tensor, sin_PR: Tensor
) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of q and k; see `api.apply_rope`."""
    return kernel([q_TNH.shape, k_TKH.shape], q_TNH, k_TKH, saved=(position_ids_T, cos_PR, sin_PR))
