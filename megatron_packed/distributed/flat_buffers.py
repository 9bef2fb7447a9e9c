"""All parameters of a model in flat buffers at fixed addresses, with flat float32 gradients of the same layout.

One buffer per part (a dtype) holds the parameters, one float32 buffer all gradients and, behind them, named slots
that ride on the same all-reduce. Addresses never change after construction, so captured graphs stay valid, an optimizer
step is a few kernels over whole slices, and data parallelism is one collective.

Layout of the gradient buffer, in elements (parameter buffers have the same offsets, counted from their part's start)::

    bf16 with decay | bf16 without | padding | fp32 with decay | fp32 without | padding | extras | counters

Every parameter starts at a multiple of 64 elements: 128 bytes in bf16, 256 in float32. Padding is zero and stays zero.

Of a module in float64 gradients, slots and optimizer state are float64 too: so layouts can be compared closely.

[Note: weights of experts]
Under expert parallelism the copies of an expert are on other ranks (``expert_dp``) than those of everything else
(``dp_cp``). Its weights then have parts of their own, one per dtype, in front of the others, so that what is summed
over ``dp_cp`` with the slots is one range still, and what is summed over ``expert_dp`` is another. Every target token
has the same scale wherever it was computed, so both are plain sums.

[Note: buckets]
What collectives move at a time. A part is cut into buckets at the first parameter border behind every
``bucket_elements``; a part of several has its parameters without weight decay, small ones of all layers, in buckets
of their own. So a bucket of matrices belongs to neighbouring layers and is complete while the backward pass still runs
(``overlap.py``). Borders depend on nothing else, so that sums and norms are the same with and without overlap.

[Note: ownership]
With an ``Ownership`` of N ranks each rank owns a share of the parameters (ZeRO-1): it alone receives the sum of their
gradients, keeps their masters and moments and updates them. A bucket is padded to a multiple of 4,096 N elements and
cut into N equal shares wherever that falls, inside a parameter too; rank r owns the r-th share of each bucket. So the
shares of all ranks have one size, as collectives want it, and start at multiples of 128 bytes; both collectives work in
place; and each row of 4,096 gradients, of which the norm is made, is the same for every N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_packed.distributed.collectives import all_gather_in_place
from megatron_packed.distributed.counters import LIMBS, ExactCounter
from megatron_packed.distributed.grad_sync import (
    all_reduce_gradients,
    attach_accumulation,
    reduce_scatter_gradients,
)
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.sharding import is_expert

ALIGN_BYTES = 128
ALIGN_ELEMENTS = 64
"""128 bytes of bf16: one offset in elements serves a parameter and its float32 gradient."""
GRAIN_ELEMENTS = 4096
"""A rank's share of each bucket is a multiple of this, so that norms can be taken in rows (``optim/clipping.py``)."""
BUCKET_ELEMENTS = 40_000_000
"""Of a bucket, about; Megatron's default where there are few ranks."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Part(NamedTuple):
    """Parameters of one dtype whose gradients are summed over the same ranks."""

    dtype: torch.dtype
    expert: bool = False
    """Whether those ranks are ``expert_dp``. See [Note: weights of experts]."""


PARTS = tuple(Part(dtype, expert) for expert in (True, False) for dtype in DTYPES)
"""In the order of the buffer."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Who owns what of flat buffers; by default a rank owns all. Reads: [Note: ownership]."""

    group: dist.ProcessGroup | None = None
    """The ranks that hold the same parameters and share the work of updating them."""
    rank: int = 0
    size: int = 1
    experts: Ownership | None = None
    """Of the weights of experts, where their copies are on other ranks; None: they are like all others."""

    @classmethod
    def over(cls, groups: ParallelGroups) -> Ownership:
        """Each rank that holds the same parameters owns a share of them."""
        experts = cls(group=groups.expert_dp_group, rank=groups.expert_dp_rank, size=groups.expert_dp_size)
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
    """Whether the copies of an expert are on other ranks than those of other weights."""
    return groups.ep_size > 1 or groups.expert_tp_size != groups.tp_size


class Described(NamedTuple):
    """What the place of a parameter depends on."""

    name: str
    shape: tuple[int, ...]
    part: Part
    decay: bool


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """Where one parameter lives: elements ``[start, end)`` of the gradient buffer."""

    name: str
    shape: tuple[int, ...]
    part: Part
    decay: bool
    """Whether weight decay applies (``param.no_weight_decay`` is not set)."""
    start: int
    end: int
    bucket: int
    """Number of the bucket that it lies in."""

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype


@dataclass(frozen=True, kw_only=True)
class FlatRange:
    """Contiguous elements ``[start, end)`` of one bucket and one weight-decay rule, padding included."""

    part: Part
    decay: bool
    start: int
    end: int
    bucket: int


class Bucket(NamedTuple):
    """Elements ``[start, end)`` that collectives move together. Reads: [Note: buckets]."""

    part: Part
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Order and place of every parameter; a pure function of names, shapes, dtypes, decay rules and owners."""

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
            raise ValueError("the module has no parameter that requires a gradient; there is nothing to train.")
        for name, _, part, _ in parameters:
            if part.dtype not in DTYPES:
                raise ValueError(f"parameter {name} has dtype {part.dtype}; train in torch.bfloat16 or torch.float32.")
        slots: list[ParamSlot] = []
        ranges: list[FlatRange] = []
        buckets: list[Bucket] = []
        offset = 0
        for part in PARTS:
            owners = num_expert_owners if part.expert else num_owners
            for group in _buckets_of([item for item in parameters if item.part == part], bucket_elements):
                start, number = offset, len(buckets)
                begins: dict[bool, int] = {}
                for name, shape, _, decay in group:
                    begins.setdefault(decay, offset)
                    place = {"start": offset, "end": offset + math.prod(shape)}
                    slots.append(ParamSlot(name=name, shape=shape, part=part, decay=decay, bucket=number, **place))
                    offset = _round_up(place["end"], ALIGN_ELEMENTS)
                offset = start + _round_up(offset - start, GRAIN_ELEMENTS * owners)
                for (decay, begin), end in zip(begins.items(), [*list(begins.values())[1:], offset]):
                    if begin < end:
                        ranges.append(FlatRange(part=part, decay=decay, start=begin, end=end, bucket=number))
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
    def parts(self) -> list[Part]:
        """Those that have parameters, in the order of the buffer."""
        return [part for part in PARTS if any(item.part == part for item in self.ranges)]

    @property
    def expert_numel(self) -> int:
        """Elements of the parts of experts, which come first."""
        return max((item.end for item in self.ranges if item.part.expert), default=0)

    def span(self, part: Part) -> tuple[int, int]:
        """First and last element of all parameters of ``part``; (0, 0) when there are none."""
        ranges = [item for item in self.ranges if item.part == part]
        return (ranges[0].start, ranges[-1].end) if ranges else (0, 0)

    def owned_span(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """First and last element of the share of ``bucket`` that ``rank`` owns. Reads: [Note: ownership]."""
        share = (bucket.end - bucket.start) // (self.num_expert_owners if bucket.part.expert else self.num_owners)
        return bucket.start + rank * share, bucket.start + (rank + 1) * share

    def owned_ranges(self, rank: int, expert_rank: int = 0) -> list[FlatRange]:
        """What ``rank`` owns of ``ranges``; ``expert_rank`` is its number among the owners of experts."""
        owned = []
        for item in self.ranges:
            first, last = self.owned_span(self.buckets[item.bucket], expert_rank if item.part.expert else rank)
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
    # A parameter of no element belongs to the bucket before: one of its own would have no place.
    for item in sorted(parameters, key=lambda item: not item.decay):
        ends_decay = len(buckets) > 1 and buckets[-1] and buckets[-1][-1].decay != item.decay
        if math.prod(item.shape) and (elements >= bucket_elements or ends_decay):
            buckets.append([])
            elements = 0
        buckets[-1].append(item)
        elements += math.prod(item.shape)
    return buckets


class Gather(Protocol):
    """Gathers parameters, in its own time."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


class FlatBuffers:
    """Flat parameters and gradients of one module.

    The module's parameters become views (same ``Parameter`` objects, same values) and get ``main_grad``, a float32 view
    of their shape; see [Note: main_grad protocol]. A parameter that is used twice (tied weights) has one place. Frozen
    parameters (``requires_grad`` False) are left alone. Create it after the module is on its device and in its final
    dtype: ``module.to(...)`` afterwards would move the parameters out (``check_addresses`` tells).

    Args:
        module: its trainable parameters must share one device.
        extras: name -> number of float32 slots that ride on the gradient all-reduce (a sum): losses, flags.
        counters: name -> number of exact integer counters; use them for counts that may pass 2**24 in one step.
        ownership: which share of the parameters this rank updates; by default all. Reads: [Note: ownership]. It also
            says whether weights of experts are apart.
        bucket_elements: of a bucket, about. Reads: [Note: buckets].
    Raises:
        ValueError: no trainable parameter, an unsupported dtype, several devices, two parameters sharing memory.
    """

    def __init__(
        self,
        module: nn.Module,
        extras: Mapping[str, int] | None = None,
        counters: Mapping[str, int] | None = None,
        *,
        ownership: Ownership | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.ownership = ownership or Ownership()
        experts = self.ownership.experts
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        described = (
            Described(name, tuple(p.shape), Part(p.dtype, experts is not None and is_expert(p)), _has_decay(p))
            for name, p in trainable.items()
        )
        self.layout = FlatLayout.plan(described, self.ownership.size, experts.size if experts else 1, bucket_elements)
        self.parameters: Mapping[str, nn.Parameter] = MappingProxyType(
            {slot.name: trainable[slot.name] for slot in self.layout.slots}
        )
        self.device = _only_device(self.parameters)
        extras, counters = dict(extras or {}), dict(counters or {})
        sizes = {f"extras/{name}": size for name, size in extras.items()}
        sizes |= {f"counters/{name}": LIMBS * size for name, size in counters.items()}
        tail = _round_up(sum(sizes.values()), ALIGN_ELEMENTS)
        wide = any(part.dtype == torch.float64 for part in self.layout.parts)
        self.storage = _aligned_zeros(self.layout.numel + tail, torch.float64 if wide else torch.float32, self.device)
        """Gradients, extras and counters: what one all-reduce moves."""
        self.grads = self.storage[: self.layout.numel]
        """``(numel,)`` float32: all gradients, padding included."""
        views = _carve(self.storage[self.layout.numel :], sizes)
        self.extras: Mapping[str, Tensor] = MappingProxyType({name: views[f"extras/{name}"] for name in extras})
        """Name -> 1-D float32 view; add to it before the all-reduce, read the sum over ranks after it."""
        self.counters: Mapping[str, ExactCounter] = MappingProxyType(
            {name: ExactCounter(views[f"counters/{name}"]) for name in counters}
        )
        self.params: Mapping[Part, Tensor] = MappingProxyType(self._adopt_parameters())
        """Part -> flat buffer of all its parameters."""
        self.gather: Gather | None = None
        """Gathers parameters while other work goes on; None: at once."""
        self._addresses = {name: p.data_ptr() for name, p in self.parameters.items()}
        attach_accumulation(self.parameters.values())

    def _adopt_parameters(self) -> dict[Part, Tensor]:
        flat = {}
        for part in self.layout.parts:
            start, end = self.layout.span(part)
            flat[part] = _aligned_zeros(end - start, part.dtype, self.device)
        with torch.no_grad():
            for slot in self.layout.slots:
                parameter = self.parameters[slot.name]
                view = self.param_view(slot, flat).view(slot.shape)
                view.copy_(parameter)
                parameter.data = view
                parameter.grad = None
                parameter.main_grad = self.grads[slot.start : slot.end].view(slot.shape)  # type: ignore[attr-defined]
        return flat

    def param_view(self, slot: ParamSlot, flat: Mapping[Part, Tensor] | None = None) -> Tensor:
        """1-D view of a parameter's elements in its part's flat buffer."""
        offset = self.layout.span(slot.part)[0]
        return (self.params if flat is None else flat)[slot.part][slot.start - offset : slot.end - offset]

    def zero_grad(self) -> None:
        """Set gradients, extras and counters to zero: one kernel, same addresses."""
        self.storage.zero_()

    def all_reduce(self, groups: ParallelGroups) -> None:
        """Sum gradients, extras and counters over all ranks that hold the same parameters (identity for one rank)."""
        all_reduce_gradients(self.storage, groups, self.layout.expert_numel)

    def reduce(self, groups: ParallelGroups) -> None:
        """Sum gradients where their owner reads them, extras and counters everywhere; the identity for one rank.

        For an only owner that is ``all_reduce``. Among several, ``owned_grads`` hold sums afterwards and no other
        gradient means anything.
        """
        if self.owns_all:
            self.all_reduce(groups)
            return
        spans = [(self.bucket_grads(bucket), self.owners(bucket.part).group) for bucket in self.layout.buckets]
        reduce_scatter_gradients(spans, self.tail, groups)

    @property
    def tail(self) -> Tensor:
        """Extras and counters, which lie behind the gradients."""
        return self.storage[self.layout.numel :]

    def bucket_grads(self, bucket: Bucket) -> Tensor:
        """1-D view of a bucket's gradients."""
        return self.grads[bucket.start : bucket.end]

    def bucket_params(self, bucket: Bucket) -> Tensor:
        """1-D view of a bucket's parameters."""
        offset = self.layout.span(bucket.part)[0]
        return self.params[bucket.part][bucket.start - offset : bucket.end - offset]

    def owners(self, part: Part) -> Ownership:
        """The ranks that own shares of ``part``."""
        experts = self.ownership.experts
        return experts if part.expert and experts is not None else self.ownership

    @property
    def owns_all(self) -> bool:
        """Whether this rank updates every parameter that it holds."""
        return all(self.owners(part).size == 1 for part in self.layout.parts)

    def owned_span(self, bucket: Bucket) -> tuple[int, int]:
        """First and last element of the gradient buffer that this rank owns of ``bucket``."""
        return self.layout.owned_span(bucket, self.owners(bucket.part).rank)

    def owned_ranges(self) -> list[FlatRange]:
        """What this rank owns, by weight-decay rule."""
        experts = self.ownership.experts
        return self.layout.owned_ranges(self.ownership.rank, experts.rank if experts else 0)

    def owned_grads(self) -> list[tuple[Part, Tensor]]:
        """The gradients that this rank owns: views of multiples of ``GRAIN_ELEMENTS``, few, each with a part of it.

        What lies one behind the other is one view, but for weights of experts, which never share one with others.
        """
        spans: list[tuple[Part, int, int]] = []
        for bucket in self.layout.buckets:
            start, end = self.owned_span(bucket)
            if spans and spans[-1][2] == start and spans[-1][0].expert == bucket.part.expert:
                part, start, _ = spans.pop()
            else:
                part = bucket.part
            spans.append((part, start, end))
        return [(part, self.grads[start:end]) for part, start, end in spans]

    def owned_params(self, bucket: Bucket) -> Tensor:
        """1-D view of the parameters of ``bucket`` that this rank owns."""
        start, end = self.owned_span(bucket)
        return self.bucket_params(bucket)[start - bucket.start : end - bucket.start]

    def gather_params(self) -> None:
        """Fill all parameters with what their owners hold; a collective, the identity for an only owner.

        With a ``gather`` of its own (``overlap.py``) it only starts.
        """
        if self.gather is not None:
            self.gather.start()
            return
        for bucket in self.layout.buckets:
            all_gather_in_place(self.bucket_params(bucket), self.owners(bucket.part).group)

    def wait_params(self) -> None:
        """Behind it every parameter may be read and written. Modules wait for their own when they are called."""
        if self.gather is not None:
            self.gather.wait()

    def check_addresses(self) -> None:
        """Host-only check that no parameter has left its place.

        Raises:
            RuntimeError: names the first that did.
        """
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                raise RuntimeError(
                    f"parameter {name} left its flat buffer (module.to(), .data = or load with assign=True after "
                    "FlatBuffers was built); copy values in place instead: parameter.data.copy_(...)."
                )


def _has_decay(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "no_weight_decay", False)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that start at a multiple of 128 bytes; the CPU's allocator promises only 64."""
    spare = ALIGN_BYTES // dtype.itemsize
    zeros = torch.zeros(numel + spare, dtype=dtype, device=device)
    first = -zeros.data_ptr() % ALIGN_BYTES // dtype.itemsize
    return zeros[first : first + numel]


def _carve(flat: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    views, offset = {}, 0
    for name, size in sizes.items():
        views[name] = flat[offset : offset + size]
        offset += size
    return views


def _only_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    by_address: dict[int, str] = {}
    devices = {p.device: name for name, p in parameters.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"the parameters are on {len(devices)} devices ({places}); move the module to one first.")
    for name, p in parameters.items():
        if p.numel() and p.device.type != "meta":
            other = by_address.setdefault(p.data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} are different Parameter objects over the same memory; tie weights "
                    "by assigning the same Parameter to both modules."
                )
    return next(iter(devices))
