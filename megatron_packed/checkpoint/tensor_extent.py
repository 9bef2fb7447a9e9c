"""Parts of a flattened tensor: consecutive elements, or the same columns of consecutive rows.

If ranks split a matrix by columns, plain ranges would need one entry per row. An `Extent` describes
the columns of all rows with one entry, so a manifest has few entries for any model.

The functions place elements on a grid with rows of ``stride`` elements. On this grid a range of
consecutive elements consists of at most three rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


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
