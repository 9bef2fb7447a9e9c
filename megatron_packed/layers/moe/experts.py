"""The experts: E feed-forward networks in two stacked weights.

Letters: E experts, D hidden size, F inner size of one expert, R rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.distributed.sharding import set_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.mlp import inner_segments
from megatron_packed.layers.parameters import new_parameter
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.ops.grouped_mlp.api import grouped_mlp


class GroupedExperts(nn.Module):
    """Every expert on its own range of rows, in one grouped matrix product per projection.

    ``fc1`` is ``(E, F, D)`` (``(E, 2F, D)`` ``[gate | up]`` for SwiGLU), ``fc2`` is ``(E, D, F)``. There are no biases.
    Tensor-parallel ranks share the inner channels of every expert; the result is then this rank's term of a sum.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        kind: str,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.kind, self.backend = kind, backends.grouped_mlp
        segments = inner_segments(inner_size, kind)
        rows, columns = tp.shard(*segments, dim=1), tp.shard(segments[0], dim=2)
        self.fc1 = new_parameter(num_experts, rows.local_length, hidden_size, device=device, dtype=dtype)
        self.fc2 = new_parameter(num_experts, hidden_size, columns.local_length, device=device, dtype=dtype)
        set_shard(self.fc1, rows)
        set_shard(self.fc2, columns)

    def forward(self, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """``(R, D)`` -> ``(R, D)``; rows beyond the last offset come out as zeros."""
        return grouped_mlp(x_RD, self.fc1, self.fc2, offsets_E, activation=self.kind, backend=self.backend)
