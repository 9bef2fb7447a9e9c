"""Gated normalisation for each group of channels, in two orders.

Mamba-2 gates first: ``weight * rms_norm(x * silu(z))``. Gated delta nets normalise first:
``weight * rms_norm(x) * silu(z)``.

Letters: T tokens, D channels, H channels of a group. Sources: Mamba-2, arXiv:2405.21060; Gated Delta
Networks, arXiv:2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "gated_rms_norm",
    (
        GPUBackend("triton", "megatron_packed.ops.gated_rms_norm.triton_kernels"),
        Backend("reference", "megatron_packed.ops.gated_rms_norm.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.gated_rms_norm.on_meta"),
)

_ELEMENTS_PER_TILE = 1024
"""Rows x channels that a program of our kernels has in registers at a time."""
_BACKWARD_PROGRAMS = 512
"""Programs of our backward kernel, over all groups: enough to fill any GPU several times. There are
about ``_BACKWARD_PROGRAMS / groups`` partial sums of the weight's gradient.
"""


@dataclass(frozen=True, kw_only=True)
class GatedRMSNormInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    channels: int
    group_size: int
    unit_channel_stride: bool
    """True if the channel stride of both x and z is 1."""
    dtype: torch.dtype
    device_type: str
    split_group: bool = False
    """True if the channels are a part of one group that is split over ranks."""
    norm_before_gate: bool = False
    shared_weight: bool = False
    """True if all groups have the same weight ``(H,)``."""


def gated_rms_norm(
    x_TD: Tensor,
    z_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool = False,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Gate x by silu(z), divide each group of channels by its root mean square, apply the weight.

    With ``norm_before_gate`` the gate is the last of the three steps.

    Args:
        x_TD: ``(T, D)``.
        z_TD: ``(T, D)``; may be a strided view (a column slice of the input projection's output).
        weight: ``(D,)``, or ``(H,)`` for one weight that all groups share.
        eps: constant added to the mean square.
        group_size: H, the number of channels that are normalised together; divides D.
        norm_before_gate: normalises x alone, and multiplies the result by silu(z).
        sum_over_ranks: differentiable function that sums ``(T,)`` over the ranks that share one
            group; None if each group is on one rank. With this function, D divides ``group_size``.
    Returns:
        ``(T, D)`` in x's dtype, contiguous. The arithmetic is fp32 (float64 for float64 inputs).
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    split = sum_over_ranks is not None
    shared = not split and weight.shape == (group_size,) != x_TD.shape[1:]
    _check(x_TD, z_TD, weight, group_size, split=split, shared=shared)
    inputs = GatedRMSNormInputs(
        channels=x_TD.shape[1],
        group_size=group_size,
        unit_channel_stride=x_TD.stride(1) == z_TD.stride(1) == 1,
        dtype=x_TD.dtype,
        device_type=x_TD.device.type,
        split_group=split,
        norm_before_gate=norm_before_gate,
        shared_weight=shared,
    )
    options: dict[str, Any] = {"sum_over_ranks": sum_over_ranks} if split else {}
    y_TD: Tensor = OP.chosen[backend, inputs].loaded.run(
        x_TD,
        z_TD,
        weight,
        eps,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        **options,
    )
    return y_TD


def _check(
    x_TD: Tensor, z_TD: Tensor, weight: Tensor, group_size: int, *, split: bool, shared: bool
) -> None:
    if (
        x_TD.dim() != 2
        or z_TD.shape != x_TD.shape
        or not (shared or weight.shape == x_TD.shape[1:])
    ):
        raise ValueError(
            f"gated_rms_norm: x has shape {list(x_TD.shape)}, z {list(z_TD.shape)} and weight {list(weight.shape)}; "
            f"they must be (T, D), (T, D) and (D,) or (group_size,) = ({group_size},)."
        )
    if split and (x_TD.shape[1] < 1 or group_size % x_TD.shape[1]):
        raise ValueError(
            f"gated_rms_norm: group_size {group_size} is not divisible by the {x_TD.shape[1]} channels of this rank."
        )
    if not split and (group_size < 1 or x_TD.shape[1] % group_size):
        raise ValueError(
            f"gated_rms_norm: {x_TD.shape[1]} channels are not divisible by group_size {group_size}."
        )


def rows_of_tile(block: int) -> int:
    """Return the rows of a tile of our kernels for a block of channels."""
    return max(1, _ELEMENTS_PER_TILE // block)


def tiles_of_program(tokens: int, groups: int, rows: int) -> int:
    """Return how many tiles of ``rows`` a program of our backward kernel sums up."""
    return math.ceil(math.ceil(tokens / rows) / max(1, _BACKWARD_PROGRAMS // groups))
