"""Experts whose products include the activation, on the meta device: shapes and saved tensors."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.ops.on_meta import Memory, of_shape, workspace


def run(x_RD: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a tensor of the output's shape; ``hidden`` is saved too. See `quack_joined.run`."""
    rows, dtype = x_RD.shape[0], x_RD.dtype
    hidden = workspace(rows, w1_EFD.shape[1], dtype=dtype)
    activated = workspace(rows, w2_EDF.shape[2], dtype=dtype)
    memory = Memory(saved=[hidden], forward=[activated], early=[activated], backward=[hidden])
    with counted_as(Purpose.EXPERTS):
        return of_shape(x_RD.shape, x_RD, w1_EFD, w2_EDF, offsets_E, memory=memory)
