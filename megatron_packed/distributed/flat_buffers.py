"""Flat buffers at fixed addresses for all parameters and gradients of a model.

There is one parameter buffer per buffer part (a dtype). One float32 buffer holds all gradients in
the same layout; see [Note: gradients in bf16] for an exception. Named extra slots follow the
gradients, so that the same all-reduce also sums metrics and counts. Addresses never change after
construction. So captured graphs stay valid, an optimizer step is a few kernels over contiguous
slices, and data parallelism needs one collective.
``zero1_layout.py`` computes the position of each parameter.

For a module with float64 parameters the gradients, the extra slots and the optimizer state are
float64 too. Tests use this to compare parallel layouts with small tolerances.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_packed.distributed.collectives import (
    Started,
    all_gather_in_place,
    all_reduce_sum,
    start_sum,
    wait_for,
)
from megatron_packed.distributed.data_parallel_reduce import (
    all_reduce_gradients,
    attach_accumulation,
)
from megatron_packed.distributed.gradient_precision import FULL_PRECISION, GradientPrecision
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.low_precision_sums import start_rounded_once
from megatron_packed.distributed.tensor_parallel_shards import is_expert
from megatron_packed.distributed.zero1_layout import (
    ALIGN_ELEMENTS,
    BUCKET_ELEMENTS,
    Bucket,
    BufferPart,
    Described,
    FlatLayout,
    FlatRange,
    Ownership,
    ParamSlot,
    round_up,
)

ALIGN_BYTES = 128
_LIMB_BITS = 10
_LIMB_MASK = (1 << _LIMB_BITS) - 1
LIMBS = 2


class Gather(Protocol):
    """Interface of an all-gather of parameters that is started and waited for separately."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


class ExactCounter:
    """Counters of a step, each stored as two float32 limbs in the gradient buffer's extra slots.

    float32 represents every integer only up to 2**24 = 16.8 M, and counts of a large global batch
    are larger. So a count c is stored as ``1024 * high + low`` with ``0 <= low < 1024``. Sums of
    limbs over ranks stay below 2**24, so they are exact in any order of summation. This holds for
    up to 2**14 = 16,384 ranks and totals up to 2**34 = 17.2 G per counter.

    Args:
        limbs: ``(2 * size,)`` float32 view: all high limbs, then all low limbs.
    """

    def __init__(self, limbs: Tensor) -> None:
        # `chunk` of an empty tensor returns one chunk, not two.
        self._high, self._low = limbs.chunk(LIMBS) if limbs.numel() else (limbs, limbs)

    def add_(self, counts: Tensor) -> None:
        """Add ``(size,)`` counts, which are integers of any dtype; call before the all-reduce.

        The call queues device work only.
        """
        self._set(self.value() + counts.reshape(-1).to(torch.int64))

    def maximum_(self, counts: Tensor) -> None:
        """Raise the counts to ``(size,)`` others where those are larger; see `add_`."""
        self._set(torch.maximum(self.value(), counts.reshape(-1).to(torch.int64)))

    def value(self) -> Tensor:
        """Return the counts as a ``(size,)`` int64 tensor on the device.

        Before the all-reduce these are the counts of this rank, afterwards the sums over all ranks.
        """
        return (self._high.to(torch.int64) << _LIMB_BITS) + self._low.to(torch.int64)

    def _set(self, total: Tensor) -> None:
        # Move the carry to the high limb now: the low limbs of 16,384 ranks then sum to below 2**24.
        self._high.copy_(total >> _LIMB_BITS)
        self._low.copy_(total & _LIMB_MASK)


class FlatBuffers:
    """Flat parameters and gradients of one module.

    The module's parameters become views into the parameter buffers. They remain the same
    ``Parameter`` objects with the same values. Each gets an attribute ``main_grad``, a float32 view
    of its shape into the gradient buffer; see [Note: main_grad protocol]. A parameter that is used
    twice (tied weights) is stored once. Frozen parameters (``requires_grad`` False) are left
    unchanged.

    Create the buffers after the module is on its device and in its final dtype. A later
    ``module.to(...)`` would move the parameters out of the buffers; ``check_addresses`` detects
    that.

    Args:
        module: model; its trainable parameters must be on one device.
        extras: name -> number of float32 slots that are summed together with the gradients, e.g.
            for losses and flags.
        counters: name -> number of exact integer counters, for counts that may exceed 2**24 in one
            step.
        ownership: the share of the parameters that this rank updates; by default all. The ownership
            also determines whether weights of experts have separate buffer parts. See [Note:
            ownership].
        bucket_elements: approximate size of a bucket, in elements. See [Note: buckets].
        precision: dtypes of the gradients.
    Raises:
        ValueError: there is no trainable parameter, a dtype is not supported, the parameters are on
            several devices, or two parameters share memory.
    """

    def __init__(
        self,
        module: nn.Module,
        extras: Mapping[str, int] | None = None,
        counters: Mapping[str, int] | None = None,
        *,
        ownership: Ownership | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        precision: GradientPrecision = FULL_PRECISION,
    ) -> None:
        self.precision = precision
        self.ownership = ownership or Ownership()
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # `named_parameters` yields a tied weight once, so it is stored once and has one gradient.
        self.layout = flat_layout_of(module, self.ownership, bucket_elements, precision)
        self.parameters: Mapping[str, nn.Parameter] = MappingProxyType(
            {slot.name: trainable[slot.name] for slot in self.layout.slots}
        )
        self.device = _only_device(self.parameters)
        self.owns_all = all(self.owners(part).size == 1 for part in self.layout.parts)
        """True if this rank updates every parameter that it holds."""
        extras, counters = dict(extras or {}), dict(counters or {})
        sizes = _tail_sizes(extras, counters)
        tail = tail_elements(extras, counters)
        wide = any(part.dtype == torch.float64 for part in self.layout.parts)
        low, full = self.layout.low_numel, self.layout.numel - self.layout.low_numel
        self.storage = _aligned_zeros(
            full + tail, torch.float64 if wide else torch.float32, self.device
        )
        """Gradients, extras and counters in one buffer, so that one all-reduce sums all of them."""
        self.grads = self.storage[:full]
        """``(numel - low_numel,)`` float32: gradients, padding included, except those in bf16."""
        self.low_grads = _aligned_zeros(low, torch.bfloat16, self.device)
        """``(low_numel,)``: gradients in bf16. See [Note: gradients in bf16]."""
        views = _carve(self.storage[full:], sizes)
        self.extras: Mapping[str, Tensor] = MappingProxyType(
            {name: views[f"extras/{name}"] for name in extras}
        )
        """Name -> 1-D float32 view of the extra slots.

        Add values before the all-reduce. After the all-reduce the view holds sums over ranks.
        """
        self.counters: Mapping[str, ExactCounter] = MappingProxyType(
            {name: ExactCounter(views[f"counters/{name}"]) for name in counters}
        )
        self.params: Mapping[BufferPart, Tensor] = MappingProxyType(self._adopt_parameters())
        """Buffer part -> flat buffer of all its parameters."""
        self.gather: Gather | None = None
        """All-gather of parameters that overlaps with other work; None: gather without overlap."""
        # `check_addresses` compares these addresses later, because captured graphs use them.
        self._addresses = {name: p.data_ptr() for name, p in self.parameters.items()}
        attach_accumulation(self.parameters.values())

    def _adopt_parameters(self) -> dict[BufferPart, Tensor]:
        flat = {}
        for part in self.layout.parts:
            start, end = self.layout.span(part)
            flat[part] = _aligned_zeros(end - start, part.dtype, self.device)
        with torch.no_grad():
            for slot in self.layout.slots:
                parameter = self.parameters[slot.name]
                # Assign `.data` to preserve the Parameter object: optimizers, hooks and tied
                # modules refer to that object.
                view = self.param_view(slot, flat).view(slot.shape)
                view.copy_(parameter)
                parameter.data = view
                parameter.grad = None
                main_grad = self.gradients(slot.start, slot.end).view(slot.shape)
                parameter.main_grad = main_grad  # type: ignore[attr-defined]
        return flat

    def gradients(self, start: int, end: int) -> Tensor:
        """Return the gradients of elements ``[start, end)``, which must have one dtype, as a view."""
        low = self.layout.low_numel
        return self.low_grads[start:end] if end <= low else self.grads[start - low : end - low]

    def param_view(
        self, slot: ParamSlot, flat: Mapping[BufferPart, Tensor] | None = None
    ) -> Tensor:
        """Return a 1-D view of a parameter's elements in the flat buffer of its part."""
        offset = self.layout.span(slot.part)[0]
        return (self.params if flat is None else flat)[slot.part][
            slot.start - offset : slot.end - offset
        ]

    def zero_grad(self) -> None:
        """Set gradients, extras and counters to zero with one kernel; addresses do not change."""
        self.storage.zero_()
        if self.low_grads.numel():
            self.low_grads.zero_()

    def all_reduce(self, groups: ParallelGroups) -> None:
        """All-reduce gradients, extras and counters over the ranks with the same parameters.

        For one rank this is the identity.
        """
        if groups.world_size == 1:
            return
        all_reduce_gradients(self.storage, groups, self.layout.expert_numel)
        for bucket in self.layout.buckets:
            if bucket.part.low:
                wait_for(self.start_sum(bucket, groups))

    def reduce(self, groups: ParallelGroups) -> None:
        """Reduce gradients to the rank that owns them, and all-reduce extras and counters.

        If each rank owns all parameters, this is ``all_reduce``. Otherwise it is one reduce-scatter
        per bucket. Afterwards ``owned_grads`` hold sums and all other gradients are undefined. For
        one rank this is the identity.
        """
        if self.owns_all:
            # Every rank needs every sum, so a single all-reduce has the least latency.
            self.all_reduce(groups)
            return
        for bucket in self.layout.buckets:
            wait_for(self.start_sum(bucket, groups))
        # Use an all-reduce for the tail: it contains metrics, and every rank needs their sums.
        if self.tail.numel():
            all_reduce_sum(self.tail, groups.dp_cp.group)

    def start_sum(self, bucket: Bucket, groups: ParallelGroups) -> Started | None:
        """Start to sum the gradients of a bucket over the ranks with the same parameters.

        Under ZeRO-1 a rank needs only the sum of its own share, and a reduce-scatter moves half the
        bytes of an all-reduce. ``wait_for`` the result before the gradients are used. Sums in bf16
        are described in [Note: sums that are rounded once].
        """
        group = groups.expert_dp.group if bucket.part.expert else groups.dp_cp.group
        rounds_once = bucket.part.low and self.precision.rounds_once
        start = start_rounded_once if rounds_once else start_sum
        return start(self.bucket_grads(bucket), group, own_share=not self.owns_all)

    @property
    def tail(self) -> Tensor:
        """Extras and counters, which follow the gradients in ``storage``."""
        return self.storage[self.grads.numel() :]

    def bucket_grads(self, bucket: Bucket) -> Tensor:
        """Return a 1-D view of the gradients of ``bucket``."""
        return self.gradients(bucket.start, bucket.end)

    def bucket_params(self, bucket: Bucket) -> Tensor:
        """Return a 1-D view of the parameters of ``bucket``."""
        offset = self.layout.span(bucket.part)[0]
        return self.params[bucket.part][bucket.start - offset : bucket.end - offset]

    def owners(self, part: BufferPart) -> Ownership:
        """Return the ownership of ``part``: the ranks that each own a share of its buckets."""
        experts = self.ownership.experts
        return experts if part.expert and experts is not None else self.ownership

    def owned_span(self, bucket: Bucket) -> tuple[int, int]:
        """Return the range ``(start, end)`` of this rank's share of ``bucket``.

        Both numbers count elements of the gradient buffer; ``end`` is exclusive.
        """
        return self.layout.owned_span(bucket, self.owners(bucket.part).rank)

    def owned_ranges(self) -> list[FlatRange]:
        """Return the ranges that this rank owns; each range has one weight-decay rule."""
        experts = self.ownership.experts
        return self.layout.owned_ranges(self.ownership.rank, experts.rank if experts else 0)

    def owned_grads(self) -> list[tuple[BufferPart, Tensor]]:
        """Return the gradients that this rank owns, as ``(buffer part, 1-D view)`` pairs.

        The size of each view is a multiple of ``GRAIN_ELEMENTS``. Adjacent shares are merged into
        one view, also across dtypes; the pair then has the part of the first share. Gradients of
        experts and of other weights are never merged.
        """
        spans: list[tuple[BufferPart, int, int]] = []
        for bucket in self.layout.buckets:
            start, end = self.owned_span(bucket)
            alike = spans and spans[-1][0][1:] == bucket.part[1:]
            if alike and spans[-1][2] == start:
                part, start, _ = spans.pop()
            else:
                part = bucket.part
            spans.append((part, start, end))
        return [(part, self.gradients(start, end)) for part, start, end in spans]

    def owned_params(self, bucket: Bucket) -> Tensor:
        """Return a 1-D view of this rank's share of the parameters of ``bucket``."""
        start, end = self.owned_span(bucket)
        return self.bucket_params(bucket)[start - bucket.start : end - bucket.start]

    def gather_params(self) -> None:
        """All-gather all parameters from the ranks that own them.

        This is a collective call, and the identity if each rank owns all parameters. If ``gather``
        is set (``overlapped_collectives.py``), the call only starts the all-gather.
        """
        if self.gather is not None:
            self.gather.start()
            return
        if self.owns_all:
            return
        # Owned parameters are already at their final position in the bucket, so no staging buffer
        # is needed.
        for bucket in self.layout.buckets:
            all_gather_in_place(self.bucket_params(bucket), self.owners(bucket.part).group)

    def wait_params(self) -> None:
        """Wait until every parameter may be read and written.

        A stage of the model waits for its own parameters in its forward pass, without this call.
        """
        if self.gather is not None:
            self.gather.wait()

    def check_addresses(self) -> None:
        """Check on the host that no parameter has left its flat buffer.

        Raises:
            RuntimeError: a parameter has another address than at construction; the message names
                the first such parameter.
        """
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                raise RuntimeError(
                    f"parameter {name} is no longer in its flat buffer (module.to(), an assignment to .data, or a load "
                    "with assign=True after FlatBuffers was built); copy values in place: parameter.data.copy_(...)."
                )


def flat_layout_of(
    module: nn.Module,
    ownership: Ownership,
    bucket_elements: int = BUCKET_ELEMENTS,
    precision: GradientPrecision = FULL_PRECISION,
) -> FlatLayout:
    """Return the layout of the trainable parameters of ``module``, which may be on the meta device.

    Raises:
        ValueError: there is no trainable parameter, or a dtype is not supported.
    """
    experts = ownership.experts
    descriptions = (
        Described(
            name,
            tuple(p.shape),
            BufferPart(p.dtype, experts is not None and is_expert(p), precision.is_low(name, p)),
            not getattr(p, "no_weight_decay", False),
        )
        for name, p in module.named_parameters()
        if p.requires_grad
    )
    return FlatLayout.plan(
        descriptions, ownership.size, experts.size if experts else 1, bucket_elements
    )


def tail_elements(extras: Mapping[str, int], counters: Mapping[str, int]) -> int:
    """Return the number of elements after the gradients: extras and counters, rounded up."""
    return round_up(sum(_tail_sizes(extras, counters).values()), ALIGN_ELEMENTS)


def _tail_sizes(extras: Mapping[str, int], counters: Mapping[str, int]) -> dict[str, int]:
    sizes = {f"extras/{name}": size for name, size in extras.items()}
    return sizes | {f"counters/{name}": LIMBS * size for name, size in counters.items()}


def _aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose address is a multiple of 128 bytes.

    The CPU allocator guarantees an alignment of only 64 bytes.
    """
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
        raise ValueError(
            f"the parameters are on {len(devices)} devices ({places}); move the module to one device first."
        )
    for name, p in parameters.items():
        # Empty and meta tensors have no memory, so their addresses are not compared.
        if p.numel() and p.device.type != "meta":
            other = by_address.setdefault(p.data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} are different Parameter objects over the same memory; tie weights "
                    "by assigning the same Parameter to both modules."
                )
    return next(iter(devices))
