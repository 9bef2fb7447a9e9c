"""Activations on the meta device: shapes, and the inputs that the kernels save."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.on_meta import of_shape


def run(x_TF: Tensor, kind: Kind) -> Tensor:
    """Return a tensor of the result's shape; see `api.activation`."""
    features = x_TF.shape[-1] // (2 if kind == "swiglu" else 1)
    return of_shape((*x_TF.shape[:-1], features), x_TF)


def run_gate(x_TKF: Tensor, gate_TKF: Tensor) -> Tensor:
    """Return a tensor of the shape of x; see `api.sigmoid_gate`."""
    return of_shape(x_TKF.shape, x_TKF.contiguous(), gate_TKF)
