"""MLPs of the experts in plain PyTorch: each expert runs on all rows, and a mask selects the results.

This is E times the work. The shapes of the products do not depend on the routing, so a row's result
depends only on the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_packed.ops.activation.api import Kind, activation

if TYPE_CHECKING:
    from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return an empty list: the reference supports all inputs."""
    return []


def fc1(x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the first product, ``(R, D)`` -> ``(R, F)``, with zeros from the last offset on."""
    return _grouped_linear(x_RD, w1_EFD, offsets_E)


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """Apply the activation function; see ``ops.activation``."""
    return activation(x_RF, kind, backend="reference")


def fc2(x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the second product, ``(R, F)`` -> ``(R, D)``, with zeros from the last offset on."""
    return _grouped_linear(x_RF, w2_EDF, offsets_E)


def _grouped_linear(x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor) -> Tensor:
    row_R1 = torch.arange(x_RI.shape[0], device=x_RI.device)[:, None]
    start = torch.zeros_like(offsets_E[0])
    y_RO = x_RI.new_zeros(x_RI.shape[0], weight_EOI.shape[1])
    for expert in range(weight_EOI.shape[0]):
        mine_R1 = (row_R1 >= start) & (row_R1 < offsets_E[expert])
        start = offsets_E[expert]
        y_RO = torch.where(mine_R1, linear(x_RI, weight_EOI[expert]), y_RO)
    return y_RO
