"""Contents of a checkpoint: flat ranges of globally named tensors.

A tensor has one global name, shape and dtype in every parallel layout. A process holds ranges of
the flattened tensor (row major), or the same columns of consecutive rows (`Extent`). So a
checkpoint that one layout wrote loads into any other layout. Names contain no rank, except for
state that belongs to one rank (random number generators: ``rng/rank_0/...``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Extent(NamedTuple):
    """Elements ``[start + i * stride, end + i * stride)`` for ``i = 0 .. rows - 1``, in this order.

    Example:
        Columns 2 and 3 of the last two rows of a ``(3, 4)`` matrix: ``Extent(6, 8, rows=2,
        stride=4)``.
    """

    start: int
    end: int
    rows: int = 1
    stride: int = 0

    @property
    def width(self) -> int:
        """Number of elements in one row of the extent."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        return self.width * self.rows

    @property
    def last(self) -> int:
        """Index of the highest element, plus one."""
        return self.end + (self.rows - 1) * self.stride

    @property
    def text(self) -> str:
        """Text ``start:end``, with ``+stride*rows`` appended for several rows."""
        return f"{self.start}:{self.end}" + (f"+{self.stride}*{self.rows}" if self.rows > 1 else "")

    def problem(self, numel: int) -> str | None:
        """Return why this extent does not fit a tensor of ``numel`` elements, or None if it fits.

        The only empty extent that fits is that of an empty tensor.
        """
        if self.start == self.end == numel == 0 and self.rows == 1 and self.stride == 0:
            return None
        if not (0 <= self.start < self.end and self.rows >= 1 and self.last <= numel):
            return f"[{self.text}) is empty or not within the {numel} elements of the tensor"
        if (self.rows == 1) != (self.stride == 0):
            return (
                f"stride {self.stride} does not fit rows {self.rows}; use stride 0 only for rows 1"
            )
        if self.stride and (
            self.start % self.stride + self.width > self.stride or numel % self.stride
        ):
            return f"[{self.text}) does not consist of columns of rows of {self.stride} elements"
        return None

    def each_row(self) -> list[Extent]:
        """Return one extent for each row."""
        return [
            Extent(self.start + row * self.stride, self.end + row * self.stride)
            for row in range(self.rows)
        ]

    def cut(self, first: int, last: int) -> list[Extent]:
        """Return extents for elements ``[first, last)`` of this extent, counted in its own order.

        Consecutive complete rows become one extent; a partial row becomes its own extent.
        """
        if self.rows == 1:
            return [Extent(self.start + first, self.start + last)] if first < last else []
        pieces: list[Extent] = []
        while first < last:
            row, column = divmod(first, self.width)
            count = (last - first) // self.width if column == 0 else 0
            start = self.start + row * self.stride
            if count > 1:
                pieces.append(Extent(start, start + self.width, count, self.stride))
                first += count * self.width
            else:
                end = min(self.width, column + last - first)
                pieces.append(Extent(start + column, start + end))
                first += end - column
        return pieces


class _Rectangle(NamedTuple):
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of a grid, as a part of an extent."""

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    """Position of the first element in the order of the extent."""
    pitch: int
    """Distance from one row to the next, in elements of the extent."""


def _rectangles(extent: Extent, stride: int) -> Iterator[_Rectangle]:
    """Yield the rectangles that an extent covers on a grid with rows of ``stride`` elements.

    If the extent has several rows, its own stride must equal ``stride``.
    """
    top, left = divmod(extent.start, stride)
    if extent.rows > 1:
        assert extent.stride == stride, (extent, stride)
        yield _Rectangle(top, top + extent.rows, left, left + extent.width, 0, extent.width)
        return
    bottom, right = divmod(extent.end, stride)
    if top == bottom or (top + 1 == bottom and right == 0):
        yield _Rectangle(top, top + 1, left, left + extent.width, 0, extent.width)
        return
    if left:
        yield _Rectangle(top, top + 1, left, stride, 0, stride)
        top += 1
    if top < bottom:
        yield _Rectangle(top, bottom, 0, stride, top * stride - extent.start, stride)
    if right:
        yield _Rectangle(bottom, bottom + 1, 0, right, bottom * stride - extent.start, stride)


class Overlap(NamedTuple):
    """Elements common to two extents: ``rows`` runs of ``length`` elements.

    Positions are counted in the order of each extent.
    """

    start_here: int
    """Position of the first run in the first extent."""
    start_there: int
    """Position of the first run in the second extent."""
    length: int
    """Number of elements in one run."""
    rows: int = 1
    """Number of runs."""
    pitch_here: int = 0
    """Distance from one run to the next in the first extent, in elements."""
    pitch_there: int = 0
    """Distance from one run to the next in the second extent, in elements."""


def overlaps(first: Extent, second: Extent) -> Iterator[Overlap]:
    """Yield the elements common to both extents (``here`` is the first, ``there`` the second).

    Runs that are adjacent in both extents are merged into one run. If the strides are equal or one
    extent has one row, there are few overlaps, independent of the number of rows.
    """
    if first.rows > 1 and second.rows > 1 and first.stride != second.stride:
        for number, row in enumerate(second.each_row()):
            yield from (
                o._replace(start_there=o.start_there + number * second.width)
                for o in overlaps(first, row)
            )
        return
    stride = first.stride or second.stride or max(first.end, second.end, 1)
    for a in _rectangles(first, stride):
        for b in _rectangles(second, stride):
            top, left = max(a.top, b.top), max(a.left, b.left)
            rows, length = min(a.bottom, b.bottom) - top, min(a.right, b.right) - left
            if rows <= 0 or length <= 0:
                continue
            start_here, start_there = (
                r.offset + (top - r.top) * r.pitch + left - r.left for r in (a, b)
            )
            if rows == 1 or a.pitch == b.pitch == length:
                yield Overlap(start_here, start_there, rows * length)
            else:
                yield Overlap(start_here, start_there, length, rows, a.pitch, b.pitch)


def first_not_once(extents: Sequence[Extent], numel: int) -> int | None:
    """Return an element of a tensor that the extents contain twice or not at all, or None.

    Each extent must fit the tensor. Extents with different strides cannot be compared, so the
    function returns 0 for them.
    """
    strides = {extent.stride for extent in extents if extent.rows > 1}
    if len(strides) > 1 or not extents:
        return 0
    if numel == 0:
        return None if len(extents) == 1 else 0
    stride = strides.pop() if strides else numel
    rectangles = sorted(r for extent in extents for r in _rectangles(extent, stride))
    edges = sorted(
        {0, numel // stride, *(r.top for r in rectangles), *(r.bottom for r in rectangles)}
    )
    for top, bottom in pairwise(edges):
        expected = 0
        for rectangle in sorted(
            (r for r in rectangles if r.top < bottom and r.bottom > top), key=lambda r: r.left
        ):
            if rectangle.left != expected:
                break
            expected = rectangle.right
        else:
            if expected == stride:
                continue
        return top * stride + expected
    return None


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that a checkpoint supports, with their safetensors names."""

NAMED_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

COMPUTED_ELEMENTS = 1 << 24
"""Most values of a shard that are computed at a time: 64 MiB of float32."""

TENSOR_NAME = re.compile(r"[A-Za-z0-9_./:@+=,-]{1,500}")
"""Pattern of allowed tensor names.

Spaces and control characters are not allowed. Brackets are not allowed because they enclose the
range in the keys of a file.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """Range of elements of the flattened tensor ``name``, with a 1-D contiguous view of them.

    A save reads the view, and a load writes it in place. The view is on CPU or CUDA. The range is
    the `Extent` of ``start``, ``end``, ``rows`` and ``stride``: elements ``[start, end)`` for one
    row, else one such run per row, in the order of the rows.
    """

    name: str
    global_shape: tuple[int, ...]
    start: int
    end: int
    tensor: Tensor
    rows: int = 1
    stride: int = 0
    compute: Callable[[int, int], Tensor] | None = None
    """Function that computes values ``[first, last)`` of a shard of which ``tensor``, on the meta
    device, has only size and dtype. A save computes few values at a time, so they need little memory.
    """
    computed_from: int = 0
    """Number of the shard's first value in calls of ``compute``."""

    def __post_init__(self) -> None:
        if not TENSOR_NAME.fullmatch(self.name):
            raise ValueError(
                f"tensor name {self.name!r} is not 1 to 500 characters of letters, digits and _./:@+=,-."
            )
        if self.tensor.dtype not in DTYPE_NAMES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise ValueError(
                f"tensor {self.name} has dtype {self.tensor.dtype}; a checkpoint supports {supported}."
            )
        problem = self.extent.problem(math.prod(self.global_shape))
        if problem is not None:
            raise ValueError(
                f"the range of tensor {self.name} of shape {self.global_shape} is invalid: {problem}."
            )
        if (
            self.tensor.dim() != 1
            or self.tensor.numel() != self.extent.numel
            or not self.tensor.is_contiguous()
        ):
            raise ValueError(
                f"the view of tensor {self.key} has shape {tuple(self.tensor.shape)} and strides "
                f"{self.tensor.stride()}; the view must be contiguous and 1-D, with {self.extent.numel} elements."
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def extent(self) -> Extent:
        """Elements of the flattened tensor that this shard holds."""
        return Extent(self.start, self.end, self.rows, self.stride)

    @property
    def key(self) -> str:
        """Key of this range in a safetensors file."""
        return shard_key(self.name, self.extent)

    def part(self, first: int, last: int) -> list[TensorShard]:
        """Return shards for elements ``[first, last)`` of this shard, counted in its own order."""
        return shards_of(
            self.name,
            self.global_shape,
            self.extent.cut(first, last),
            self.tensor[first:last],
            self.compute,
            self.computed_from + first,
        )

    def values(self) -> Iterator[Tensor]:
        """Yield the values in order as 1-D tensors: the view, or the next computed values."""
        if self.compute is None:
            yield self.tensor
            return
        for first in range(0, self.tensor.numel(), COMPUTED_ELEMENTS):
            last = min(first + COMPUTED_ELEMENTS, self.tensor.numel())
            yield self.compute(self.computed_from + first, self.computed_from + last)

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorShard:
        """Build a shard of all elements of ``tensor``, which must be contiguous.

        The shard shares the memory of ``tensor``.
        """
        return cls(
            name=name,
            global_shape=tuple(tensor.shape),
            start=0,
            end=tensor.numel(),
            tensor=_flat(name, tensor),
        )


def shards_of(
    name: str,
    global_shape: tuple[int, ...],
    extents: Sequence[Extent],
    tensor: Tensor,
    compute: Callable[[int, int], Tensor] | None = None,
    computed_from: int = 0,
) -> list[TensorShard]:
    """Build one shard per extent.

    ``tensor`` (1-D, contiguous) contains the elements of all extents, in the order of ``extents``.
    For ``compute`` and ``computed_from`` see `TensorShard`.
    """
    sizes = [extent.numel for extent in extents]
    views = torch.split(tensor, sizes) if extents else ()
    return [
        TensorShard(
            name=name,
            global_shape=global_shape,
            tensor=view,
            compute=compute,
            computed_from=first,
            **extent._asdict(),
        )
        for extent, view, first in zip(extents, views, accumulate(sizes, initial=computed_from))
    ]


def shard_key(name: str, extent: Extent) -> str:
    """Return the key of a range in a file, e.g. ``"layers.0.norm.weight[0:64]"``."""
    return f"{name}[{extent.text}]"


def byte_view(tensor: Tensor) -> Tensor:
    """Return a uint8 view of the bytes of a 1-D contiguous tensor."""
    return tensor.detach().view(torch.uint8)


def whole_tensors(named_tensors: Mapping[str, Tensor]) -> list[TensorShard]:
    """Build one shard of all elements for each tensor, for a process that needs complete tensors."""
    return [TensorShard.whole(name, tensor) for name, tensor in named_tensors.items()]


def split_replicated(
    named_tensors: Mapping[str, Tensor], rank: int, world_size: int
) -> list[TensorShard]:
    """Return the shards that ``rank`` saves of complete tensors that all ranks hold.

    See `share_out` for the division.
    """
    return share_out(whole_tensors(named_tensors), rank, world_size)


def share_out(shards: Sequence[TensorShard], rank: int, world_size: int) -> list[TensorShard]:
    """Return the part of ``shards`` that ``rank`` saves, if all ranks hold the same shards.

    The shards are concatenated in the order of their names, ``B`` bytes in total. Rank ``r`` of
    ``W`` takes bytes ``[r B / W, (r + 1) B / W)``, with both ends rounded up to complete elements.
    So shares differ by at most one element, and each element has exactly one owner. Rank 0 takes
    empty tensors.

    Example:
        one fp32 tensor of 10 elements, world_size 4: [0:3), [3:5), [5:8), [8:10).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in [0, world_size {world_size}).")
    total = sum(shard.tensor.nbytes for shard in shards)
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    shares = []
    offset = 0
    for shard in sorted(shards, key=lambda shard: (shard.name, shard.start)):
        size, numel = shard.dtype.itemsize, shard.tensor.numel()
        start = min(max(-(-(first - offset) // size), 0), numel)
        end = min(max(-(-(last - offset) // size), 0), numel)
        offset += shard.tensor.nbytes
        if start < end:
            shares += shard.part(start, end)
        elif numel == 0 and rank == 0:
            shares.append(shard)
    return shares


def _flat(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor {name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}); "
            "a checkpoint reads and writes tensors in place, so pass a contiguous tensor."
        )
    return tensor.detach().view(-1)
