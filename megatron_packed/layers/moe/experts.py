"""The experts of a rank: feed-forward networks in two stacked weights.

Letters: E experts of this rank, D hidden size, F inner size of one expert, R rows sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.distributed.sharding import set_expert_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.mlp import inner_segments
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.offload import STAYS, LayerOffload
from megatron_packed.layers.parameters import new_parameter
from megatron_packed.memory.recompute import without_output
from megatron_packed.ops.grouped_mlp.api import Step, grouped_mlp


class GroupedExperts(nn.Module):
    """Every expert on its own range of rows, in one grouped matrix product per projection.

    ``fc1`` is ``(E, F, D)`` (``(E, 2F, D)`` ``[gate | up]`` for SwiGLU), ``fc2`` is ``(E, D, F)``.
    There are no biases. Where tensor-parallel ranks share the inner channels of every expert, the
    result is this rank's term of a sum.

    Args:
        num_experts: those of all ranks.
        recompute_activation: the backward pass computes the activation's output again.
        offload: where what is saved waits.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        kind: str,
        backends: Backends,
        ep: ExpertParallel,
        recompute_activation: bool = False,
        offload: LayerOffload = STAYS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.kind, self.backend = kind, backends.grouped_mlp
        self.recompute_activation, self.offload = recompute_activation, offload
        segments = inner_segments(inner_size, kind)
        rows = ep.shard(num_experts, *segments, dim=1)
        columns = ep.shard(num_experts, segments[0], dim=2)
        whole_rows = sum(segment.count for segment in segments)
        fc1 = rows.local_shape((num_experts, whole_rows, hidden_size))
        fc2 = columns.local_shape((num_experts, hidden_size, inner_size))
        self.fc1 = set_expert_shard(new_parameter(*fc1, device=device, dtype=dtype), rows)
        self.fc2 = set_expert_shard(new_parameter(*fc2, device=device, dtype=dtype), columns)

    def forward(self, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """``(R, D)`` -> ``(R, D)``; rows beyond the last offset come out as zeros."""
        return grouped_mlp(
            x_RD,
            self.fc1,
            self.fc2,
            offsets_E,
            activation=self.kind,
            through=self._through,
            backend=self.backend,
        )

    def _through(self, fc1: Step, activation: Step, fc2: Step, x_RD: Tensor) -> Tensor:
        part = self.offload.run
        hidden_RF = part("expert_fc1", self, fc1, x_RD)
        if self.recompute_activation:
            return without_output(activation, fc2, hidden_RF)
        return part("expert_fc2", self, fc2, part("moe_act", self, activation, hidden_RF))
