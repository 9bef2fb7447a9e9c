"""Context parallelism of layers: the tokens of a pack are split over several ranks.

Between the layers each rank holds the hidden state of its own rows (`packed.cp_partition`). Norms,
MLPs, experts, embedding and loss work row by row and need no communication. Attention and Mamba
exchange data between the ranks, because they need complete documents. Parameters are equal on all
ranks. Their gradients are summed over context-parallel and data-parallel ranks together.

[Note: reordered rows]
Layers that pass states need contiguous rows, and attention over a zigzag needs other rows. There are
fewer attention layers than others, so the rows between layers are contiguous. Queries, keys and values
move to the zigzag, and the outputs move back. The number of rows that a rank owes another one depends
on the documents, but CUDA graphs need fixed sizes. So each move is two all-to-alls of equal parts: rows
are exchanged for columns, reordered locally, and exchanged back. Attention over contiguous rows
(`contiguous_attention`) needs no reordering.

Letters: T tokens of the pack; each of c ranks holds T / c of them. C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megatron_packed.config.exchanged_heads import number_of_parts
from megatron_packed.config.kinds.layer_kind import KINDS, LayerKind
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.kind_options import KindCommunication
from megatron_packed.distributed.all_to_all import ExchangingAxis, heads_to_rows, rows_to_columns
from megatron_packed.distributed.collectives import all_gather_rows, all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups, global_ranks
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment
from megatron_packed.packed.cp_partition import Partition
from megatron_packed.packed.later_tokens import prepared, reaches
from megatron_packed.packed.params import PackedSeqParams, RankOrder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from megatron_packed.config.sections.parallel import ParallelConfig

A2A, ALL_GATHER, P2P = "a2a", "all_gather", "p2p"
_ALIASES = {"allgather": ALL_GATHER}
ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"


def _check(option: str, value: object, *choices: object) -> None:
    """Check the value of an option.

    Raises:
        ValueError: the value is unknown.
    """
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; choose {' or '.join(map(str, choices))}.")


def cp_comm_type(name: str) -> str:
    """Return the canonical name of a communication type: ``allgather`` becomes ``all_gather``.

    Raises:
        ValueError: the communication type is unknown.
    """
    name = _ALIASES.get(name, name)
    if name not in (A2A, ALL_GATHER, P2P):
        raise ValueError(
            f"cp_comm_type is {name!r}; choose a2a, all_gather (also spelt allgather) or p2p."
        )
    return name


class Communication(TypedDict, total=False):
    """Options of a model's communication between ranks; see `HybridModel`."""

    cp_comm_type: str
    cp_partition_mode: str
    mamba_cp_comm_type: str
    linear_cp_mode: str
    cp_comm_overlap_parts: int
    sequence_parallel: bool


def communication_of(parallel: ParallelConfig) -> Communication:
    """Return the options for the model of a run."""
    names = Communication.__annotations__
    options = {name: getattr(parallel, name) for name in names}
    options["cp_partition_mode"] = ZIGZAG if parallel.uses_zigzag else CONTIGUOUS
    return cast("Communication", options)


@dataclass(frozen=True, kw_only=True)
class ContextParallel(ExchangingAxis):
    """Context-parallel axis and communication type of this rank; ranks exchange heads and tokens."""

    comm_type: str = A2A
    """Communication type of context-parallel attention.

    ``a2a`` is an all-to-all to the head-parallel layout and back. ``all_gather`` gathers keys and
    values; ``p2p`` sends them around a ring.
    """
    partition_mode: str = ZIGZAG
    """Rows of a rank in attention with ``all_gather`` and ``p2p``: ``zigzag`` or ``contiguous``."""
    overlap_parts: int = 1
    """Largest number of parts in which exchanged heads travel; see [Note: exchange in parts]."""
    state_passing: frozenset[str] = frozenset()
    """Symbols of the kinds whose layers pass states from rank to rank; see `layers.state_passing`.

    Other recurrent layers use an all-to-all to the head-parallel layout and back.
    """

    @classmethod
    def from_groups(
        cls,
        groups: ParallelGroups | None,
        *,
        kinds: Iterable[LayerKind] = KINDS.values(),
        **communication: Unpack[Communication],
    ) -> ContextParallel:
        """Return the context parallelism of this rank, or ``ALL_ROWS`` for one rank.

        Args:
            groups: process groups of this rank.
            kinds: kinds of layers of the model; options of other kinds have no effect.
            communication: options of the model's communication. Options of kinds that are not given
                have the defaults of a run.
        Raises:
            ValueError: a communication type is unknown.
        """
        comm_type = cp_comm_type(communication.get("cp_comm_type", A2A))
        partition_mode = communication.get("cp_partition_mode", ZIGZAG)
        _check("cp_partition_mode", partition_mode, ZIGZAG, CONTIGUOUS)
        of_kinds = {}
        for field in section_fields(KindCommunication):
            of_kinds[field.name] = communication.get(field.name, field.default)
            _check(field.name, of_kinds[field.name], *field.option.choices)
        if groups is None or groups.cp.size == 1:
            return ALL_ROWS
        return cls(
            **vars(groups.cp),
            comm_type=comm_type,
            partition_mode=partition_mode,
            state_passing=frozenset(
                kind.symbol
                for kind in kinds
                if kind.state_option and kind.state_option in of_kinds.items()
            ),
            overlap_parts=communication.get("cp_comm_overlap_parts", 1),
        )

    @property
    def exchanges_heads(self) -> bool:
        return self.comm_type == A2A

    @property
    def uses_zigzag(self) -> bool:
        """Return whether attention needs a zigzag of rows."""
        return not self.exchanges_heads and self.partition_mode == ZIGZAG

    @property
    def partition(self) -> Partition:
        """Partition of the rows between layers.

        It is the partition of attention, unless layers pass states: they need contiguous rows.
        """
        zigzag = self.uses_zigzag and not self.state_passing
        return Partition(size=self.size, rank=self.rank, zigzag=zigzag)

    @property
    def attention_partition(self) -> Partition:
        return Partition(size=self.size, rank=self.rank, zigzag=self.uses_zigzag)

    @property
    def reorders_attention(self) -> bool:
        """Return whether attention has other rows than the other layers."""
        return self.partition != self.attention_partition

    @property
    def global_ranks(self) -> list[int]:
        """Global ranks of the group, in the order of the group; empty for one rank."""
        return [] if self.group is None else global_ranks(self.group)

    def order(self, packed: PackedSeqParams) -> RankOrder | None:
        """Return the order of rows between layers; None if slots keep their order."""
        return self.attention_order(packed) if self.partition.zigzag else None

    def attention_order(self, packed: PackedSeqParams) -> RankOrder | None:
        """Return the order of rows in attention: from the tables of the pack, else computed now."""
        prepared = packed.tables.rank_order
        return self.attention_partition.order(packed) if prepared is None else prepared

    def own(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """Return this rank's ``(T / c, ...)`` rows of a tensor with one row per slot of the pack.

        The operation is not differentiable.
        """
        return x_T if self.size == 1 else self.partition.own(x_T, self.order(packed))

    def valid(self, packed: PackedSeqParams, depth: int = 0) -> Tensor:
        """Return ``(T / c,)`` bool: True for each row of this rank that is in a real document.

        At a depth of multi-token prediction: True for each row that reaches its token.
        """
        if depth:
            tables = prepared(packed, depth)
            return (
                self.own(reaches(packed, depth), packed) if tables is None else tables.rank_reaches
            )
        prepared_T = packed.tables.rank_valid
        return self.own(packed.valid, packed) if prepared_T is None else prepared_T

    def in_order_of_slots(self, x_TW: Tensor, packed: PackedSeqParams) -> Tensor:
        """Reorder the rows of all ranks from rank order to the order of the pack's slots."""
        order = self.order(packed)
        return x_TW if order is None else permute_rows(x_TW, order.places_T, order.slots_T)

    def in_order_of_ranks(self, x_TW: Tensor, packed: PackedSeqParams) -> Tensor:
        """Reorder rows from the order of the pack's slots to rank order.

        This is the inverse of ``in_order_of_slots``.
        """
        order = self.order(packed)
        return x_TW if order is None else permute_rows(x_TW, order.slots_T, order.places_T)

    def gather(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """Gather each rank's ``(T / c, ...)`` rows into the ``(T, ...)`` rows of the pack.

        This is the inverse of ``own``.
        """
        return self.in_order_of_slots(all_gather_rows(x_T, self.group), packed)

    def part(self, *segments: SplitSegment) -> Shard:
        """Return this rank's shard of ``segments`` (heads) in the head-parallel layout.

        Raises:
            ValueError: the items of a segment cannot be split evenly over the ranks.
        """
        return Shard.from_segments(segments, self.rank, self.size, axis="cp_size")

    def local_count(self, segment: SplitSegment) -> int:
        """Return this rank's number of items of a segment in the head-parallel layout."""
        return self.part(segment).local_length // segment.width

    def parts(self, *counts: int) -> int:
        """Return the number of parts in which a layer's heads are exchanged.

        Args:
            counts: numbers of heads and of groups of heads of a tensor-parallel rank.
        """
        return number_of_parts(self.overlap_parts, self.size, counts)

    @torch.no_grad()
    def sum_of_statistics(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks, without a gradient."""
        return x if self.group is None else all_reduce_sum(x.clone(), self.group)


ALL_ROWS = ContextParallel()
"""No context parallelism: one rank holds all rows."""


def take_in_parts(shard: Shard, parameter: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Return a rank's shard of a parameter in parts; each has an equal part of every piece.

    One part is ``shard.take(parameter)``.
    """
    pieces = (parameter.narrow(0, piece.start, piece.length) for piece in shard.pieces)
    parted = [torch.unflatten(piece, 0, (parts, -1)) for piece in pieces]
    return torch.cat(parted, dim=1).unbind()


class _PermuteRows(torch.autograd.Function):
    """Autograd function: ``x[index]`` in forward, ``dy[inverse]`` in backward.

    Both directions gather rows. The backward that autograd would derive uses atomic additions.
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
    """Return ``x[index]`` for a permutation ``index`` with the inverse ``inverse``."""
    return cast(Tensor, _PermuteRows.apply(x_TW, index_T, inverse_T))  # type: ignore[no-untyped-call]


def to_zigzag(
    tensors: Sequence[Tensor], cp: ContextParallel, packed: PackedSeqParams
) -> list[Tensor]:
    """Move ``(T / c, ...)`` tensors from contiguous rows to this rank's rows in attention."""
    columns = [x.flatten(1) for x in tensors]
    moved_TC = _moved(torch.cat(columns, dim=1), cp, packed, back=False)
    parts = torch.split(moved_TC, [x_TC.shape[1] for x_TC in columns], dim=1)
    return [torch.unflatten(part, 1, x.shape[1:]) for part, x in zip(parts, tensors)]


def from_zigzag(x: Tensor, cp: ContextParallel, packed: PackedSeqParams) -> Tensor:
    """Move a ``(T / c, ...)`` tensor back to contiguous rows: the inverse of `to_zigzag`."""
    return torch.unflatten(_moved(x.flatten(1), cp, packed, back=True), 1, x.shape[1:])


def _moved(x_TC: Tensor, cp: ContextParallel, packed: PackedSeqParams, *, back: bool) -> Tensor:
    """Reorder the rows of all ranks. See [Note: reordered rows]."""
    order = cp.attention_order(packed)
    assert order is not None, "contiguous rows need no reordering"
    channels, (slots_T, places_T) = x_TC.shape[1], order
    # (T / c, C) -> (T, C / c)
    columns_TC = rows_to_columns((pad(x_TC, (0, -channels % cp.size)),), cp.exchange)
    index_T, inverse_T = (places_T, slots_T) if back else (slots_T, places_T)
    reordered_TC = permute_rows(columns_TC, index_T, inverse_T)
    # (T, C / c) -> (T / c, C)
    (moved_TC,) = heads_to_rows((reordered_TC,), cp.exchange)
    return moved_TC[:, :channels]
