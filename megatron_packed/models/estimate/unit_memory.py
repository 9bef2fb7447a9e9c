# mypy: disable-error-code="no-untyped-call"
"""Memory of a unit of layers, which is measured once and repeated for equal units.

A unit is a layer, or consecutive layers that are recomputed together. A deep model has few different
units. So a unit runs once alone, and in a step `replay` stands for each unit that is equal to it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.collectives import planned_exchanges
from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.models.estimate.live_memory import Amounts, LiveMemory, Peak
from megatron_packed.models.estimate.traced_work import Calls
from megatron_packed.torch_private import TreeSpec, tree_flatten, tree_unflatten

UnitRun = Callable[[Tensor], tuple[Tensor, list[Any]]]
"""Runs a unit on a hidden state; returns the hidden state after it, and the reports of its layers."""


@dataclass(frozen=True, kw_only=True)
class UnitMemory:
    """Memory of a unit, relative to the memory before its forward and its backward pass."""

    forward: Amounts
    """Largest additional memory of the forward pass."""
    forward_op: str
    """Op that needs it; empty if there is none."""
    saved: Amounts
    """Memory that the unit leaves for its backward pass, without its input and its results."""
    saves_input: bool
    backward: Amounts
    """Largest additional memory of the backward pass; the gradient of the result lives before it."""
    backward_op: str
    reports: Sequence[Tensor]
    structure: TreeSpec
    """Tensors of the reports, and their structure."""
    calls: Calls
    """Kernels and exchanges of the unit -> number of calls."""


def measure_unit(
    run: UnitRun, hidden: Sequence[int], live: LiveMemory, dtype: torch.dtype
) -> UnitMemory:
    """Run a unit forward and backward, and return its memory.

    Args:
        run: runs the unit.
        hidden: shape of the hidden state.
        live: counter of memory; it counts nothing else.
        dtype: dtype of the hidden state.
    """
    borders = _Borders(live)
    anchor = torch.empty(0, device="meta", requires_grad=True)
    with planned_exchanges() as exchanges, live:
        x: Tensor = _Begin.apply(anchor, tuple(hidden), dtype, borders)
        input_bytes, reference = x.nbytes, weakref.ref(x.untyped_storage())
        start = live.amounts()
        live.forget_peaks()
        y, unit_reports = run(x)
        live.keep_received()
        peak = live.peak()
        del x
        saves_input = reference() is not None
        saved = _difference(live.amounts(), start)
        reports, structure = tree_flatten(unit_reports)
        results = y.nbytes + sum(report.nbytes for report in reports)
        saved[Purpose.ACTIVATIONS] += (0 if saves_input else input_bytes) - results
        end: Tensor = _End.apply(borders, y, *reports)
        shapes = [report.detach() for report in reports]
        needed = [report.requires_grad for report in reports]
        del y, unit_reports, reports
        end.backward()
    return UnitMemory(
        forward=_difference(peak.amounts, start),
        forward_op=peak.op,
        saved=saved,
        saves_input=saves_input,
        backward=_difference(borders.peak.amounts, borders.entry),
        backward_op=borders.peak.op,
        reports=[shape.requires_grad_(needs) for shape, needs in zip(shapes, needed, strict=True)],
        structure=structure,
        calls=live.work.calls + Counter(exchanges),
    )


def _difference(amounts: Amounts, start: Amounts) -> Counter[Purpose]:
    result = Counter(amounts)
    result.subtract(start)
    return result


class _Borders:
    """Live memory at the beginning of a backward pass, and the peak of this pass."""

    def __init__(self, live: LiveMemory) -> None:
        self.live = live
        self.entry: Amounts = {}
        self.peak = Peak(where="", amounts={})


class _Begin(torch.autograd.Function):
    """Input of a unit; its backward pass is the end of the unit's."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, shape: Sequence[int], dtype: torch.dtype, borders: _Borders
    ) -> Tensor:
        ctx.borders = borders
        with counted_as(Purpose.ACTIVATIONS):
            return anchor.new_empty(shape, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.borders.peak = ctx.borders.live.peak()
        return None, None, None, None


class _End(torch.autograd.Function):
    """Scalar of the results of a unit; its backward pass makes their gradients."""

    @staticmethod
    def forward(ctx: Any, borders: _Borders, *results: Tensor) -> Tensor:
        ctx.borders = borders
        ctx.like = [(x.shape, x.dtype) for x in results]
        return results[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            gradient.new_empty(shape, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        live = ctx.borders.live
        ctx.borders.entry = live.amounts()
        live.forget_peaks()
        live.note()
        return None, *gradients


def replay(unit: UnitMemory, hidden: Tensor, live: LiveMemory) -> tuple[Tensor, list[Any]]:
    """Return a result of the unit, and let its memory live until its backward pass."""
    result, *reports = _ReplayedUnit.apply(hidden, unit, live)
    return result, tree_unflatten(reports, unit.structure)


class _ReplayedUnit(torch.autograd.Function):
    """Autograd function of `replay`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, unit: UnitMemory, live: LiveMemory) -> tuple[Tensor, ...]:
        live.note(unit.forward, unit.forward_op)
        live.work.calls.update(unit.calls)
        live.add(unit.saved, live.place.pool)
        if unit.saves_input:
            ctx.save_for_backward(hidden)
        ctx.unit = unit
        ctx.live = live
        ctx.set_materialize_grads(False)
        reports = [torch.empty_like(report) for report in unit.reports]
        pairs = zip(reports, unit.reports, strict=True)
        ctx.mark_non_differentiable(*(new for new, like in pairs if not like.requires_grad))
        return torch.empty_like(hidden), *reports

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None]:
        # Saved tensors are unpacked and freed as in any backward pass.
        saved, live, unit = ctx.saved_tensors, ctx.live, ctx.unit
        live.note(unit.backward, unit.backward_op)
        live.add({purpose: -number for purpose, number in unit.saved.items()}, live.place.pool)
        del saved
        return torch.empty_like(gradient), None, None


def size_signatures(values: Iterable[Any]) -> list[Any]:
    """Return the `size_signature` of each value; objects that several values share are described once."""
    shared: dict[int, Any] = {}
    return [size_signature(value, {}, shared) for value in values]


def size_signature(value: Any, described_objects: dict[int, int], shared: dict[int, Any]) -> object:
    """Return a description that is equal for layers that need equal memory.

    Modules and other objects of this package are described by their attributes, tensors by their
    shapes and whether they need a gradient. Every other object is equal to itself only, so the description holds it.

    Args:
        value: any object.
        described_objects: objects of the same layer that were described before, which may refer to each other.
        shared: descriptions of objects, for example of the configuration.
    """
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device | Enum):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    describe = partial(size_signature, described_objects=described_objects, shared=shared)
    if isinstance(value, dict):
        return tuple((key, describe(inner)) for key, inner in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(map(describe, value))
    if isinstance(value, tuple | list):
        return tuple(map(describe, value))
    if isinstance(value, partial):
        return describe((value.func, value.args, value.keywords))
    if isinstance(value, nn.Module) or type(value).__module__.startswith("megatron_packed"):
        if id(value) in shared:
            return shared[id(value)]
        if id(value) in described_objects:
            return "seen", described_objects[id(value)]
        described_objects[id(value)] = len(described_objects)
        description = type(value), describe(_attributes(value))
        if not isinstance(value, nn.Module):
            shared[id(value)] = description
        return description
    if isinstance(getattr(value, "__self__", None), nn.Module):
        return value.__name__, describe(value.__self__)
    return _Itself(value)


class _Itself:
    """Object that is equal to itself only."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots; seeds choose values, not sizes."""
    slots = getattr(type(value), "__slots__", ())
    attributes = dict(getattr(value, "__dict__", {}))
    attributes |= {name: getattr(value, name, None) for name in slots if name != "__weakref__"}
    return {
        name: inner
        for name, inner in attributes.items()
        if name not in _OF_EVERY_MODULE and not name.endswith("seed")
    }


_OF_EVERY_MODULE = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
"""Attributes of modules that say nothing about sizes."""
