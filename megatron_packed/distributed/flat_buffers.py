"""All parameters of a model in flat buffers at fixed addresses, with flat float32 gradients of the
same layout.

One buffer per part (a dtype) holds the parameters, one float32 buffer all gradients and, behind
them, named slots that ride on the same all-reduce. Addresses never change after construction, so
captured graphs stay valid, an optimizer step is a few kernels over whole slices, and data
parallelism is one collective. What lies where: ``zero1_layout.py``.

Of a module in float64 gradients, slots and optimizer state are float64 too: so layouts can be
compared closely.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_packed.distributed.collectives import all_gather_in_place
from megatron_packed.distributed.data_parallel_reduce import (
    all_reduce_gradients,
    attach_accumulation,
    reduce_scatter_gradients,
)
from megatron_packed.distributed.exact_counter import LIMBS, ExactCounter
from megatron_packed.distributed.groups import ParallelGroups
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


class Gather(Protocol):
    """Gathers parameters, in its own time."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


class FlatBuffers:
    """Flat parameters and gradients of one module.

    The module's parameters become views (same ``Parameter`` objects, same values) and get
    ``main_grad``, a float32 view of their shape; see [Note: main_grad protocol]. A parameter that
    is used twice (tied weights) has one place. Frozen parameters (``requires_grad`` False) are left
    alone. Create it after the module is on its device and in its final dtype: ``module.to(...)``
    afterwards would move the parameters out (``check_addresses`` tells).

    Args:
        module: its trainable parameters must share one device.
        extras: name -> number of float32 slots that ride on the gradient all-reduce (a sum):
        losses, flags.
        counters: name -> number of exact integer counters; use them for counts that may pass 2**24
        in one step.
        ownership: which share of the parameters this rank updates; by default all. Reads: [Note:
            ownership]. It also says whether weights of experts are apart.
        bucket_elements: of a bucket, about. Reads: [Note: buckets].
    Raises:
        ValueError: no trainable parameter, an unsupported dtype, several devices, two parameters
            sharing memory.
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
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # `named_parameters` names a tied weight once, so it gets one place and one gradient.
        self.layout = flat_layout_of(module, self.ownership, bucket_elements)
        self.parameters: Mapping[str, nn.Parameter] = MappingProxyType(
            {slot.name: trainable[slot.name] for slot in self.layout.slots}
        )
        self.device = _only_device(self.parameters)
        extras, counters = dict(extras or {}), dict(counters or {})
        sizes = _tail_sizes(extras, counters)
        tail = tail_elements(extras, counters)
        wide = any(part.dtype == torch.float64 for part in self.layout.parts)
        self.storage = _aligned_zeros(
            self.layout.numel + tail, torch.float64 if wide else torch.float32, self.device
        )
        """Gradients, extras and counters: what one all-reduce moves."""
        self.grads = self.storage[: self.layout.numel]
        """``(numel,)`` float32: all gradients, padding included."""
        views = _carve(self.storage[self.layout.numel :], sizes)
        self.extras: Mapping[str, Tensor] = MappingProxyType(
            {name: views[f"extras/{name}"] for name in extras}
        )
        """Name -> 1-D float32 view; add to it before the all-reduce, read the sum over ranks after
        it.
        """
        self.counters: Mapping[str, ExactCounter] = MappingProxyType(
            {name: ExactCounter(views[f"counters/{name}"]) for name in counters}
        )
        self.params: Mapping[BufferPart, Tensor] = MappingProxyType(self._adopt_parameters())
        """Buffer part -> flat buffer of all its parameters."""
        self.gather: Gather | None = None
        """Gathers parameters while other work goes on; None: at once."""
        # Compared later by `check_addresses`: captured graphs hold these addresses.
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
                # `.data`, so that the Parameter object stays: optimizers, hooks and tied modules
                # refer to it.
                view = self.param_view(slot, flat).view(slot.shape)
                view.copy_(parameter)
                parameter.data = view
                parameter.grad = None
                parameter.main_grad = self.grads[slot.start : slot.end].view(slot.shape)  # type: ignore[attr-defined]
        return flat

    def param_view(
        self, slot: ParamSlot, flat: Mapping[BufferPart, Tensor] | None = None
    ) -> Tensor:
        """1-D view of a parameter's elements in its part's flat buffer."""
        offset = self.layout.span(slot.part)[0]
        return (self.params if flat is None else flat)[slot.part][
            slot.start - offset : slot.end - offset
        ]

    def zero_grad(self) -> None:
        """Set gradients, extras and counters to zero: one kernel, same addresses."""
        self.storage.zero_()

    def all_reduce(self, groups: ParallelGroups) -> None:
        """Sum gradients, extras and counters over all ranks that hold the same parameters (identity
        for one rank).
        """
        all_reduce_gradients(self.storage, groups, self.layout.expert_numel)

    def reduce(self, groups: ParallelGroups) -> None:
        """Sum gradients where their owner reads them, extras and counters everywhere; the identity
        for one rank.

        For an only owner that is ``all_reduce``. Among several, ``owned_grads`` hold sums
        afterwards and no other gradient means anything.
        """
        if self.owns_all:
            # Every rank needs every sum, so one collective over everything has the least latency.
            self.all_reduce(groups)
            return
        spans = [
            (self.bucket_grads(bucket), self.owners(bucket.part).group)
            for bucket in self.layout.buckets
        ]
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

    def owners(self, part: BufferPart) -> Ownership:
        """The ranks that own shares of ``part``."""
        experts = self.ownership.experts
        return experts if part.expert and experts is not None else self.ownership

    @property
    def owns_all(self) -> bool:
        """True if this rank updates every parameter that it holds."""
        return all(self.owners(part).size == 1 for part in self.layout.parts)

    def owned_span(self, bucket: Bucket) -> tuple[int, int]:
        """First and last element of the gradient buffer that this rank owns of ``bucket``."""
        return self.layout.owned_span(bucket, self.owners(bucket.part).rank)

    def owned_ranges(self) -> list[FlatRange]:
        """Return the ranges that this rank owns, by weight-decay rule."""
        experts = self.ownership.experts
        return self.layout.owned_ranges(self.ownership.rank, experts.rank if experts else 0)

    def owned_grads(self) -> list[tuple[BufferPart, Tensor]]:
        """The gradients that this rank owns: views of multiples of ``GRAIN_ELEMENTS``, few, each
        with a part of it.

        What lies one behind the other is one view, but for weights of experts, which never share
        one with others.
        """
        spans: list[tuple[BufferPart, int, int]] = []
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
        """Fill all parameters with what their owners hold; a collective, the identity for an only
        owner.

        With a ``gather`` (``overlapped_collectives.py``) it only starts.
        """
        if self.gather is not None:
            self.gather.start()
            return
        # Owned parameters already lie in their place of the bucket: no staging buffer is needed.
        for bucket in self.layout.buckets:
            all_gather_in_place(self.bucket_params(bucket), self.owners(bucket.part).group)

    def wait_params(self) -> None:
        """Wait until every parameter may be read and written. Modules wait for their own when they
        are called.
        """
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


def flat_layout_of(
    module: nn.Module, ownership: Ownership, bucket_elements: int = BUCKET_ELEMENTS
) -> FlatLayout:
    """Return the layout of the trainable parameters of ``module``, which may be on the meta device.

    Raises:
        ValueError: no trainable parameter, or an unsupported dtype.
    """
    experts = ownership.experts
    described = (
        Described(
            name,
            tuple(p.shape),
            BufferPart(p.dtype, experts is not None and is_expert(p)),
            _has_decay(p),
        )
        for name, p in module.named_parameters()
        if p.requires_grad
    )
    return FlatLayout.plan(
        described, ownership.size, experts.size if experts else 1, bucket_elements
    )


def tail_elements(extras: Mapping[str, int], counters: Mapping[str, int]) -> int:
    """Elements behind the gradients: extras and counters, rounded up."""
    return round_up(sum(_tail_sizes(extras, counters).values()), ALIGN_ELEMENTS)


def _tail_sizes(extras: Mapping[str, int], counters: Mapping[str, int]) -> dict[str, int]:
    sizes = {f"extras/{name}": size for name, size in extras.items()}
    return sizes | {f"counters/{name}": LIMBS * size for name, size in counters.items()}


def _has_decay(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "no_weight_decay", False)


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
        raise ValueError(
            f"the parameters are on {len(devices)} devices ({places}); move the module to one first."
        )
    for name, p in parameters.items():
        # Empty and meta tensors have no memory, so equal addresses mean nothing there.
        if p.numel() and p.device.type != "meta":
            other = by_address.setdefault(p.data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} are different Parameter objects over the same memory; tie weights "
                    "by assigning the same Parameter to both modules."
                )
    return next(iter(devices))
