"""Tensor parallelism of layers: the matrices of a layer are split over several ranks.

Between the layers the hidden state is equal on all ranks, or split by rows with sequence
parallelism. Inside a layer is the tensor-parallel region: each rank processes all tokens with its
own heads or channels. ``enter`` and ``leave`` are the collectives at the two boundaries of this
region. With one rank they do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron_packed.distributed.differentiable import (
    copy_to,
    gather_rows,
    linear_map,
    reduce_from,
    scatter_rows,
)
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.distributed.sequence_parallel_products import (
    NO_OVERLAP,
    SequenceParallelProducts,
    TensorOverlap,
)
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Axis):
    """Tensor-parallel axis of this rank."""

    sequence_parallel: bool = False
    """True if the hidden state between layers is split by rows.

    The number of rows must then be a multiple of ``size``.
    """
    products: SequenceParallelProducts | None = None
    """Products of linear layers with the collectives of sequence parallelism; None without it."""

    def __post_init__(self) -> None:
        # The decoder replaces the flag alone, so the products must follow it.
        if not self.sequence_parallel:
            object.__setattr__(self, "products", None)
        elif self.products is None and self.group is not None:
            object.__setattr__(self, "products", SequenceParallelProducts(self.group))

    @classmethod
    def from_groups(
        cls,
        groups: ParallelGroups | None,
        *,
        sequence_parallel: bool = False,
        overlap: TensorOverlap = NO_OVERLAP,
    ) -> TensorParallel:
        if groups is None or groups.tp.size == 1:
            return SINGLE
        products = None
        if sequence_parallel and groups.tp.group is not None:
            products = SequenceParallelProducts(groups.tp.group, overlap)
        return cls(**vars(groups.tp), sequence_parallel=sequence_parallel, products=products)

    def close(self) -> None:
        """Free memory that the ranks share; call it after all graphs were released."""
        if self.products is not None:
            self.products.close()

    def enter(self, x_TD: Tensor) -> Tensor:
        """Enter the tensor-parallel region: return the hidden state of all tokens.

        The backward pass sums gradients over the ranks, because each rank uses the hidden state for
        its own heads or channels only.

        Args:
            x_TD: hidden state between layers, ``(T, D)``, or ``(T / size, D)`` with sequence
                parallelism.
        Returns:
            ``(T, D)``.
        """
        if self.group is None:
            return x_TD
        return (
            gather_rows(x_TD, self.group) if self.sequence_parallel else copy_to(x_TD, self.group)
        )

    def leave(self, y_TD: Tensor) -> Tensor:
        """Leave the tensor-parallel region: sum ``y`` over the ranks to the hidden state.

        With sequence parallelism the result has only this rank's ``T / size`` rows.
        """
        if self.group is None:
            return y_TD
        return (
            scatter_rows(y_TD, self.group)
            if self.sequence_parallel
            else reduce_from(y_TD, self.group)
        )

    def counted_once(self, x: Tensor) -> Tensor:
        """Return ``x`` unchanged; in backward divide its gradient by the number of ranks.

        Use it for a value that every rank computes identically inside the tensor-parallel region.
        The backward of ``enter`` sums over the ranks and would count such a gradient ``size``
        times.
        """
        if self.group is None:
            return x
        size = self.size
        return linear_map(
            x, self.group, lambda value, _: value.view_as(value), lambda dy, _: dy / size
        )

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks inside the tensor-parallel region: all-reduce in both passes."""
        return copy_to(reduce_from(x, self.group), self.group)

    def inside(self) -> TensorParallel:
        """Return the same split without a group, for a module inside the tensor-parallel region.

        Such a module has the same shards, but its ``enter`` and ``leave`` do nothing.
        """
        return replace(self, group=None, sequence_parallel=False)

    def shard(self, *segments: SplitSegment, dim: int = 0) -> Shard:
        """Return this rank's shard of consecutive segments along ``dim``."""
        return Shard.from_segments(segments, self.rank, self.size, dim=dim)

    def local_count(self, segment: SplitSegment) -> int:
        """Return the number of items of a segment that this rank holds."""
        return self.shard(segment).local_length // segment.width

    def local_segment(self, segment: SplitSegment) -> SplitSegment:
        """Return a segment of the items that this rank holds, for a further split."""
        if self.size == 1:
            return segment
        return replace(
            segment,
            noun=f"{segment.noun} of a tensor-parallel rank",
            count=self.local_count(segment),
        )

    def use_on_rows(self, parameter: nn.Parameter) -> nn.Parameter:
        """Mark a replicated parameter that is applied to the hidden state between layers.

        With sequence parallelism each rank computes only the gradient term of its own rows.
        """
        return self._replicated(parameter, own_gradients=self.sequence_parallel)

    def use_inside(self, parameter: nn.Parameter) -> nn.Parameter:
        """Mark a replicated parameter that is applied inside the tensor-parallel region.

        Each rank computes one term of its gradient, so the terms are summed.
        """
        return self._replicated(parameter, own_gradients=True)

    def _replicated(self, parameter: nn.Parameter, *, own_gradients: bool) -> nn.Parameter:
        if self.size == 1:
            return parameter
        shard = Shard.replicated(parameter.shape[0], self.size, own_gradients=own_gradients)
        return set_shard(parameter, shard)


SINGLE = TensorParallel()
"""No tensor parallelism: one rank holds complete matrices."""
