"""Layout of the flat buffers: the place of every parameter, the buckets of the collectives, and the
ZeRO-1 shard that each data-parallel rank owns.

Pure functions of names, shapes, dtypes, weight-decay rules and numbers of owners: nothing here
touches a device.

Layout of the gradient buffer, in elements (parameter buffers have the same offsets, counted from
their part's start)::

    bf16 with decay | bf16 without | padding | fp32 with decay | fp32 without | padding | extras | counters

Every parameter starts at a multiple of 64 elements: 128 bytes in bf16, 256 in float32. Padding is
zero and stays zero.

[Note: weights of experts]
Under expert parallelism the copies of an expert are on other ranks (``expert_dp``) than those of
everything else (``dp_cp``). Its weights then have parts of their own, one per dtype, in front of
the others, so that what is summed over ``dp_cp`` with the slots is one range still, and what is
summed over ``expert_dp`` is another. Every target token has the same scale wherever it was
computed, so both are plain sums.

[Note: buckets]
What collectives move at a time. A part is cut into buckets at the first parameter border behind
every ``bucket_elements``; a part of several has its parameters without weight decay, small ones of
all layers, in buckets of their own. So a bucket of matrices belongs to neighbouring layers and is
complete while the backward pass still runs (``overlapped_collectives.py``). Borders depend on
nothing else, so that sums and norms are the same with and without overlap.

[Note: ownership]
With an ``Ownership`` of N ranks each rank owns a share of the parameters (ZeRO-1): it alone
receives the sum of their gradients, keeps their masters and moments and updates them. A bucket is
padded to a multiple of 4,096 N elements and cut into N equal shares wherever that falls, inside a
parameter too; rank r owns the r-th share of each bucket. So the shares of all ranks have one size,
as collectives want it, and start at multiples of 128 bytes; both collectives work in place; and
each row of 4,096 gradients, of which the norm is made, is the same for every N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_packed.distributed.groups import ParallelGroups

ALIGN_ELEMENTS = 64
"""128 bytes of bf16: one offset in elements serves a parameter and its float32 gradient."""
GRAIN_ELEMENTS = 4096
"""A rank's share of each bucket is a multiple of this, so that norms can be taken in rows
(``optim/clipping.py``).
"""
BUCKET_ELEMENTS = 40_000_000
"""Approximate size of a bucket; Megatron's default for few ranks."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class BufferPart(NamedTuple):
    """Parameters of one dtype whose gradients are summed over the same ranks."""

    dtype: torch.dtype
    expert: bool = False
    """True if those ranks are ``expert_dp``. See [Note: weights of experts]."""


PARTS = tuple(BufferPart(dtype, expert) for expert in (True, False) for dtype in DTYPES)
"""In the order of the buffer."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Owners of shares of the flat buffers; by default a rank owns all. See [Note: ownership]."""

    group: dist.ProcessGroup | None = None
    """The ranks that hold the same parameters and share the work of updating them."""
    rank: int = 0
    size: int = 1
    experts: Ownership | None = None
    """Owners of the experts' weights, where their copies are on other ranks; else None."""

    @classmethod
    def over(cls, groups: ParallelGroups) -> Ownership:
        """Each rank that holds the same parameters owns a share of them."""
        experts = cls(
            group=groups.expert_dp_group, rank=groups.expert_dp_rank, size=groups.expert_dp_size
        )
        return cls(
            group=groups.dp_cp_group,
            rank=groups.dp_cp_rank,
            size=groups.dp_cp_size,
            experts=experts if experts_apart(groups) else None,
        )

    @classmethod
    def undivided(cls, groups: ParallelGroups) -> Ownership:
        """Each rank owns all that it holds."""
        return cls(experts=cls() if experts_apart(groups) else None)


def experts_apart(groups: ParallelGroups) -> bool:
    """Return True if the copies of an expert are on other ranks than those of other weights."""
    return groups.ep_size > 1 or groups.expert_tp_size != groups.tp_size


class Described(NamedTuple):
    """Properties of a parameter that decide its place."""

    name: str
    shape: tuple[int, ...]
    part: BufferPart
    decay: bool


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """Place of one parameter: elements ``[start, end)`` of the gradient buffer."""

    name: str
    shape: tuple[int, ...]
    part: BufferPart
    decay: bool
    """True if weight decay applies (``param.no_weight_decay`` is not set)."""
    start: int
    end: int
    bucket: int
    """Number of the bucket that it lies in."""

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Contiguous elements ``[start, end)`` of one bucket and one weight-decay rule, padding
    included.
    """

    part: BufferPart
    decay: bool
    start: int
    end: int
    bucket: int


class Bucket(NamedTuple):
    """Elements ``[start, end)`` that collectives move together. Reads: [Note: buckets]."""

    part: BufferPart
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Order and place of every parameter; a pure function of names, shapes, dtypes, decay rules and
    owners.
    """

    slots: tuple[ParamSlot, ...]
    ranges: tuple[FlatRange, ...]
    buckets: tuple[Bucket, ...]
    """In the order of the buffer; they cover it."""
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
        """Lay out parameters in the order given, grouped by (part, decay).

        Raises:
            ValueError: no parameter at all, or a dtype other than bf16, float32 and float64.
        """
        parameters = list(parameters)
        if not parameters:
            raise ValueError(
                "the module has no parameter that requires a gradient; there is nothing to train."
            )
        for name, _, part, _ in parameters:
            if part.dtype not in DTYPES:
                raise ValueError(
                    f"parameter {name} has dtype {part.dtype}; train in torch.bfloat16 or torch.float32."
                )
        slots: list[ParamSlot] = []
        ranges: list[FlatRange] = []
        buckets: list[Bucket] = []
        offset = 0
        for part in PARTS:
            owners = num_expert_owners if part.expert else num_owners
            for group in _buckets_of(
                [item for item in parameters if item.part == part], bucket_elements
            ):
                start = offset
                number = len(buckets)
                begins: dict[bool, int] = {}
                for name, shape, _, decay in group:
                    begins.setdefault(decay, offset)
                    place = {"start": offset, "end": offset + math.prod(shape)}
                    slots.append(
                        ParamSlot(
                            name=name, shape=shape, part=part, decay=decay, bucket=number, **place
                        )
                    )
                    offset = round_up(place["end"], ALIGN_ELEMENTS)
                # The bucket ends at a multiple for its owners: equal shares for the collectives,
                # and the same rows of the norm for every number of owners.
                offset = start + round_up(offset - start, GRAIN_ELEMENTS * owners)
                # Padding belongs to the last range: it is zero and stays zero under every update.
                for (decay, begin), end in zip(
                    begins.items(), [*list(begins.values())[1:], offset]
                ):
                    if begin < end:
                        ranges.append(
                            FlatRange(part=part, decay=decay, start=begin, end=end, bucket=number)
                        )
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

    @property
    def parts(self) -> list[BufferPart]:
        """Those that have parameters, in the order of the buffer."""
        return [part for part in PARTS if any(item.part == part for item in self.ranges)]

    @property
    def expert_numel(self) -> int:
        """Elements of the parts of experts, which come first."""
        return max((item.end for item in self.ranges if item.part.expert), default=0)

    def span(self, part: BufferPart) -> tuple[int, int]:
        """First and last element of all parameters of ``part``; (0, 0) when there are none."""
        ranges = [item for item in self.ranges if item.part == part]
        return (ranges[0].start, ranges[-1].end) if ranges else (0, 0)

    def owned_span(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """First and last element of the share of ``bucket`` that ``rank`` owns. Reads: [Note:
        ownership].
        """
        share = (bucket.end - bucket.start) // (
            self.num_expert_owners if bucket.part.expert else self.num_owners
        )
        return bucket.start + rank * share, bucket.start + (rank + 1) * share

    def owned_ranges(self, rank: int, expert_rank: int = 0) -> list[FlatRange]:
        """Return the ranges that ``rank`` owns; ``expert_rank`` is its number among the owners of
        experts.
        """
        owned = []
        for item in self.ranges:
            first, last = self.owned_span(
                self.buckets[item.bucket], expert_rank if item.part.expert else rank
            )
            # A share is cut anywhere, also inside a parameter: only its overlap with it counts.
            start, end = max(item.start, first), min(item.end, last)
            if start < end:
                owned.append(replace(item, start=start, end=end))
        return owned


def _buckets_of(parameters: Sequence[Described], bucket_elements: int) -> list[list[Described]]:
    """Parameters of one part by bucket. Reads: [Note: buckets]."""
    if not parameters:
        return []
    buckets: list[list[Described]] = [[]]
    elements = 0
    # Sorted by decay, a stable sort: one kernel per rule, and layers stay neighbours.
    # A parameter of no element belongs to the bucket before: one of its own would have no place.
    for item in sorted(parameters, key=lambda item: not item.decay):
        ends_decay = len(buckets) > 1 and buckets[-1] and buckets[-1][-1].decay != item.decay
        if math.prod(item.shape) and (elements >= bucket_elements or ends_decay):
            buckets.append([])
            elements = 0
        buckets[-1].append(item)
        elements += math.prod(item.shape)
    return buckets


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
