"""Experts whose products include the activation, on the meta device: shapes and saved tensors."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.shapes import of_shape


def run(x_RD: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a tensor of the output's shape; ``hidden`` is saved too. See `quack_joined.run`."""
    hidden_RF = x_RD.new_empty(x_RD.shape[0], w1_EFD.shape[1])
    return of_shape(x_RD.shape, x_RD, w1_EFD, w2_EDF, hidden_RF, offsets_E)
