"""Rotary position embedding of queries and keys, with a position per token.

Shapes: T token slots, N query heads, K key heads, H head dimension, P positions in the tables, R
    rotated pairs (2 R <= H).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "rope",
    (
        GPUBackend("triton", "megatron_packed.ops.rope.triton_kernel"),
        Backend("reference", "megatron_packed.ops.rope.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.rope.on_meta"),
)


@dataclass(frozen=True, kw_only=True)
class RopeInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    dtype: torch.dtype
    device_type: str
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretch of the low rotary frequencies for longer documents, as in Llama 3.1.

    A frequency makes a number of turns within the original positions. At most ``low`` turns: the
    frequency is divided by ``factor``. At least ``high`` turns: it is unchanged. In between, the
    two results are mixed linearly in the number of turns.
    """

    factor: float
    low: float
    high: float
    original_max_positions: int

    def apply(self, frequency_R: Tensor) -> Tensor:
        """Return the stretched frequencies, in radians per position."""
        turns_R = frequency_R * (self.original_max_positions / (2 * math.pi))
        kept_R = ((turns_R - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency_R * (kept_R + (1 - kept_R) / self.factor)


def rope_tables(
    max_positions: int,
    rotary_dim: int,
    base: float,
    device: torch.device | str | None = None,
    *,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles ``position * base ** (-2 r / rotary_dim)``.

    Both tables are fp32 ``(P, R)`` with R = rotary_dim / 2. The angles are computed in fp64, so
    position 1,000,000 is as exact as position 1. Create the tables once, not in each step.

    Args:
        scaling: stretch of the frequencies; None for none.
    Raises:
        ValueError: rotary_dim is odd or not positive, or there are no positions.
    Source: Su et al., arXiv:2104.09864.
    """
    if rotary_dim < 2 or rotary_dim % 2 or max_positions < 1:
        raise ValueError(
            f"rotary_dim ({rotary_dim}) must be even and positive, and max_positions ({max_positions}) at least 1; "
            "choose a rotary percent that rotates an even number of dimensions."
        )
    made_on = "meta" if device is not None and torch.device(device).type == "meta" else "cpu"
    exponent_R = -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=made_on) / rotary_dim
    frequency_R = float(base) ** exponent_R
    if scaling is not None:
        frequency_R = scaling.apply(frequency_R)
    angle_PR = torch.outer(
        torch.arange(max_positions, dtype=torch.float64, device=made_on), frequency_R
    )
    return angle_PR.cos().to(device, torch.float32), angle_PR.sin().to(device, torch.float32)


def apply_rope(
    q_TNH: Tensor,
    k_TKH: Tensor,
    position_ids_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate the first 2 R dimensions of each head by its token's position, and copy the others.

    Dimension r pairs with r + R ('half' rotation). The arithmetic is fp32, and the results are new
    contiguous tensors in the inputs' dtype. Backward is the same rotation by the negated angle.

    There is no host sync, so the host cannot check positions. A position outside the tables gives
    NaN in that token's row, which the step's non-finite flag detects; memory outside the tables is
    never read.

    Args:
        q_TNH, k_TKH: any strides (e.g. views of one fused projection), same dtype.
        position_ids_T: int32 or int64 ``(T,)``, starting at 0 in each document.
        cos_PR, sin_PR: fp32 tables from ``rope_tables``.
    Raises:
        ValueError: the shapes or dtypes do not fit together.
    """
    _check(q_TNH, k_TKH, position_ids_T, cos_PR, sin_PR)
    inputs = RopeInputs(
        dtype=q_TNH.dtype,
        device_type=q_TNH.device.type,
        head_dim=q_TNH.shape[2],
        rotary_dim=2 * cos_PR.shape[1],
    )
    rotated: tuple[Tensor, Tensor] = OP.chosen[backend, inputs].loaded.run(
        q_TNH, k_TKH, position_ids_T, cos_PR, sin_PR
    )
    return rotated


def _check(
    q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor, cos_PR: Tensor, sin_PR: Tensor
) -> None:
    if (
        q_TNH.dim() != 3
        or k_TKH.dim() != 3
        or q_TNH.shape[0] != k_TKH.shape[0]
        or q_TNH.shape[2] != k_TKH.shape[2]
    ):
        raise ValueError(
            f"Expected q (T, N, H) and k (T, K, H); got {tuple(q_TNH.shape)} and {tuple(k_TKH.shape)}."
        )
    if position_ids_T.shape != q_TNH.shape[:1] or position_ids_T.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            f"position_ids must be int32 or int64 of shape ({q_TNH.shape[0]},); "
            f"got {position_ids_T.dtype} {tuple(position_ids_T.shape)}."
        )
    if (
        cos_PR.shape != sin_PR.shape
        or cos_PR.dim() != 2
        or cos_PR.dtype != torch.float32
        or sin_PR.dtype != torch.float32
    ):
        raise ValueError(
            f"cos and sin must be fp32 tables of one shape (P, R) from rope_tables; "
            f"got {cos_PR.dtype} {tuple(cos_PR.shape)} and {sin_PR.dtype} {tuple(sin_PR.shape)}."
        )
    if 2 * cos_PR.shape[1] > q_TNH.shape[2] or q_TNH.dtype != k_TKH.dtype:
        raise ValueError(
            f"The tables rotate {2 * cos_PR.shape[1]} of {q_TNH.shape[2]} dimensions, q is {q_TNH.dtype} and k is "
            f"{k_TKH.dtype}; rotate at most the head dimension, and pass q and k in the same dtype."
        )
