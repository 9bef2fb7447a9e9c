"""The experts: E feed-forward networks in two stacked weights.

Letters: E experts, D hidden size, F inner size of one expert, R rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.layers.backends import Backends
from megatron_packed.layers.mlp import fc1_width
from megatron_packed.layers.parameters import new_parameter
from megatron_packed.ops.grouped_mlp.api import grouped_mlp


class GroupedExperts(nn.Module):
    """Every expert on its own range of rows, in one grouped matrix product per projection.

    ``fc1`` is ``(E, F, D)`` (``(E, 2F, D)`` ``[gate | up]`` for SwiGLU), ``fc2`` is ``(E, D, F)``. There are no biases.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        kind: str,
        backends: Backends,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.kind, self.backend = kind, backends.grouped_mlp
        self.fc1 = new_parameter(num_experts, fc1_width(inner_size, kind), hidden_size, device=device, dtype=dtype)
        self.fc2 = new_parameter(num_experts, hidden_size, inner_size, device=device, dtype=dtype)

    def forward(self, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """``(R, D)`` -> ``(R, D)``; rows beyond the last offset come out as zeros."""
        return grouped_mlp(x_RD, self.fc1, self.fc2, offsets_E, activation=self.kind, backend=self.backend)
