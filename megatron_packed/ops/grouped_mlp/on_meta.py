"""Grouped products of experts on the meta device: the shapes of their results."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.shapes import of_shape


def fc1(x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a tensor ``(R, F)``."""
    return of_shape((x_RD.shape[0], w1_EFD.shape[1]), x_RD, w1_EFD, offsets_E)


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """Apply the activation function; see ``ops.activation``."""
    return activation(x_RF, kind)


def fc2(x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a tensor ``(R, D)``."""
    return of_shape((x_RF.shape[0], w2_EDF.shape[1]), x_RF, w2_EDF, offsets_E)
