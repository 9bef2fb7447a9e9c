"""Ranks that share the experts of a layer.

[Note: whose tokens]
The tokens of an expert-parallel group's ranks must all be different. Ranks with different packs, or
different slices of one, have different tokens anyway. Tensor-parallel ranks have the same ones:

* where they share the matrices of each expert (``--expert-tensor-parallel-size`` is the
  tensor-parallel size), an expert-parallel group has one of them, and each works on all tokens with
  its part of the matrices;
* where each has whole experts (the size is 1), each sends its own ``1 / tp_size`` of the tokens to
  the experts.

Which experts a token goes to is decided on all tokens together in both cases, alike on all
tensor-parallel ranks, so that neither choices nor losses nor capacities depend on it.
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
    """This rank's place among those that share the experts of a layer."""

    group: Group | None = None
    size: int = 1
    rank: int = 0
    tp: TensorParallel = SINGLE
    """Ranks with the same tokens."""
    whole_experts: bool = False
    """True if tensor-parallel ranks have whole experts and dispatch rows of their own. See [Note:
    whose tokens].
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
        """Ranks that split the rows to dispatch; None if this rank dispatches all its rows."""
        return self.tp.group if self.whole_experts else None

    def enter(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank dispatches, from the hidden state between layers."""
        if self.tp.group is None:
            return x_TD
        if not self.whole_experts:
            return self.tp.enter(x_TD)
        return x_TD if self.tp.sequence_parallel else split_rows(x_TD, self.tp.group)

    def leave(self, y_TD: Tensor) -> Tensor:
        """Undo ``enter``, for the experts' results of these rows."""
        if self.tp.group is None:
            return y_TD
        if not self.whole_experts:
            return self.tp.leave(y_TD)
        return y_TD if self.tp.sequence_parallel else join_rows(y_TD, self.tp.group)

    def dispatched(self, x_TK: Tensor) -> Tensor:
        """Return a view of the rows that this rank dispatches.

        Args:
            x_TK: rows of all tokens that the tensor-parallel ranks know.
        """
        if not self.whole_experts:
            return x_TK
        rows = x_TK.shape[0] // self.tp.size
        return x_TK.narrow(0, self.tp.rank * rows, rows)

    def agree(self, overflow: Tensor) -> Tensor:
        """Return the largest value of the tensor-parallel ranks.

        Where they share the experts, their values are equal already.
        """
        return all_reduce_max(overflow.clone(), self.tp.group) if self.whole_experts else overflow

    def shard(self, num_experts: int, *segments: SplitSegment, dim: int) -> Shard:
        """Return this rank's part of stacked matrices ``(E, ...)``.

        It has its own experts, and of each its part of ``dim``.

        Raises:
            ValueError: the experts do not divide among the ranks, or the segments among the
                tensor-parallel ones.
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
