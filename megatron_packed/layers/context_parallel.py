"""How ranks share the tokens of a pack.

Between the layers each rank has the hidden state of its own rows (`packed.cp_partition`). Norms,
MLPs, experts, embedding and loss work row by row and need nothing else; attention and Mamba
exchange what lets them see whole documents. Parameters are the same on all ranks, and the terms of
their gradients are summed with data parallelism's.

Letters: T tokens of the pack, of which each of c ranks has T / c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.collectives import all_gather_rows, all_reduce_sum
from megatron_packed.distributed.differentiable import Group
from megatron_packed.distributed.groups import ParallelGroups, global_ranks
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment
from megatron_packed.packed.cp_partition import Partition
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import RankOrder

A2A, ALL_GATHER, P2P = "a2a", "all_gather", "p2p"
_ALIASES = {"allgather": ALL_GATHER}


def cp_comm_type(name: str) -> str:
    """The name of a way to communicate, aliases resolved.

    Raises:
        ValueError: there is no such way.
    """
    name = _ALIASES.get(name, name)
    if name not in (A2A, ALL_GATHER, P2P):
        raise ValueError(
            f"cp_comm_type is {name!r}; choose a2a, all_gather (also spelt allgather) or p2p."
        )
    return name


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """This rank's place among those that share the tokens of a pack."""

    group: Group | None = None
    size: int = 1
    rank: int = 0
    comm_type: str = A2A
    """Exchange of attention: heads for rows (``a2a``), or keys and values, at once
    (``all_gather``) or from neighbour to neighbour (``p2p``). The latter two have rows in a zigzag.
    """

    @classmethod
    def of(cls, groups: ParallelGroups | None, comm_type: str = A2A) -> ContextParallel:
        """
        Raises:
            ValueError: there is no such ``comm_type``.
        """
        comm_type = cp_comm_type(comm_type)
        if groups is None or groups.cp_size == 1:
            return SINGLE
        return cls(
            group=groups.cp_group, size=groups.cp_size, rank=groups.cp_rank, comm_type=comm_type
        )

    @property
    def exchanges_heads(self) -> bool:
        return self.comm_type == A2A

    @property
    def partition(self) -> Partition:
        return Partition(size=self.size, rank=self.rank, zigzag=not self.exchanges_heads)

    @property
    def global_ranks(self) -> list[int]:
        """Of the group, in its order."""
        return [] if self.group is None else global_ranks(self.group)

    def order(self, packed: PackedSeqParams) -> RankOrder | None:
        """Return the order of rows from the tables of the pack, or compute it."""
        prepared = packed.tables.rank_order
        return self.partition.order(packed) if prepared is None else prepared

    def own(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """This rank's ``(T / c, ...)`` of what has one entry for each slot of the pack; not
        differentiable.
        """
        return x_T if self.size == 1 else self.partition.own(x_T, self.order(packed))

    def valid(self, packed: PackedSeqParams) -> Tensor:
        """Return which of this rank's rows belong to a real document: ``(T / c,)`` bool."""
        prepared_T = packed.tables.rank_valid
        return self.own(packed.valid, packed) if prepared_T is None else prepared_T

    def in_order_of_slots(self, x_TW: Tensor, packed: PackedSeqParams) -> Tensor:
        """Rows of all ranks, in the order of ranks, as rows of the pack."""
        order = self.order(packed)
        return x_TW if order is None else permute_rows(x_TW, order.places_T, order.slots_T)

    def in_order_of_ranks(self, x_TW: Tensor, packed: PackedSeqParams) -> Tensor:
        """The inverse of ``in_order_of_slots``."""
        order = self.order(packed)
        return x_TW if order is None else permute_rows(x_TW, order.slots_T, order.places_T)

    def gather(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, ...)`` of the whole pack, from each rank's ``(T / c, ...)``; what ``own`` takes
        apart.
        """
        return self.in_order_of_slots(all_gather_rows(x_T, self.group), packed)

    def part(self, *segments: SplitSegment) -> Shard:
        """The heads among ``segments`` that this rank works on where it exchanges them for rows.

        Raises:
            ValueError: the items of a segment do not fit the ranks.
        """
        return Shard.of(segments, self.rank, self.size, axis="cp_size")

    def local_count(self, segment: SplitSegment) -> int:
        """How many items of a segment are this rank's part."""
        return self.part(segment).local_length // segment.width

    @torch.no_grad()
    def sum_of_statistics(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, of which no gradient is taken."""
        return x if self.group is None else all_reduce_sum(x.clone(), self.group)


SINGLE = ContextParallel()
"""One rank: it has all rows."""


class _PermuteRows(torch.autograd.Function):
    """Forward ``x[index]``; backward ``dy[inverse]``: a gather both ways, where autograd's own
    would add atomically.
    """

    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, index_T: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        return x_TW.index_select(0, index_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TW: Tensor) -> tuple[Tensor, None, None]:
        (inverse_T,) = ctx.saved_tensors
        return dy_TW.index_select(0, inverse_T), None, None


def permute_rows(x_TW: Tensor, index_T: Tensor, inverse_T: Tensor) -> Tensor:
    """``x[index]``, for a permutation and its inverse."""
    return cast(Tensor, _PermuteRows.apply(x_TW, index_T, inverse_T))
