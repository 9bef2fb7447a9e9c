"""Memory of a micro-batch: one forward and backward pass of the rank's model on the meta device.

The model itself allocates, saves and frees, with its recomputation and offload, as on a GPU. Kernels
are replaced by their stand-ins on the meta device (`ops.on_meta`), which say what kernels save and
which workspaces they need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.layers.linear import main_grad_of
from megatron_packed.models.estimate.live_memory import LiveMemory, Peak, RunningPart
from megatron_packed.models.estimate.unit_memory import (
    UnitMemory,
    measure_unit,
    replay,
    size_signatures,
)
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.backend_dispatch import planned
from megatron_packed.packed.micro_batch import MicroBatch

KnownUnits = dict[Any, UnitMemory]
"""Layers and sizes -> memory of a unit. Configurations that are compared have units in common."""
POOL = "graphs"
"""Pool of the captured layers."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the packs that a rank's layers process.

    Args:
        tokens: slots of a pack.
        documents: capacity in documents of a pack.
        even: True counts the rows of experts for balanced routing. False counts the largest
            possible number. It matters only if the number of rows depends on the routing.
    """

    tokens: int
    documents: int
    even: bool = True


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one forward and backward pass."""

    eager: Peak
    """Peak of the memory outside of the pool of graphs."""
    pool: Peak
    """Peak of the memory of captured layers."""
    hidden: int
    """Bytes of the hidden state between layers."""
    host: int
    """Bytes of pinned host memory."""


class MetaStep:
    """Forward and backward pass of one pack on the meta device.

    Args:
        model: this rank's model on the meta device. It gets gradient buffers.
        work: sizes of the pack.
        known_units: units that were measured before; new units are added.
    """

    def __init__(
        self, model: HybridModel, work: Work, known_units: KnownUnits | None = None
    ) -> None:
        import_meta_operations()
        for layer in model.moe_layers:
            layer.mixer.dispatcher.even_on_meta = work.even
        if model.offload is not None:
            model.offload.buffer_count.now = model.offload.buffer_count.most
        if all(main_grad_of(parameter) is None for parameter in model.parameters()):
            FlatBuffers(model)
        # The documents of the pack do not matter.
        document = np.zeros(model.cp.attention_partition.alignment, dtype=np.int64), None
        pack = MicroBatch.build([document], work.tokens, capacity=work.documents).to("meta")
        packed = model.prepare(pack.packed)
        self._model = model
        self._work = work
        self._known: KnownUnits = {} if known_units is None else known_units
        self._pack = replace(pack, packed=packed)
        parameters = list(model.parameters())
        gradients = map(main_grad_of, parameters)
        tables = [pack.buffer, *packed.tables.tensors()]
        held = [*parameters, *model.buffers(), *gradients, *tables]
        self._held = [tensor for tensor in held if tensor is not None]

    def run(self, captured: Collection[int] = ()) -> StepMemory:
        """Run the pass, and return the memory that it needs.

        Args:
            captured: numbers of the layers whose memory is in the pool of graphs.
        """
        model, live = self._model, LiveMemory(self._held)
        # The copies of an offload run beside other layers, so its layers are not measured alone.
        layers = _Layers(model, live, captured, self.units() if model.offload is None else {})
        live.place = RunningPart("the embedding")
        with planned(torch.device("cuda")), layers.watched(), live:
            model.forward_backward(self._pack)
        return StepMemory(
            eager=live.peak(),
            pool=live.peak(POOL),
            hidden=layers.hidden,
            host=0 if model.offload is None else model.offload.pool.num_bytes,
        )

    def units(
        self, counter: Callable[[Sequence[Tensor]], LiveMemory] = LiveMemory
    ) -> Mapping[int, UnitMemory]:
        """Measure each unit of layers alone, and equal units once; return first layer -> memory.

        Args:
            counter: returns a counter that ignores some tensors.
        """
        model, packed = self._model, self._pack.packed
        shape = (model.own_rows(packed.position_ids, packed).shape[0], model.config.hidden_size)
        depths = range(model.config.mtp_depths + 1)
        units = [u for d in depths for u in units_of(model, model.config.layers_of_depth(d))]
        # Describe all layers before the first runs, because modules may count their calls.
        keys = size_signatures([model.layers[number] for number in unit] for unit in units)
        sizes = (shape, model.dtype, self._work, *size_signatures([packed]))
        memory_of_units: dict[int, UnitMemory] = {}
        with planned(torch.device("cuda")):
            for unit, key in zip(units, keys, strict=True):
                if (memory := self._known.get((key, sizes))) is None:
                    run = partial(model.layers.forward, packed=packed, numbers=unit)
                    memory = measure_unit(run, shape, counter(self._held), model.dtype)
                    self._known[key, sizes] = memory
                memory_of_units[unit[0]] = memory
        return memory_of_units


@cache
def import_meta_operations() -> None:
    """Run operations on the meta device, for which PyTorch imports modules at their first call.

    The frames of an import stay in cycles of references. They would keep tensors of a model, which
    would count as memory.
    """
    x = torch.empty(1, device="meta", requires_grad=True)
    torch.autograd.grad((x + x).sum(), x)


def units_of(model: HybridModel, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield units of consecutive layers: those that are recomputed together, else single layers."""
    size = model.memory.layers_per_unit
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


class _Layers:
    """Layers of a model, between which the place of `LiveMemory` changes.

    Args:
        model: the model.
        live: counter of live memory.
        captured: numbers of the layers whose memory is in the pool of graphs.
        measured: first layer of a unit -> memory of the unit; other units run.
    """

    def __init__(
        self,
        model: HybridModel,
        live: LiveMemory,
        captured: Collection[int],
        measured: Mapping[int, UnitMemory],
    ) -> None:
        self._model = model
        self._live = live
        self._measured = measured
        self._places = [
            RunningPart(f"layers.{number}", POOL if number in captured else "")
            for number in range(len(model.layers))
        ]
        self._forward: Any = model.layers.forward
        self.hidden = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace the forward of the layers by `_run`."""
        layers: Any = self._model.layers
        wrapped = vars(layers).get("forward")
        layers.forward = self._run
        try:
            yield
        finally:
            if wrapped is None:
                del layers.forward
            else:
                layers.forward = wrapped

    def _run(
        self, hidden: Tensor, packed: Any, numbers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Run one unit of layers after the other."""
        reports: list[Any] = []
        self.hidden = hidden.nbytes
        chosen = range(len(self._places)) if numbers is None else numbers
        for unit in units_of(self._model, chosen):
            hidden = self._move_to(self._places[unit[0]], hidden)
            memory = self._measured.get(unit[0])
            if memory is None:
                hidden, unit_reports = self._forward(hidden, packed, unit)
                self._live.keep_received()
            else:
                hidden, unit_reports = replay(memory, hidden, self._live)
            reports += unit_reports
        return self._move_to(RunningPart("the loss"), hidden), reports

    def _move_to(self, place: RunningPart, hidden: Tensor) -> Tensor:
        """Set the place in forward; the backward pass sets the place before it again."""
        previous_place = self._live.place
        self._live.place = place
        moved: Tensor = _Border.apply(hidden, self._live, previous_place)  # type: ignore[no-untyped-call]
        return moved


class _Border(torch.autograd.Function):
    """Identity; its backward pass says which part of the model comes next."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, live: LiveMemory, previous_place: RunningPart) -> Tensor:
        ctx.live = live
        ctx.before = previous_place
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.live.place = ctx.before
        return gradient, None, None
