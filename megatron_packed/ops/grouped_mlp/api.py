"""The experts' MLPs over rows sorted by expert: ``y = activation(x W1_e^T) W2_e^T`` with e the
expert of the row.

Letters: R rows, D channels, E experts, F hidden channels (W1 has 2F rows for 'swiglu': gate, then
up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.backend_dispatch import Backend, Op

Step = Callable[[Tensor], Tensor]
Through = Callable[[Step, Step, Step, Tensor], Tensor]
"""How three steps follow each other: it decides what of them is kept for the backward pass, and
where.
"""


def then(first: Step, second: Step, third: Step, x: Tensor) -> Tensor:
    """``third(second(first(x)))``."""
    return third(second(first(x)))


OP = Op(
    "grouped_mlp",
    (
        Backend("grouped_mm", "megatron_packed.ops.grouped_mlp.grouped_mm"),
        Backend("reference", "megatron_packed.ops.grouped_mlp.reference"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class GroupedMLPInputs:
    """Shapes, types and options by which a backend is chosen."""

    channels: int
    experts: int
    hidden_in: int
    """Rows of W1: F, or 2F for 'swiglu'."""
    hidden_out: int
    """Columns of W2: F."""
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device_type: str


def grouped_mlp(
    x_RD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    *,
    activation: Kind,
    through: Through = then,
    backend: str = "auto",
) -> Tensor:
    """Every row through its expert.

    Args:
        x_RD: ``(R, D)`` sorted by expert.
        w1_EFD: ``(E, F, D)``, or ``(E, 2F, D)`` for 'swiglu'.
        w2_EDF: ``(E, D, F)``.
        offsets_E: ``(E,)`` int32 on the device: row number after the last row of each expert.
        activation: a kind of ``ops.activation``: 'gelu', 'squared_relu' or 'swiglu'.
        through: calls the first product, the activation and the second product; the same result as
        ``then``.
    Returns:
        ``(R, D)``; rows from ``offsets_E[-1]`` on are zero, in the output and in the gradient of x.
    Raises:
        ValueError: shapes that do not fit together.
        NoBackendError: the backend asked for cannot serve these inputs.
    """
    factor = 2 if activation == "swiglu" else 1
    experts, hidden_in, channels = w1_EFD.shape
    if (
        x_RD.dim() != 2
        or x_RD.shape[1] != channels
        or w2_EDF.shape != (experts, channels, hidden_in // factor)
    ):
        raise ValueError(
            f"grouped_mlp: x has shape {list(x_RD.shape)}, w1 {list(w1_EFD.shape)} and w2 {list(w2_EDF.shape)}; with "
            f"{activation!r} they must be (R, D), (E, {'2F' if factor == 2 else 'F'}, D) and (E, D, F)."
        )
    if offsets_E.shape != (experts,):
        raise ValueError(
            f"grouped_mlp: offsets has shape {list(offsets_E.shape)}; it must be (E,) with E = {experts}."
        )
    inputs = GroupedMLPInputs(
        channels=channels,
        experts=experts,
        hidden_in=hidden_in,
        hidden_out=w2_EDF.shape[2],
        dtype=x_RD.dtype,
        weight_dtype=w1_EFD.dtype,
        device_type=x_RD.device.type,
    )
    y_RD: Tensor = OP.run(inputs, backend)(
        x_RD, w1_EFD, w2_EDF, offsets_E, activation=activation, through=through
    )
    return y_RD
