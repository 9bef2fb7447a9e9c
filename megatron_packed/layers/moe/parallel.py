"""Expert parallelism: the experts of an MoE layer are split over several ranks.

[Note: whose tokens]
The ranks of an expert-parallel group must dispatch different tokens. Ranks with different packs, or
with different slices of a pack, have different tokens. The t tensor-parallel ranks have the same
tokens. ``--expert-tensor-parallel-size`` e divides t, and e consecutive ranks share the matrices of
each expert:

* If e equals t, an expert-parallel group contains only one of the tensor-parallel ranks. Each rank
  processes all tokens with its part of the matrices.
* If e is smaller, each rank owns ``1 / t`` of the tokens, and computes their logits. The e ranks that
  share matrices gather their tokens and dispatch these ``e / t`` of the tokens. With e = 1, each rank
  holds complete experts and dispatches its own tokens.

In all cases every tensor-parallel rank routes all tokens and gets the same routes. So routes,
losses and capacities do not depend on the case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_packed.distributed.all_to_all import ExchangingAxis
from megatron_packed.distributed.collectives import all_reduce_max
from megatron_packed.distributed.differentiable import (
    Group,
    gather_rows,
    join_rows,
    scatter_rows,
    split_rows,
)
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.tensor_parallel_shards import ExpertRange, Shard, SplitSegment
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(ExchangingAxis):
    """Expert-parallel axis of this rank; its ranks exchange rows in equal parts."""

    tp: TensorParallel = SINGLE
    """Tensor parallelism of this rank; tensor-parallel ranks have the same tokens."""
    matrices: TensorParallel | None = None
    """Split of the matrices of experts; None for that of ``tp``. See [Note: whose tokens]."""

    @classmethod
    def from_groups(
        cls, groups: ParallelGroups | None, tp: TensorParallel = SINGLE
    ) -> ExpertParallel:
        if groups is None:
            return cls(tp=tp)
        matrices = TensorParallel(**vars(groups.expert_tp))
        return cls(
            **vars(groups.ep),
            tp=tp,
            matrices=matrices if matrices.size < tp.size else None,
        )

    @cached_property
    def split(self) -> TensorParallel:
        return self.matrices or self.tp

    @cached_property
    def token_parts(self) -> int:
        """Number of parts of the tokens that tensor-parallel ranks dispatch separately."""
        return self.tp.size // self.split.size

    @cached_property
    def splits_tokens(self) -> bool:
        """True if tensor-parallel ranks dispatch different parts of the tokens."""
        return self.token_parts > 1

    @property
    def rows_group(self) -> Group | None:
        """Tensor-parallel group, if each of its ranks owns a part of the rows; else None."""
        return self.tp.group if self.splits_tokens else None

    def enter(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank routes, from the hidden state between layers."""
        if self.tp.group is None:
            return x_TD
        if not self.splits_tokens:
            return self.tp.enter(x_TD)
        return x_TD if self.tp.sequence_parallel else split_rows(x_TD, self.tp.group)

    def share(self, x_TD: Tensor) -> Tensor:
        """Gather the entered rows of all ranks that share matrices; only if tokens are split."""
        return gather_rows(x_TD, self.split.group)

    def unshare(self, y_TD: Tensor) -> Tensor:
        """Sum the results over the ranks that share matrices; return those of the entered rows.

        Call it only if tokens are split. Otherwise results are terms of a sum that ``leave`` makes.
        """
        return scatter_rows(y_TD, self.split.group)

    def leave(self, y_TD: Tensor) -> Tensor:
        """Convert results of the entered rows back to the layout of the hidden state."""
        if self.tp.group is None:
            return y_TD
        if not self.splits_tokens:
            return self.tp.leave(y_TD)
        return y_TD if self.tp.sequence_parallel else join_rows(y_TD, self.tp.group)

    def dispatched(self, x_TK: Tensor) -> Tensor:
        """Return a view of the rows that this rank dispatches.

        Args:
            x_TK: rows of all tokens of the tensor-parallel ranks.
        """
        rows = x_TK.shape[0] // self.token_parts
        return x_TK.narrow(0, self.tp.rank // self.split.size * rows, rows)

    def agree(self, values: Tensor) -> Tensor:
        """Return the maxima of ``values`` over the tensor-parallel ranks.

        There is no communication if these ranks dispatch the same tokens: their values are equal.
        """
        return all_reduce_max(values.clone(), self.tp.group) if self.splits_tokens else values

    def shard(self, num_experts: int, *segments: SplitSegment, dim: int) -> Shard:
        """Return this rank's shard of stacked matrices ``(E, ...)``.

        The shard contains this rank's experts. If several ranks share the matrices of experts, it
        contains only this rank's part of dimension ``dim``.

        Args:
            num_experts: number of experts on all ranks together.
            segments: segments of dimension ``dim``.
            dim: dimension that ranks split.
        Raises:
            ValueError: the experts cannot be split evenly over the expert-parallel ranks, or the
                segments over the ranks that share matrices.
        """
        local_experts = Shard.from_segments(
            [SplitSegment(noun="experts", count=num_experts)], self.rank, self.size, axis="ep_size"
        )
        if self.split.size == 1:
            return local_experts
        (piece,) = local_experts.pieces
        inner = self.split.shard(*segments, dim=dim)
        first = ExpertRange(start=piece.start, length=piece.length, total=num_experts)
        return Shard(dim=dim, length=inner.length, pieces=inner.pieces, first=first)
