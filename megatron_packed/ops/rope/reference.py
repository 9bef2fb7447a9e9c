"""Rotary position embedding in plain PyTorch, for CPUs and as the reference in tests of the kernel.

The module gathers cos and sin by position and rotates in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor, cos_PR: Tensor, sin_PR: Tensor
) -> tuple[Tensor, Tensor]:
    cos_T1R, sin_T1R = (
        _rows(table_PR, position_ids_T)[:, None, :] for table_PR in (cos_PR, sin_PR)
    )
    return _rotate(q_TNH, cos_T1R, sin_T1R), _rotate(k_TKH, cos_T1R, sin_T1R)


def _rows(table_PR: Tensor, position_ids_T: Tensor) -> Tensor:
    """Return the table's row of each token, or NaN for a position outside the table."""
    last = table_PR.shape[0] - 1
    inside_T1 = ((position_ids_T >= 0) & (position_ids_T <= last))[:, None]
    return torch.where(inside_T1, table_PR[position_ids_T.clamp(0, last)], float("nan"))


def _rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    half = cos_T1R.shape[-1]
    # Convert to the wider dtype once, so that autograd adds the two terms of an element's gradient
    # before they are rounded.
    wide_TNH = x_TNH.to(torch.promote_types(x_TNH.dtype, cos_T1R.dtype))
    first, second = wide_TNH[..., :half], wide_TNH[..., half : 2 * half]
    rotated = (
        first * cos_T1R - second * sin_T1R,
        second * cos_T1R + first * sin_T1R,
        wide_TNH[..., 2 * half :],
    )
    return torch.cat(rotated, dim=-1).to(x_TNH.dtype)
