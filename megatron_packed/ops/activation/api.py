"""Activation function between the two matrix products of an MLP or an expert.

Shapes: T rows, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

Kind = Literal["gelu", "squared_relu", "swiglu"]
KINDS: tuple[Kind, ...] = ("gelu", "squared_relu", "swiglu")

OP = Op(
    "activation",
    (
        Backend("triton", "megatron_packed.ops.activation.triton_kernel"),
        Backend("reference", "megatron_packed.ops.activation.reference"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ActivationInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    kind: Kind
    features: int
    dtype: torch.dtype
    device_type: str


def activation(x_TF: Tensor, kind: Kind, *, backend: str = "auto") -> Tensor:
    """Compute ``gelu(x)``, ``relu(x)^2``, or ``silu(gate) * up`` of ``x = [gate | up]``.

    The arithmetic is fp32, with one rounding to the dtype of x. In forward and backward each
    element depends only on its own row. Only the input is saved for backward.

    Args:
        x_TF: any leading dimensions; for ``swiglu`` the last dimension is 2 F, with the gate first.
        kind: ``gelu`` is the exact function ``x * Phi(x)``, as in Megatron's unfused ``F.gelu``.
            Megatron's fused bias-gelu is the tanh approximation, which differs by up to 5e-4.
    Returns:
        a tensor of the shape of x; for ``swiglu`` the last dimension is F.
    Raises:
        ValueError: the kind is unknown, or the last dimension is odd for ``swiglu``.
    """
    if kind not in KINDS:
        raise ValueError(f"activation kind {kind!r} is unknown; choose one of {list(KINDS)}.")
    if kind == "swiglu" and x_TF.shape[-1] % 2:
        raise ValueError(
            f"swiglu splits the last dimension into gate and up; {x_TF.shape[-1]} is odd, pass an even size."
        )
    inputs = ActivationInputs(
        kind=kind, features=x_TF.shape[-1], dtype=x_TF.dtype, device_type=x_TF.device.type
    )
    y_TF: Tensor = OP.chosen[backend, inputs].loaded.run(x_TF, kind)
    return y_TF
