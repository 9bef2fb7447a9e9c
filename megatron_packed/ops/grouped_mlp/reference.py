"""Every expert on all rows, then a mask: E times the work, and no row's result depends on where the
others went.

The shapes of the products never change, whatever the routing, so a row's result depends on nothing
but the row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.activation.api import activation as activate

if TYPE_CHECKING:
    from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs, Through


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Always empty: it runs wherever PyTorch runs."""
    return []


def run(
    x_RD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    offsets_E: Tensor,
    *,
    activation: Kind,
    through: Through,
) -> Tensor:
    """See ``api.grouped_mlp``."""
    row_R1 = torch.arange(x_RD.shape[0], device=x_RD.device)[:, None]
    start = torch.zeros_like(offsets_E[0])
    y_RD = torch.zeros_like(x_RD)
    for expert in range(w1_EFD.shape[0]):
        mine_R1 = (row_R1 >= start) & (row_R1 < offsets_E[expert])
        start = offsets_E[expert]
        expert_RD = through(
            partial(linear, weight=w1_EFD[expert]),
            lambda x_RF: activate(x_RF, activation, backend="reference"),
            partial(linear, weight=w2_EDF[expert]),
            x_RD,
        )
        y_RD = torch.where(mine_R1, expert_RD, y_RD)
    return y_RD
