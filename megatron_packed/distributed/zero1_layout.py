"""Layout of the flat buffers: parameter positions, collective buckets and ZeRO-1 shares.

The layout is a pure function of names, shapes, dtypes, weight-decay rules and numbers of owners. No
function of this module uses a device.

Layout of the gradient buffer, in elements (parameter buffers have the same offsets, counted from
the start of their part)::

    bf16 with decay | bf16 without | padding | fp32 with decay | fp32 without | padding
    | extras | counters

Every parameter starts at a multiple of 64 elements: 128 bytes in bf16, 256 in float32. Padding is
zero and stays zero.

[Note: gradients in bf16]
The gradients of some bf16 weights may be summed in bf16 (``gradient_precision.py``). These weights are
in buffer parts of their own, before all others. So each of the two dtypes is one contiguous range of
elements, and two tensors hold the gradients: elements from 0 in bf16, and the rest in float32.

[Note: weights of experts]
Under expert parallelism the ranks with copies of an expert (``expert_dp``) differ from the ranks
with copies of other weights (``dp_cp``). The weights of experts are then in separate buffer parts,
one per dtype, at the start of the buffer. So the gradients reduced over ``expert_dp`` are one
contiguous range. The gradients reduced over ``dp_cp``, together with the extra slots, are another.
The loss of every target token has the same scale on every rank, so both reductions are plain sums.

[Note: buckets]
A bucket is the range of the buffer that one collective transfers. A new bucket starts at the first
parameter boundary after ``bucket_elements`` elements. If a part has several buckets, its parameters
without weight decay (small, from all layers) are in separate buckets. So a bucket of matrices
contains only neighbouring layers and is complete while the backward pass still runs
(``overlapped_collectives.py``). Bucket boundaries do not depend on any other option. So sums and
norms are the same with and without overlap.

[Note: ownership]
With an ``Ownership`` of N ranks each rank owns a share of the parameters (ZeRO-1). Only the owner
receives the sum of the gradients of its share, stores the master weights and moments, and updates
the parameters. A bucket is padded to a multiple of 4,096 N elements and cut into N equal shares. A
cut may be inside a parameter. Rank r owns the r-th share of each bucket. This has three advantages:

* All shares have the same size, as collectives require, and start at multiples of 128 bytes.
* Reduce-scatter and all-gather both work in place.
* The gradient norm is computed in rows of 4,096 gradients, and the rows are the same for every N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_packed.distributed.groups import Axis, ParallelGroups

ALIGN_ELEMENTS = 64
"""Alignment of each parameter, in elements; 128 bytes of bf16.

An offset in elements is the same for a parameter and for its float32 gradient.
"""
GRAIN_ELEMENTS = 4096
"""Unit of a rank's share of a bucket, in elements; norms are computed in rows of this length.

See ``optim/clipping.py``.
"""
BUCKET_ELEMENTS = 40_000_000
"""Default approximate size of a bucket, in elements; Megatron's default for few ranks."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class BufferPart(NamedTuple):
    """Part of the flat buffers: parameters of one dtype, reduced over the same ranks."""

    dtype: torch.dtype
    expert: bool = False
    """True if the gradients are reduced over ``expert_dp``. See [Note: weights of experts]."""
    low: bool = False
    """True if the gradients are summed in bf16. See [Note: gradients in bf16]."""


_PARTS = (
    *(BufferPart(torch.bfloat16, expert, low=True) for expert in (True, False)),
    *(BufferPart(dtype, expert) for expert in (True, False) for dtype in _DTYPES),
)
"""All possible buffer parts, in the order of the buffer."""


@dataclass(frozen=True, kw_only=True)
class Ownership(Axis):
    """Division of the flat buffers among owners; by default this rank owns all parameters.

    The ranks of the axis hold the same parameters. Each updates its own share of them.

    See [Note: ownership].
    """

    experts: Ownership | None = None
    """Ownership of the weights of experts, if their copies are on other ranks; else None."""

    @classmethod
    def over(cls, groups: ParallelGroups) -> Ownership:
        """Return this rank's ownership under ZeRO-1.

        Each of the ranks with the same parameters owns an equal share.
        """
        experts = cls(**vars(groups.expert_dp)) if experts_apart(groups) else None
        return cls(**vars(groups.dp_cp), experts=experts)

    @classmethod
    def undivided(cls, groups: ParallelGroups) -> Ownership:
        """Return this rank's ownership without ZeRO-1: it owns all parameters that it holds."""
        return cls(experts=cls() if experts_apart(groups) else None)


def experts_apart(groups: ParallelGroups) -> bool:
    """Return True if the ranks with copies of an expert differ from the ranks with copies of other
    weights."""
    return groups.ep.size > 1 or groups.expert_tp.size != groups.tp.size


class Described(NamedTuple):
    """Properties of a parameter that determine its position in the buffer."""

    name: str
    shape: tuple[int, ...]
    part: BufferPart
    decay: bool


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """Position of one parameter: elements ``[start, end)`` of the gradient buffer."""

    name: str
    shape: tuple[int, ...]
    part: BufferPart
    decay: bool
    """True if weight decay applies (``param.no_weight_decay`` is not set)."""
    start: int
    end: int
    bucket: int
    """Number of the bucket that contains the parameter."""

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Contiguous elements ``[start, end)`` of one bucket with one weight-decay rule.

    Padding is included.
    """

    part: BufferPart
    decay: bool
    start: int
    end: int
    bucket: int


class Bucket(NamedTuple):
    """Elements ``[start, end)`` that one collective transfers. See [Note: buckets]."""

    part: BufferPart
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Order and position of every parameter in the flat buffers.

    The layout is a pure function of names, shapes, dtypes, decay rules and numbers of owners.
    """

    slots: tuple[ParamSlot, ...]
    ranges: tuple[FlatRange, ...]
    buckets: tuple[Bucket, ...]
    """Buckets in the order of the buffer; together they cover all parameters and padding."""
    numel: int
    num_owners: int = 1
    num_expert_owners: int = 1

    @classmethod
    def plan(
        cls,
        parameters: Iterable[Described],
        num_owners: int = 1,
        num_expert_owners: int = 1,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> FlatLayout:
        """Lay out parameters in the given order, grouped by (part, decay).

        Args:
            parameters: trainable parameters.
            num_owners: number of ranks that own shares of parameters other than experts.
            num_expert_owners: number of ranks that own shares of weights of experts.
            bucket_elements: approximate size of a bucket, in elements.
        Raises:
            ValueError: there is no parameter, or a dtype is not bf16, float32 or float64.
        """
        parameters = list(parameters)
        if not parameters:
            raise ValueError(
                "the module has no parameter that requires a gradient; there is nothing to train."
            )
        for name, _, part, _ in parameters:
            if part.dtype not in _DTYPES:
                raise ValueError(
                    f"parameter {name} has dtype {part.dtype}; train in torch.bfloat16 or torch.float32."
                )
        slots: list[ParamSlot] = []
        ranges: list[FlatRange] = []
        buckets: list[Bucket] = []
        offset = 0
        for part in _PARTS:
            grain = GRAIN_ELEMENTS * (num_expert_owners if part.expert else num_owners)
            members = [item for item in parameters if item.part == part]
            for group in _buckets_of(members, bucket_elements):
                start = offset
                placed = _place(group, len(buckets), start)
                # The padded size is a multiple of GRAIN_ELEMENTS (a row of the gradient norm) times
                # the number of owners. So all shares are equal, and the rows of the norm are the
                # same for every number of owners.
                offset = start + round_up(placed[-1].end - start, grain)
                slots += placed
                ranges += _ranges_of(placed, offset)
                if start < offset:
                    buckets.append(Bucket(part, start, offset))
        return cls(
            slots=tuple(slots),
            ranges=tuple(ranges),
            buckets=tuple(buckets),
            numel=offset,
            num_owners=num_owners,
            num_expert_owners=num_expert_owners,
        )

    @cached_property
    def parts(self) -> list[BufferPart]:
        """Buffer parts that contain parameters, in the order of the buffer."""
        return [part for part in _PARTS if any(item.part == part for item in self.ranges)]

    @cached_property
    def low_numel(self) -> int:
        """Number of elements whose gradients are in bf16, which are first in the buffer."""
        return max((item.end for item in self.ranges if item.part.low), default=0)

    @cached_property
    def expert_numel(self) -> int:
        """Number of elements of experts after those with gradients in bf16, where they are first."""
        ends = (item.end for item in self.ranges if item.part.expert and not item.part.low)
        return max(ends, default=self.low_numel) - self.low_numel

    def span(self, part: BufferPart) -> tuple[int, int]:
        """Return the elements ``(start, end)`` of ``part``; (0, 0) if it has no parameters.

        ``end`` is exclusive.
        """
        ranges = [item for item in self.ranges if item.part == part]
        return (ranges[0].start, ranges[-1].end) if ranges else (0, 0)

    def owned_span(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """Return the elements ``(start, end)`` of the share of ``bucket`` that ``rank`` owns.

        ``end`` is exclusive. See [Note: ownership].
        """
        share = (bucket.end - bucket.start) // (
            self.num_expert_owners if bucket.part.expert else self.num_owners
        )
        return bucket.start + rank * share, bucket.start + (rank + 1) * share

    def owned_ranges(self, rank: int, expert_rank: int = 0) -> list[FlatRange]:
        """Return the ranges that a rank owns.

        Args:
            rank: number of the rank among the owners of parameters other than experts.
            expert_rank: number of the rank among the owners of weights of experts.
        """
        owned = []
        for item in self.ranges:
            first, last = self.owned_span(
                self.buckets[item.bucket], expert_rank if item.part.expert else rank
            )
            # A share may begin or end inside a range, so only the overlap of both is owned.
            start, end = max(item.start, first), min(item.end, last)
            if start < end:
                owned.append(replace(item, start=start, end=end))
        return owned


def _buckets_of(parameters: Sequence[Described], bucket_elements: int) -> list[list[Described]]:
    """Group the parameters of one part by bucket. See [Note: buckets]."""
    if not parameters:
        return []
    buckets: list[list[Described]] = [[]]
    elements = 0
    # Sort parameters with decay first, so that the optimizer needs one kernel per decay rule. The
    # sort is stable, so parameters of neighbouring layers stay together. A parameter without
    # elements joins the previous bucket, because an empty bucket would have no range in the buffer.
    for item in sorted(parameters, key=lambda item: not item.decay):
        ends_decay = len(buckets) > 1 and buckets[-1] and buckets[-1][-1].decay != item.decay
        if math.prod(item.shape) and (elements >= bucket_elements or ends_decay):
            buckets.append([])
            elements = 0
        buckets[-1].append(item)
        elements += math.prod(item.shape)
    return buckets


def _place(group: Sequence[Described], bucket: int, start: int) -> list[ParamSlot]:
    """Place the parameters of one bucket from element ``start`` on, each aligned."""
    slots = []
    for item in group:
        end = start + math.prod(item.shape)
        slots.append(ParamSlot(**item._asdict(), start=start, end=end, bucket=bucket))
        start = round_up(end, ALIGN_ELEMENTS)
    return slots


def _ranges_of(slots: Sequence[ParamSlot], end: int) -> Iterator[FlatRange]:
    """Return the ranges of one bucket that ends at ``end``, one for each weight-decay rule."""
    begins: dict[bool, int] = {}
    for slot in slots:
        begins.setdefault(slot.decay, slot.start)
    # Padding at the end belongs to the last range: it stays zero in every update.
    for (decay, start), stop in zip(begins.items(), [*list(begins.values())[1:], end]):
        if start < stop:
            yield FlatRange(
                part=slots[0].part, decay=decay, start=start, end=stop, bucket=slots[0].bucket
            )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
