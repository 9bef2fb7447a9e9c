"""Squared ReLU and its gradient in products of quack (Hopper), for bf16. See `quack_epilogues`.

The kernel of forward also writes the activation. The kernel of backward also applies the derivative,
and writes the activation again, so forward need not save it.
"""

from __future__ import annotations

from megatron_packed.ops.dense_mlp.api import DenseMLPInputs
from megatron_packed.ops.dense_mlp.on_meta import not_supported_reasons as reasons_of_inputs
from megatron_packed.ops.quack_epilogues import (
    not_supported_reasons as reasons_of_epilogues,
)
from megatron_packed.ops.quack_epilogues import squared_relu_gradient, squared_relu_product
from megatron_packed.ops.quack_tiles import device_reasons

JOINS = True


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return the reasons why quack's products do not support these inputs; empty if they do."""
    of_machine = reasons_of_epilogues() + device_reasons(inputs.device_type)
    return of_machine + reasons_of_inputs(inputs)


hidden_and_activation = squared_relu_product
"""Return ``x W1^T`` and its activation. See `api.JoinedProducts`."""
gradient = squared_relu_gradient
"""Return the gradient of ``hidden`` and its activation. See `api.JoinedProducts`."""
