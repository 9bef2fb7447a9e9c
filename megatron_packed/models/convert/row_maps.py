"""Positions of the rows of Hugging Face tensors in the project's parameters.

A row is one output of a weight. Every tensor is treated as a matrix: its last dimension is the
width W, and all dimensions before it are rows. Vectors have width 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from megatron_packed.config.kinds.layer_kind import OptionsOfKind
from megatron_packed.config.sections.model import ModelConfig


class Block(NamedTuple):
    """Regular selection of rows: ``rows`` rows from ``begin``, repeated every ``stride`` rows.

    Example:
        ``Block(1, 2, groups=3, stride=4)`` has the rows 1, 2, 5, 6, 9 and 10.
    """

    begin: int
    rows: int
    groups: int = 1
    stride: int = 0

    def view(self, matrix: Tensor) -> Tensor:
        """Return the rows of a contiguous matrix as a view ``(groups, rows, W)``."""
        width = matrix.shape[1]
        return matrix.as_strided(
            (self.groups, self.rows, width),
            (self.stride * width, width, 1),
            matrix.storage_offset() + self.begin * width,
        )


class Move(NamedTuple):
    """Rows of a parameter of the project, and the same rows in a Hugging Face tensor."""

    ours: Block
    theirs: Block


class Part(NamedTuple):
    """Rows of one Hugging Face tensor, and their positions in the parameter."""

    rows: int
    moves: tuple[Move, ...]


RowMap = Callable[[OptionsOfKind], tuple[Part, ...]]
"""Function that returns the parts of one parameter, in the order of its Hugging Face names."""


def interleaved(groups: int, widths: Iterable[int]) -> tuple[Part, ...]:
    """Return the parts of a parameter whose tensors alternate, group by group.

    Args:
        groups: number of equal slices of the parameter.
        widths: rows of each Hugging Face tensor in one slice.
    Example:
        With 2 groups and widths 3 and 1 the parameter has 3 rows of the first tensor, 1 row of the
        second, and the same again.
    """
    widths = list(widths)
    stride = sum(widths)
    begins = accumulate(widths, initial=0)
    return tuple(
        Part(
            groups * width,
            (Move(Block(begin, width, groups, stride), Block(0, width, groups, width)),),
        )
        for begin, width in zip(begins, widths)
    )


def qkv(config: ModelConfig) -> tuple[Part, ...]:
    """Return the parts q, k and v: each key-value head follows the query heads that use it."""
    groups, width = config.num_query_groups, config.head_dim
    return interleaved(groups, (config.num_attention_heads // groups * width, width, width))


def gated_qkv(config: ModelConfig) -> tuple[Part, ...]:
    """Return the parts q, k and v if the rows of q are ``(heads, 2, width)``: query, then gate.

    The rows of the parameter are, for each key-value head, those of its query heads, of the gates of
    these heads, of the key and of the value.
    """
    groups, width = config.num_query_groups, config.head_dim
    heads = config.num_attention_heads // groups
    stride = (2 * heads + 2) * width

    def theirs(position: int, of: int) -> Block:
        return Block(position * width, width, groups, of * width)

    def ours(position: int) -> Block:
        return Block(position * width, width, groups, stride)

    queries = [Move(ours(head), theirs(2 * head, 2 * heads)) for head in range(heads)]
    gates = [Move(ours(heads + head), theirs(2 * head + 1, 2 * heads)) for head in range(heads)]
    return (
        Part(2 * heads * groups * width, (*queries, *gates)),
        Part(groups * width, (Move(ours(2 * heads), theirs(0, 1)),)),
        Part(groups * width, (Move(ours(2 * heads + 1), theirs(0, 1)),)),
    )
