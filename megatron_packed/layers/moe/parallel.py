"""Expert parallelism: the experts of an MoE layer are split over several ranks.

[Note: whose tokens]
The ranks of an expert-parallel group must dispatch different tokens. Ranks with different packs, or
with different slices of a pack, have different tokens. Tensor-parallel ranks have the same tokens,
so there are two cases:

* If ``--expert-tensor-parallel-size`` equals the tensor-parallel size, the matrices of each expert
  are split over the tensor-parallel ranks. An expert-parallel group contains only one of these
  ranks. Each rank processes all tokens with its part of the matrices.
* If ``--expert-tensor-parallel-size`` is 1, each rank holds complete experts. Each tensor-parallel
  rank dispatches its own ``1 / tp_size`` of the tokens.

In both cases every tensor-parallel rank routes all tokens and gets the same routes. So routes,
losses and capacities do not depend on the case.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_packed.distributed.collectives import all_reduce_max
from megatron_packed.distributed.differentiable import Group, join_rows, split_rows
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.tensor_parallel_shards import ExpertRange, Shard, SplitSegment
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Expert-parallel group, size and rank of this rank."""

    group: Group | None = None
    size: int = 1
    rank: int = 0
    tp: TensorParallel = SINGLE
    """Tensor parallelism of this rank; tensor-parallel ranks have the same tokens."""
    whole_experts: bool = False
    """True if each tensor-parallel rank holds complete experts and dispatches its own rows.

    See [Note: whose tokens].
    """

    @classmethod
    def of(cls, groups: ParallelGroups | None, tp: TensorParallel = SINGLE) -> ExpertParallel:
        if groups is None:
            return cls(tp=tp)
        return cls(
            group=groups.ep_group,
            size=groups.ep_size,
            rank=groups.ep_rank,
            tp=tp,
            whole_experts=groups.expert_tp_size == 1 < groups.tp_size,
        )

    @property
    def rows_group(self) -> Group | None:
        """Tensor-parallel group, if each of its ranks dispatches its own part of the rows; else
        None."""
        return self.tp.group if self.whole_experts else None

    def enter(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank dispatches, from the hidden state between layers."""
        if self.tp.group is None:
            return x_TD
        if not self.whole_experts:
            return self.tp.enter(x_TD)
        return x_TD if self.tp.sequence_parallel else split_rows(x_TD, self.tp.group)

    def leave(self, y_TD: Tensor) -> Tensor:
        """Convert results of the dispatched rows back to the layout of the hidden state."""
        if self.tp.group is None:
            return y_TD
        if not self.whole_experts:
            return self.tp.leave(y_TD)
        return y_TD if self.tp.sequence_parallel else join_rows(y_TD, self.tp.group)

    def dispatched(self, x_TK: Tensor) -> Tensor:
        """Return a view of the rows that this rank dispatches.

        Args:
            x_TK: rows of all tokens of the tensor-parallel ranks.
        """
        if not self.whole_experts:
            return x_TK
        rows = x_TK.shape[0] // self.tp.size
        return x_TK.narrow(0, self.tp.rank * rows, rows)

    def agree(self, overflow: Tensor) -> Tensor:
        """Return the maximum of ``overflow`` over the tensor-parallel ranks.

        There is no communication if the matrices of experts are split over these ranks: their
        values are then equal.
        """
        return all_reduce_max(overflow.clone(), self.tp.group) if self.whole_experts else overflow

    def shard(self, num_experts: int, *segments: SplitSegment, dim: int) -> Shard:
        """Return this rank's shard of stacked matrices ``(E, ...)``.

        The shard contains this rank's experts. If the matrices of experts are split over
        tensor-parallel ranks, it contains only this rank's part of dimension ``dim``.

        Args:
            num_experts: number of experts on all ranks together.
            segments: segments of dimension ``dim``.
            dim: dimension that tensor-parallel ranks split.
        Raises:
            ValueError: the experts cannot be split evenly over the expert-parallel ranks, or the
                segments over the tensor-parallel ranks.
        """
        own = Shard.of(
            [SplitSegment(noun="experts", count=num_experts)], self.rank, self.size, axis="ep_size"
        )
        if self.tp.size == 1 or self.whole_experts:
            return own
        (piece,) = own.pieces
        inner = self.tp.shard(*segments, dim=dim)
        first = ExpertRange(start=piece.start, length=piece.length, total=num_experts)
        return Shard(dim=dim, length=inner.length, pieces=inner.pieces, first=first)
