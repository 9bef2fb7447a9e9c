"""Experts of a rank: feed-forward networks with their weights stacked in two tensors.

Letters: E experts of this rank, D hidden size, F inner size of one expert, R rows sorted by expert.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import set_expert_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import NamedCall, observation
from megatron_packed.layers.mlp import inner_segments
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.ops.activation.api import Kind
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.grouped_mlp import api as grouped_mlp


class GroupedExperts(nn.Module):
    """Experts of a rank, each applied to its own range of rows by grouped matrix products.

    ``fc1`` is ``(E, F, D)`` (``(E, 2F, D)`` ``[gate | up]`` for SwiGLU), ``fc2`` is ``(E, D, F)``.
    There are no biases. If the inner channels of each expert are split over tensor-parallel ranks,
    the result is this rank's term of a sum.

    Args:
        num_experts: number of experts on all ranks together.
        hidden_size: D.
        inner_size: inner size of one expert before it is split over ranks.
        kind: activation function.
        ep: expert parallelism of this rank.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        kind: Kind,
        ep: ExpertParallel,
        build: Build,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.backend = build.backends.grouped_mlp
        segments = inner_segments(inner_size, kind)
        rows = ep.shard(num_experts, *segments, dim=1)
        columns = ep.shard(num_experts, segments[0], dim=2)
        whole_rows = sum(segment.count for segment in segments)
        fc1 = rows.local_shape((num_experts, whole_rows, hidden_size))
        fc2 = columns.local_shape((num_experts, hidden_size, inner_size))
        self.fc1 = set_expert_shard(build.new_parameter(*fc1), rows)
        self.fc2 = set_expert_shard(build.new_parameter(*fc2), columns)
        self.expert_fc1 = NamedCall()
        self.moe_act = NamedCall()
        self.expert_fc2 = NamedCall()

    def forward(self, x_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Apply the experts to the sorted rows; rows beyond the last offset give zeros.

        Args:
            x_RD: ``(R, D)`` rows sorted by expert.
            offsets_E: ``(E,)`` int32: end of the rows of each expert.
        Returns:
            ``(R, D)``.
        """
        backend = grouped_mlp.grouped_mlp_backend(
            x_RD,
            self.fc1,
            self.fc2,
            offsets_E,
            activation=self.kind,
            backend=self.backend,
            apart=self._reason_apart(x_RD.device.type),
        )
        if (run := grouped_mlp.joined_function(backend)) is not None:
            return run(x_RD, self.fc1, self.fc2, offsets_E)
        hidden_RF = self.expert_fc1(backend.fc1, x_RD, self.fc1, offsets_E)
        hidden_RF = self.moe_act(backend.activate, hidden_RF, self.kind)
        y_RD: Tensor = self.expert_fc2(backend.fc2, hidden_RF, self.fc2, offsets_E)
        return y_RD

    def _reason_apart(self, device_type: str) -> str:
        """Return the reason why the steps must be separate calls; empty if there is none."""
        if (self.kind, planned_type(device_type)) not in grouped_mlp.WITH_JOINED:
            return ""
        return observation(self.expert_fc1, self.moe_act, self.expert_fc2)
