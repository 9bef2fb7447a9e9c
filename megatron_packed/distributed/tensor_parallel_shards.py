"""Parts of parameters that tensor-parallel and expert-parallel ranks hold. The ZeRO-1 shares of
data-parallel ranks are in ``zero1_layout.py``.

A parameter is split along one dimension, segment by segment: ``[z | x | B | C | dt]`` of a Mamba projection becomes the
rank's heads of z, of x, its groups of B and C, and its heads of dt, side by side. What has fewer
items than there are ranks (groups of B and C, key-value heads) is held by several neighbouring
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class SplitSegment:
    """Items of equal width that follow each other along the split dimension of a whole parameter."""

    noun: str
    """Name of the items, for messages."""
    count: int
    width: int = 1
    shareable: bool = False
    """True if neighbouring ranks may hold copies when there are fewer items than ranks."""


@dataclass(frozen=True, kw_only=True)
class ShardPiece:
    """Positions ``[start, start + length)`` of the whole; ``shared_by`` neighbouring ranks hold the
    same.
    """

    start: int
    length: int
    shared_by: int = 1


@dataclass(frozen=True, kw_only=True)
class ExpertRange:
    """Positions ``[start, start + length)`` of ``total``."""

    start: int
    length: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a parameter that one rank holds: ``pieces`` of dimension ``dim``, side by side in
    their order.
    """

    dim: int
    length: int
    """Length of dimension ``dim`` of the whole."""
    pieces: tuple[ShardPiece, ...]
    own_gradients: bool = True
    """True if each rank that shares a piece computes its own term of the gradient; else each computes
    all of it.
    """
    padding: int = 0
    """Positions at the end of the whole that are there for this layout alone: no checkpoint knows
    them.
    """
    first: ExpertRange | None = None
    """Range of dimension 0 where that is split too: experts, among other ranks than ``dim`` is."""

    @classmethod
    def of(
        cls,
        segments: Sequence[SplitSegment],
        rank: int,
        size: int,
        *,
        dim: int = 0,
        axis: str = "tp_size",
    ) -> Shard:
        """Rank ``rank`` of ``size``'s part of consecutive segments.

        Args:
            axis: what ``size`` is called, for messages.
        Raises:
            ValueError: the items of a segment do not fit the ranks.
        Example:
            Two groups of 16 on rank 3 of 4: positions 16 to 32, shared by 2 ranks.
        """
        starts = list(accumulate((s.count * s.width for s in segments), initial=0))
        pieces = tuple(
            _piece(segment, start, rank, size, axis) for segment, start in zip(segments, starts)
        )
        return cls(dim=dim, length=starts[-1], pieces=pieces)

    @classmethod
    def replicated(cls, length: int, size: int, *, own_gradients: bool) -> Shard:
        """The whole on each of ``size`` ranks; ``length`` is that of dimension 0."""
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
        """Each piece with the position where it begins on this rank."""
        return zip(accumulate((piece.length for piece in self.pieces), initial=0), self.pieces)

    def stored_columns(self) -> list[tuple[int, ShardPiece]]:
        """As ``local_pieces``, without padding and with neighbours that as many ranks hold joined
        to one.
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
        """The shape of the whole."""
        assert local_shape[self.dim] == self.local_length, (tuple(local_shape), self)
        shape = [*local_shape[: self.dim], self.length, *local_shape[self.dim + 1 :]]
        if self.first is not None:
            assert local_shape[0] == self.first.length, (tuple(local_shape), self)
            shape[0] = self.first.total
        return torch.Size(shape)

    def local_shape(self, global_shape: Sequence[int]) -> torch.Size:
        """The shape of this rank's part."""
        shape = list(global_shape)
        shape[self.dim] = self.local_length
        if self.first is not None:
            shape[0] = self.first.length
        return torch.Size(shape)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``."""
        assert whole.shape[self.dim] == self.length, (tuple(whole.shape), self)
        whole = self._own_range(whole)
        return torch.cat(
            [whole.narrow(self.dim, p.start, p.length) for p in self.pieces], dim=self.dim
        )

    def pad(self, stored: Tensor) -> Tensor:
        """The whole of this layout from the whole of a checkpoint: zeros behind it."""
        padding = stored.new_zeros(
            *stored.shape[: self.dim], self.padding, *stored.shape[self.dim + 1 :]
        )
        return torch.cat([stored, padding], dim=self.dim) if self.padding else stored

    def place(self, local: Tensor, whole: Tensor) -> None:
        """Write this rank's part into ``whole``, in place: the inverse of ``take``."""
        whole = self._own_range(whole)
        for begin, piece in self.local_pieces():
            whole.narrow(self.dim, piece.start, piece.length).copy_(
                local.narrow(self.dim, begin, piece.length)
            )

    def _own_range(self, whole: Tensor) -> Tensor:
        return whole if self.first is None else whole.narrow(0, self.first.start, self.first.length)


@dataclass(frozen=True, kw_only=True)
class FlatPiece:
    """Consecutive elements of a rank's part of a parameter and where they lie in the whole, both
    counted flat.
    """

    local_start: int
    global_start: int
    length: int
    owned: bool
    """True if this rank is the first of those that hold it: the owned pieces of all ranks are the
    whole, once.
    """


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Elements of a rank's part of a parameter and where a checkpoint has them, both counted flat.

    ``rows`` runs of ``length`` elements; from one run to the next it is ``local_stride`` here,
    ``global_stride`` there.
    """

    local_start: int
    global_start: int
    length: int
    owned: bool
    """As of `FlatPiece`."""
    rows: int = 1
    local_stride: int = 0
    global_stride: int = 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the begin of each run, in this rank's part and in the checkpoint."""
        for row in range(self.rows):
            yield (
                self.local_start + row * self.local_stride,
                self.global_start + row * self.global_stride,
            )


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """One parameter of this rank as a part of a whole."""

    name: str
    """The same on all ranks and in every layout."""
    parameter: nn.Parameter
    shard: Shard
    rank: int
    """Tensor-parallel rank."""

    @property
    def is_expert(self) -> bool:
        """True if ranks with the same part are those of ``expert_dp``; else they are ``dp_cp``."""
        return is_expert(self.parameter)

    @property
    def global_shape(self) -> torch.Size:
        return self.shard.global_shape(self.parameter.shape)

    @property
    def stored_shape(self) -> torch.Size:
        """Shape of the whole in checkpoints, which is the same in every layout."""
        shape = list(self.global_shape)
        shape[self.shard.dim] -= self.shard.padding
        return torch.Size(shape)

    def stored_pieces(self) -> list[StoredPiece]:
        """Return the pieces of this rank's part in a checkpoint; few, because neighbours are joined."""
        shard, shape = self.shard, self.parameter.shape
        # Padding is cut off at the end of the whole, which is one run only for dimension 0.
        assert shard.padding == 0 or shard.dim == 0, shard
        inner, outer = prod(shape[shard.dim + 1 :]), prod(shape[: shard.dim])
        before = 0 if shard.first is None else shard.first.start * prod(shape[1 : shard.dim])
        strides = (shard.local_length * inner, shard.length * inner)
        pieces = []
        for begin, piece in shard.stored_columns():
            starts = (begin * inner, before * strides[1] + piece.start * inner)
            length, owned = piece.length * inner, self.rank % piece.shared_by == 0
            # Runs that touch on both sides are one piece: fewer ranges in the manifest.
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

    def flat_pieces(self) -> list[FlatPiece]:
        """Return this rank's part as ranges of flat elements, in the order of the whole's outer
        dimensions.
        """
        shard, shape = self.shard, self.parameter.shape
        inner = prod(shape[shard.dim + 1 :])
        outer = range(prod(shape[: shard.dim]))
        before = 0 if shard.first is None else shard.first.start * prod(shape[1 : shard.dim])
        return [
            FlatPiece(
                local_start=(row * shard.local_length + begin) * inner,
                global_start=((before + row) * shard.length + piece.start) * inner,
                length=piece.length * inner,
                owned=self.rank % piece.shared_by == 0,
            )
            for row, (begin, piece) in product(outer, list(shard.local_pieces()))
        ]


def set_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Set the part of a whole that ``parameter`` is."""
    # An attribute of the parameter, so that a tied one has one shard under every name.
    parameter.tensor_parallel_shard = shard  # type: ignore[attr-defined]
    return parameter


def set_expert_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """As ``set_shard``, for weights of experts: their copies are on the ranks of ``expert_dp``, not
    of ``dp_cp``.
    """
    parameter.is_expert = True  # type: ignore[attr-defined]
    return set_shard(parameter, shard)


def is_expert(parameter: Tensor) -> bool:
    """Return True for weights that `set_expert_shard` has marked."""
    return getattr(parameter, "is_expert", False)


def shard_of(parameter: nn.Parameter, tp_size: int) -> Shard:
    """Return the shard that `set_shard` has set; by default every rank holds the whole and computes
    all of its gradient.
    """
    shard: Shard | None = getattr(parameter, "tensor_parallel_shard", None)
    if shard is None:
        return Shard.replicated(parameter.shape[0], tp_size, own_gradients=False)
    return shard


def sharded_parameters(
    module: nn.Module, tp_rank: int, tp_size: int
) -> dict[str, ShardedParameter]:
    """Every parameter of ``module`` by name, a tied one once: its whole shape and this rank's part
    of it.
    """
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
    cure = "a divisor or a multiple of it" if segment.shareable else "a divisor of it"
    raise ValueError(
        f"{axis} ({size}) does not fit the number of {segment.noun} ({count}); choose {cure}."
    )
