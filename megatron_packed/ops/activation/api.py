"""Activation function between the two matrix products of an MLP or an expert; gates.

Shapes: T rows, F features, K groups of features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

Kind = Literal["gelu", "squared_relu", "swiglu"]
KINDS: tuple[Kind, ...] = ("gelu", "squared_relu", "swiglu")
GATE = "sigmoid_gate"

OP = Op(
    "activation",
    (
        GPUBackend("triton", "megatron_packed.ops.activation.triton_kernel"),
        Backend("reference", "megatron_packed.ops.activation.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.activation.on_meta"),
)


@dataclass(frozen=True, kw_only=True)
class ActivationInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    kind: str
    """One of `KINDS`, or `GATE`."""
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


def sigmoid_gate(x_TKF: Tensor, gate_TKF: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute ``x * sigmoid(gate)``.

    The arithmetic is fp32, with one rounding to the dtype of x. In forward and backward each
    element depends only on itself. The two inputs are saved for backward.

    Args:
        x_TKF: ``(T, K, F)``.
        gate_TKF: shape and dtype of x; the last dimension is contiguous, the others may have any
            strides, as in a view of a fused projection.
    Returns:
        ``(T, K, F)``, contiguous.
    Raises:
        ValueError: the two tensors differ in shape or dtype.
    """
    if x_TKF.dim() != 3 or x_TKF.shape != gate_TKF.shape or x_TKF.dtype != gate_TKF.dtype:
        raise ValueError(
            f"x and its gate need one shape (T, K, F) and dtype; got {tuple(x_TKF.shape)} {x_TKF.dtype} and "
            f"{tuple(gate_TKF.shape)} {gate_TKF.dtype}."
        )
    inputs = ActivationInputs(
        kind=GATE, features=x_TKF.shape[-1], dtype=x_TKF.dtype, device_type=x_TKF.device.type
    )
    y_TKF: Tensor = OP.chosen[backend, inputs].loaded.run_gate(x_TKF, gate_TKF)
    return y_TKF
