"""Grouped products of experts on the meta device: the shapes of their results."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs
from megatron_packed.ops.grouped_mlp.input_reasons import shape_and_dtype_reasons
from megatron_packed.ops.on_meta import Memory, of_shape, workspace


def fc1(x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a tensor ``(R, F)``."""
    with counted_as(Purpose.EXPERTS):
        return of_shape((x_RD.shape[0], w1_EFD.shape[1]), x_RD, w1_EFD, offsets_E)


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """Apply the activation function; see ``ops.activation``."""
    with counted_as(Purpose.EXPERTS):
        return activation(x_RF, kind)


fc2 = fc1
"""Return a tensor ``(R, D)``; the arguments are rows ``(R, F)`` and weights ``(E, D, F)``."""


def reasons_to_keep_apart(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why the activation is no part of the products; empty if it may be one."""
    reasons = []
    if inputs.activation != "squared_relu":
        reasons.append(f"the products compute squared_relu, not {inputs.activation}")
    return reasons + ([inputs.apart] if inputs.apart else [])


class JoinedExperts:
    """Experts whose products include the activation: shapes and saved tensors."""

    @staticmethod
    def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
        """Return the reasons why joined products support these inputs on no GPU; empty if they may."""
        return shape_and_dtype_reasons(inputs) + reasons_to_keep_apart(inputs)

    @staticmethod
    def run(x_RD: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
        """Return a tensor of the output's shape; ``hidden`` is saved too. See `quack_joined.run`."""
        rows, dtype = x_RD.shape[0], x_RD.dtype
        hidden = workspace(rows, w1_EFD.shape[1], dtype=dtype)
        activated = workspace(rows, w2_EDF.shape[2], dtype=dtype)
        memory = Memory(saved=[hidden], forward=[activated], early=[activated], backward=[hidden])
        with counted_as(Purpose.EXPERTS):
            return of_shape(x_RD.shape, x_RD, w1_EFD, w2_EDF, offsets_E, memory=memory)
