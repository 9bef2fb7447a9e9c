"""How the layers of a model share their matrices among tensor-parallel ranks.

Between the layers the hidden state is shared: equal on all ranks, or, with sequence parallelism,
split by rows. Inside a layer each rank works on all tokens with its own heads or channels.
``enter`` and ``leave`` are the two borders; with one rank they do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron_packed.distributed.differentiable import (
    Group,
    copy_to,
    gather_rows,
    linear_map,
    reduce_from,
    scatter_rows,
)
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This rank's place among those that share a layer's matrices."""

    group: Group | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    """True if the hidden state between layers is split by rows; it must divide among the ranks."""

    @classmethod
    def of(
        cls, groups: ParallelGroups | None, *, sequence_parallel: bool = False
    ) -> TensorParallel:
        if groups is None or groups.tp_size == 1:
            return SINGLE
        return cls(
            group=groups.tp_group,
            size=groups.tp_size,
            rank=groups.tp_rank,
            sequence_parallel=sequence_parallel,
        )

    def enter(self, x_TD: Tensor) -> Tensor:
        """The hidden state of all tokens, for use by this rank's heads alone; backward sums over
        the ranks.

        Args:
            x_TD: ``(T, D)``, or ``(T / size, D)`` with sequence parallelism.
        Returns:
            ``(T, D)``.
        """
        if self.group is None:
            return x_TD
        return (
            gather_rows(x_TD, self.group) if self.sequence_parallel else copy_to(x_TD, self.group)
        )

    def leave(self, y_TD: Tensor) -> Tensor:
        """The hidden state that is the sum of every rank's term: the counterpart of ``enter``."""
        if self.group is None:
            return y_TD
        return (
            scatter_rows(y_TD, self.group)
            if self.sequence_parallel
            else reduce_from(y_TD, self.group)
        )

    def counted_once(self, x: Tensor) -> Tensor:
        """Return ``x``, which every rank computes identically from entered values.

        Its gradient is divided by the ranks, so that their shares add up to it.
        """
        if self.group is None:
            return x
        size = self.size
        return linear_map(
            x, self.group, lambda value, _: value.view_as(value), lambda dy, _: dy / size
        )

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of every rank's own ``x``, for use by each rank on its own; backward sums as
        well.
        """
        return copy_to(reduce_from(x, self.group), self.group)

    def inside(self) -> TensorParallel:
        """The same part of each matrix, for what lies between ``enter`` and ``leave`` and
        communicates by neither.
        """
        return replace(self, group=None, sequence_parallel=False)

    def shard(self, *segments: SplitSegment, dim: int = 0) -> Shard:
        """This rank's part of consecutive segments along ``dim``."""
        return Shard.of(segments, self.rank, self.size, dim=dim)

    def local_count(self, segment: SplitSegment) -> int:
        """How many items of a segment this rank holds."""
        return self.shard(segment).local_length // segment.width

    def local_segment(self, segment: SplitSegment) -> SplitSegment:
        """What this rank holds of a segment, as a segment of its own."""
        if self.size == 1:
            return segment
        return replace(
            segment,
            noun=f"{segment.noun} of a tensor-parallel rank",
            count=self.local_count(segment),
        )

    def use_on_rows(self, parameter: nn.Parameter) -> nn.Parameter:
        """Mark a parameter that every rank holds and applies to the hidden state between layers."""
        if self.size == 1:
            return parameter
        shard = Shard.replicated(
            parameter.shape[0], self.size, own_gradients=self.sequence_parallel
        )
        return set_shard(parameter, shard)

    def use_inside(self, parameter: nn.Parameter) -> nn.Parameter:
        """Mark a parameter that every rank holds and applies to entered values, so that its
        gradient is a sum.
        """
        if self.size == 1:
            return parameter
        return set_shard(
            parameter, Shard.replicated(parameter.shape[0], self.size, own_gradients=True)
        )


SINGLE = TensorParallel()
"""One rank: nothing is split."""
