"""Shards of parameters over tensor-parallel and expert-parallel ranks.

The ZeRO-1 shares of data-parallel ranks are in ``zero1_layout.py``.

A parameter is split along one dimension, segment by segment. For example, a Mamba input projection
has the segments ``[z | x | B | C | dt]``. A rank holds its heads of z and x, its groups of B and C,
and its heads of dt, concatenated in this order. If a segment has fewer items than there are ranks
(groups of B and C, key-value heads), several neighbouring ranks hold the same item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class SplitSegment:
    """Consecutive items of equal width along the split dimension of an unsplit parameter."""

    noun: str
    """Name of the items, for error messages."""
    count: int
    width: int = 1
    shareable: bool = False
    """True if neighbouring ranks may hold copies when there are fewer items than ranks."""


@dataclass(frozen=True, kw_only=True)
class ShardPiece:
    """Positions ``[start, start + length)`` along the split dimension of the unsplit parameter.

    ``shared_by`` neighbouring ranks hold the same piece.
    """

    start: int
    length: int
    shared_by: int = 1


@dataclass(frozen=True, kw_only=True)
class ExpertRange:
    """Experts ``[start, start + length)`` of ``total`` experts."""

    start: int
    length: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of a parameter that one rank holds: ``pieces`` of dimension ``dim``, concatenated."""

    dim: int
    length: int
    """Length of dimension ``dim`` of the unsplit parameter."""
    pieces: tuple[ShardPiece, ...]
    own_gradients: bool = True
    """True if each rank that holds a copy of a piece computes one term of the piece's gradient,
    which is the sum of these terms.

    False if each of these ranks computes the complete gradient.
    """
    padding: int = 0
    """Number of padding positions at the end of the unsplit parameter.

    The padding depends on the parallel layout, so checkpoints do not contain it.
    """
    first: ExpertRange | None = None
    """Range of experts of this rank in dimension 0, for stacked weights of experts; else None.

    This field is set only if another dimension ``dim`` is also split, over tensor-parallel ranks.
    """

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[SplitSegment],
        rank: int,
        size: int,
        *,
        dim: int = 0,
        axis: str = "tp_size",
    ) -> Shard:
        """Return the shard of rank ``rank`` of ``size`` over consecutive segments.

        Args:
            segments: segments of the unsplit parameter, in order.
            rank: number of the rank on the axis.
            size: number of ranks on the axis.
            dim: dimension that is split.
            axis: name of ``size``, for error messages.
        Raises:
            ValueError: ``size`` does not divide the number of items of a segment, and the items
                cannot be shared among neighbouring ranks either.
        Example:
            Two shareable groups of width 16 on rank 3 of 4: positions 16 to 32, held by 2 ranks.
        """
        starts = list(accumulate((s.count * s.width for s in segments), initial=0))
        pieces = tuple(
            _piece(segment, start, rank, size, axis) for segment, start in zip(segments, starts)
        )
        return cls(dim=dim, length=starts[-1], pieces=pieces)

    @classmethod
    def replicated(cls, length: int, size: int, *, own_gradients: bool) -> Shard:
        """Return the shard of a parameter that each of ``size`` ranks holds completely.

        Args:
            length: length of dimension 0.
            size: number of ranks.
            own_gradients: see the attribute `Shard.own_gradients`.
        """
        return cls(
            dim=0,
            length=length,
            pieces=(ShardPiece(start=0, length=length, shared_by=size),),
            own_gradients=own_gradients,
        )

    @property
    def local_length(self) -> int:
        """Length of dimension ``dim`` on this rank."""
        return sum(piece.length for piece in self.pieces)

    def local_pieces(self) -> Iterator[tuple[int, ShardPiece]]:
        """Iterate over the pieces, each with its first position in this rank's shard."""
        return zip(accumulate((piece.length for piece in self.pieces), initial=0), self.pieces)

    def stored_columns(self) -> list[tuple[int, ShardPiece]]:
        """Return ``local_pieces`` without padding, with adjacent pieces joined.

        Two pieces are joined if they are adjacent in this rank's shard and in the unsplit
        parameter, and the same number of ranks holds each.
        """
        joined: list[tuple[int, ShardPiece]] = []
        for begin, piece in self.local_pieces():
            piece = replace(
                piece, length=min(piece.length, max(self.length - self.padding - piece.start, 0))
            )
            at, last = joined[-1] if joined else (0, ShardPiece(start=-1, length=0))
            if (at + last.length, last.start + last.length, last.shared_by) == (
                begin,
                piece.start,
                piece.shared_by,
            ):
                joined[-1] = (at, replace(last, length=last.length + piece.length))
            elif piece.length:
                joined.append((begin, piece))
        return joined

    def global_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """Return the shape of the unsplit parameter, given the shape of this rank's shard."""
        assert local_shape[self.dim] == self.local_length, (tuple(local_shape), self)
        shape = [*local_shape[: self.dim], self.length, *local_shape[self.dim + 1 :]]
        if self.first is not None:
            assert local_shape[0] == self.first.length, (tuple(local_shape), self)
            shape[0] = self.first.total
        return torch.Size(shape)

    def local_shape(self, global_shape: Sequence[int]) -> torch.Size:
        """Return the shape of this rank's shard, given the shape of the unsplit parameter."""
        shape = list(global_shape)
        shape[self.dim] = self.local_length
        if self.first is not None:
            shape[0] = self.first.length
        return torch.Size(shape)

    def take(self, unsplit: Tensor) -> Tensor:
        """Return this rank's shard of the tensor ``unsplit``, as a new tensor."""
        assert unsplit.shape[self.dim] == self.length, (tuple(unsplit.shape), self)
        unsplit = self._own_range(unsplit)
        return torch.cat(
            [unsplit.narrow(self.dim, p.start, p.length) for p in self.pieces], dim=self.dim
        )

    def pad(self, stored: Tensor) -> Tensor:
        """Append this layout's zero padding to an unsplit tensor from a checkpoint."""
        padding = stored.new_zeros(
            *stored.shape[: self.dim], self.padding, *stored.shape[self.dim + 1 :]
        )
        return torch.cat([stored, padding], dim=self.dim) if self.padding else stored

    def place(self, local: Tensor, unsplit: Tensor) -> None:
        """Write this rank's shard ``local`` into the unsplit tensor: the inverse of ``take``."""
        unsplit = self._own_range(unsplit)
        for begin, piece in self.local_pieces():
            unsplit.narrow(self.dim, piece.start, piece.length).copy_(
                local.narrow(self.dim, begin, piece.length)
            )

    def _own_range(self, unsplit: Tensor) -> Tensor:
        return (
            unsplit
            if self.first is None
            else unsplit.narrow(0, self.first.start, self.first.length)
        )


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Equally spaced runs of elements of a rank's shard, with their positions in a checkpoint.

    Positions count elements of the flattened tensors. There are ``rows`` runs of ``length``
    elements. The distance from one run to the next is ``local_stride`` in the shard and
    ``global_stride`` in the checkpoint.
    """

    local_start: int
    global_start: int
    length: int
    owned: bool
    """True if this rank is the first of the ranks that hold the piece.

    The owned pieces of all ranks together cover the stored parameter exactly once.
    """
    rows: int = 1
    local_stride: int = 0
    global_stride: int = 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first element of each run, in this rank's shard and in the checkpoint."""
        for row in range(self.rows):
            yield (
                self.local_start + row * self.local_stride,
                self.global_start + row * self.global_stride,
            )


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """Parameter of this rank, together with the shard that it holds."""

    name: str
    """Name of the parameter; it is the same on all ranks and in every layout."""
    parameter: nn.Parameter
    shard: Shard
    rank: int
    """Tensor-parallel rank."""

    @property
    def is_expert(self) -> bool:
        """True for a weight of experts: the ranks with the same shard are ``expert_dp``.

        For all other parameters these ranks are ``dp_cp``.
        """
        return is_expert(self.parameter)

    @property
    def global_shape(self) -> torch.Size:
        return self.shard.global_shape(self.parameter.shape)

    @property
    def stored_shape(self) -> torch.Size:
        """Shape of the unsplit parameter in checkpoints, which is the same in every layout."""
        shape = list(self.global_shape)
        shape[self.shard.dim] -= self.shard.padding
        return torch.Size(shape)

    def stored_pieces(self) -> list[StoredPiece]:
        """Return the pieces of this rank's shard in a checkpoint, with adjacent pieces joined."""
        shard, shape = self.shard, self.parameter.shape
        # Padding is cut off at the end of the parameter; it is contiguous only along dimension 0.
        assert shard.padding == 0 or shard.dim == 0, shard
        inner, outer = prod(shape[shard.dim + 1 :]), prod(shape[: shard.dim])
        rows_before = 0 if shard.first is None else shard.first.start * prod(shape[1 : shard.dim])
        strides = (shard.local_length * inner, shard.length * inner)
        pieces = []
        for begin, piece in shard.stored_columns():
            starts = (begin * inner, rows_before * strides[1] + piece.start * inner)
            length, owned = piece.length * inner, self.rank % piece.shared_by == 0
            # Join runs without a gap in the shard and in the checkpoint, so that the manifest lists
            # fewer ranges.
            if outer > 1 and (length, length) != strides:
                pieces.append(
                    StoredPiece(
                        local_start=starts[0],
                        global_start=starts[1],
                        length=length,
                        owned=owned,
                        rows=outer,
                        local_stride=strides[0],
                        global_stride=strides[1],
                    )
                )
            else:
                pieces.append(
                    StoredPiece(
                        local_start=starts[0],
                        global_start=starts[1],
                        length=outer * length,
                        owned=owned,
                    )
                )
        return pieces


def set_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Record on ``parameter`` which shard of the unsplit parameter it is, and return it."""
    # Store the shard as an attribute of the parameter, so that a tied parameter has the same shard
    # under every name.
    parameter.tensor_parallel_shard = shard  # type: ignore[attr-defined]
    return parameter


def set_expert_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Record the shard of a weight of experts, like ``set_shard``, and mark the parameter.

    The ranks with copies of a marked parameter are ``expert_dp``, not ``dp_cp``.
    """
    parameter.is_expert = True  # type: ignore[attr-defined]
    return set_shard(parameter, shard)


def is_expert(parameter: Tensor) -> bool:
    """Return True for a parameter that `set_expert_shard` has marked."""
    return getattr(parameter, "is_expert", False)


def has_shard(parameter: nn.Parameter) -> bool:
    """Return True for a parameter on which `set_shard` has recorded its shard."""
    return hasattr(parameter, "tensor_parallel_shard")


def shard_of(parameter: nn.Parameter, tp_size: int) -> Shard:
    """Return the shard that `set_shard` has recorded on ``parameter``.

    Without a record, every rank holds the complete parameter and computes its complete gradient.
    """
    shard: Shard | None = getattr(parameter, "tensor_parallel_shard", None)
    if shard is None:
        return Shard.replicated(parameter.shape[0], tp_size, own_gradients=False)
    return shard


def sharded_parameters(
    module: nn.Module, tp_rank: int, tp_size: int
) -> dict[str, ShardedParameter]:
    """Return every parameter of ``module`` with its shard, by name; tied parameters occur once."""
    return {
        name: ShardedParameter(
            name=name, parameter=parameter, shard=shard_of(parameter, tp_size), rank=tp_rank
        )
        for name, parameter in module.named_parameters()
    }


def _piece(segment: SplitSegment, start: int, rank: int, size: int, axis: str) -> ShardPiece:
    count, width = segment.count, segment.width
    if count % size == 0:
        length = count // size * width
        return ShardPiece(start=start + rank * length, length=length)
    if segment.shareable and size % count == 0:
        return ShardPiece(
            start=start + rank * count // size * width, length=width, shared_by=size // count
        )
    cure = (
        "a divisor or a multiple of that number"
        if segment.shareable
        else "a divisor of that number"
    )
    raise ValueError(
        f"{axis} ({size}) does not fit the number of {segment.noun} ({count}); choose {cure}."
    )
