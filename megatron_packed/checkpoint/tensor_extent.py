"""Elements of a flattened tensor that a process or a file holds: consecutive ones, or some columns
of some rows.

A matrix that ranks share by columns would be one range for each row; as one value for all rows a
checkpoint of any model has few of them. Everything here is arithmetic on a grid whose rows are
``stride`` elements long, on which a range of consecutive elements is at most three rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Extent(NamedTuple):
    """Elements ``[start + i * stride, end + i * stride)`` for each ``i`` below ``rows``, in this
    order.

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
        """Elements of one row."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        return self.width * self.rows

    @property
    def last(self) -> int:
        """One more than the highest element."""
        return self.end + (self.rows - 1) * self.stride

    @property
    def text(self) -> str:
        """``start:end``, and for several rows ``+stride*rows``."""
        return f"{self.start}:{self.end}" + (f"+{self.stride}*{self.rows}" if self.rows > 1 else "")

    def problem(self, numel: int) -> str | None:
        """Why this is no part of a tensor of ``numel`` elements; an empty tensor has one empty
        part.
        """
        if self.start == self.end == numel == 0 and self.rows == 1 and self.stride == 0:
            return None
        if not (0 <= self.start < self.end and self.rows >= 1 and self.last <= numel):
            return f"[{self.text}) is not a non-empty part of its {numel} elements"
        if (self.rows == 1) != (self.stride == 0):
            return f"{self.rows} rows have a stride of {self.stride}"
        if self.stride and (
            self.start % self.stride + self.width > self.stride or numel % self.stride
        ):
            return f"[{self.text}) are no columns of rows of {self.stride} elements"
        return None

    def each_row(self) -> list[Extent]:
        """Its rows, each by itself."""
        return [
            Extent(self.start + row * self.stride, self.end + row * self.stride)
            for row in range(self.rows)
        ]

    def cut(self, first: int, last: int) -> list[Extent]:
        """Its own elements ``[first, last)``, counted in its order: rows that are whole, and parts
        of rows around.
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
    """Rows ``[top, bottom)`` and columns ``[left, right)`` of a grid, and where an extent has them
    in its own order.
    """

    top: int
    bottom: int
    left: int
    right: int
    offset: int
    """Place of the first element."""
    pitch: int
    """From one row to the next."""


def _rectangles(extent: Extent, stride: int) -> Iterator[_Rectangle]:
    """An extent on a grid with rows of ``stride`` elements; with several rows its own stride must
    be that.
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
    """Elements that two extents have both: runs of ``length`` that begin at two offsets, each in
    one's own order.
    """

    here: int
    there: int
    length: int
    rows: int = 1
    pitch_here: int = 0
    """From one run to the next."""
    pitch_there: int = 0


def overlaps(one: Extent, other: Extent) -> Iterator[Overlap]:
    """The elements that both have, ``here`` of ``one`` and ``there`` of ``other``; few, whatever
    the rows.

    Runs that follow each other in both orders are one.
    """
    if one.rows > 1 and other.rows > 1 and one.stride != other.stride:
        for number, row in enumerate(other.each_row()):
            yield from (
                o._replace(there=o.there + number * other.width) for o in overlaps(one, row)
            )
        return
    stride = one.stride or other.stride or max(one.end, other.end, 1)
    for a in _rectangles(one, stride):
        for b in _rectangles(other, stride):
            top, left = max(a.top, b.top), max(a.left, b.left)
            rows, length = min(a.bottom, b.bottom) - top, min(a.right, b.right) - left
            if rows <= 0 or length <= 0:
                continue
            here, there = (r.offset + (top - r.top) * r.pitch + left - r.left for r in (a, b))
            if rows == 1 or a.pitch == b.pitch == length:
                yield Overlap(here, there, rows * length)
            else:
                yield Overlap(here, there, length, rows, a.pitch, b.pitch)


def first_not_once(extents: Sequence[Extent], numel: int) -> int | None:
    """An element of a tensor that the extents, each sound by itself, do not hold exactly once; None
    if there is none.

    Extents with rows of different lengths cannot be compared; then it is 0.
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
