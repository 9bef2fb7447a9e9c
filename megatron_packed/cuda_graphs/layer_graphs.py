"""Graphs of layers: the capture of single modules for all capture sizes, and their replay.

A captured module stays in the model, and only its ``forward`` is replaced (`replaced_forward.py`).
So the model's code does not change. A micro-batch beyond the largest capture size runs eagerly with
identical results. A module whose capture fails runs eagerly between captured modules.

A micro-batch of one of eight tensor-parallel shares of an 8 B model takes 26.8 ms on an H200, and
107 ms eagerly: the host queues 102 graphs and kernels instead of 677 kernels (2026-11-21).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.cuda_graphs import fallback_reasons as reasons
from megatron_packed.cuda_graphs.audit import audit_module
from megatron_packed.cuda_graphs.fallback_reasons import ALL, Refusal
from megatron_packed.cuda_graphs.replaced_forward import GraphedForward, check_apart
from megatron_packed.cuda_graphs.slot_graphs import Planned, SlotGraphs
from megatron_packed.cuda_graphs.slots import (
    AttributePlace,
    Slot,
    SlotPackedSeqParams,
    capture_size_of,
    values_restored,
)
from megatron_packed.cuda_graphs.step_graphs import (
    Audit,
    StepGraphs,
    StepPart,
    how_far,
)
from megatron_packed.cuda_graphs.transformer_engine import Maker
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import NO_TABLES, PackedSeqParams


class _Observed(NamedTuple):
    """Modules that ran in the warm-up of a capture size."""

    planned: list[Planned]
    problems: dict[str, str]
    """Name of a module, or `ALL` -> reason why it cannot be captured."""


class LayerGraphs(StepGraphs):
    """Strategy with a forward graph and a backward graph for every module, capture size and slot.

    Args:
        modules: name -> module. A module is called with hidden states and the pack's metadata, or
            with hidden states only. Trainable parameters must have ``main_grad``. A module must not
            draw random numbers (dropout), because a graph would replay the same numbers.
        forward_backward: runs forward and backward of one micro-batch on the device, as in
            training. Warm-ups call this function.
        own_rows: from a tensor with one entry per token, returns the entries of those rows of the
            hidden states that are on this rank.
        made_by: TransformerEngine's capture function; if given, it captures modules instead of the
            backend.
        passes_wait: passes of the modules contain collectives, so ranks wait for each other in them.
        options: other arguments of `StepGraphs`.
    Raises:
        ValueError: a module already has graphs or is a part of another module of ``modules``; or
            ``num_slots`` is 0; or ``num_slots`` is 2 or more and ``copies`` are given.
        TypeError: ``modules`` is not a mapping of names to modules.
    """

    tunes_in_capture = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        forward_backward: StepPart,
        *,
        own_rows: Callable[[Tensor, PackedSeqParams], Tensor] = lambda x_T, packed: x_T,
        made_by: Maker | None = None,
        passes_wait: bool = False,
        **options: Any,
    ) -> None:
        check_apart(modules)
        num_slots, copies = options.get("num_slots", 1), options.get("copies")
        if num_slots < 1:
            raise ValueError(f"num_slots ({num_slots}) must be 1 or more.")
        if num_slots > 1 and copies is not None:
            raise ValueError(
                f"num_slots ({num_slots}) must be 1 if graphs copy tensors to the host, because slots "
                "would share the host buffers."
            )
        super().__init__(**options)
        self.forward_backward = forward_backward
        self.own_rows = own_rows
        # Each slot has a separate pool. Graphs of two micro-batches in flight are replayed in any
        # order, but graphs of one pool are safe only in the order of their capture.
        backends = [self.backend, *(self.backend.another() for _ in range(num_slots - 1))]
        self.graphs = {
            slot: SlotGraphs(slot, backend, made_by, passes_wait, copies)
            for slot, backend in zip(self.slots.slots, backends)
        }
        self._passes_wait = passes_wait
        self._calls: list[GraphedForward] = []
        self.modules = [
            GraphedForward(
                name,
                module,
                self.slots,
                self.backend,
                self.counters,
                strict=self.strict,
                calls=self._calls,
            )
            for name, module in modules.items()
        ]
        if self.off_reason is not None and self.device.type == "cpu":
            for module in self.modules:
                module.check_first_call(self._say)

    # -- steps -------------------------------------------------------------------------------------

    def run(self, name: str, part: StepPart, micro_batch: MicroBatch) -> None:
        part(self.place(micro_batch))

    def place(self, micro_batch: MicroBatch) -> MicroBatch:
        """Copy ``micro_batch`` to the device: into a slot if graphs can replay it, else to new memory.

        The returned micro-batch is valid until its slot is filled again. A slot whose micro-batch is
        in flight is used only if there is no other slot. The returned micro-batch may be placed
        again as long as its slot holds it.

        Raises:
            GraphFallbackError: ``strict`` is set, and the micro-batch would run eagerly.
            StaleMetadataError: ``micro_batch`` was in a slot that now holds another micro-batch.
            TypeError: ``micro_batch`` is not a `MicroBatch`.
        """
        if not isinstance(micro_batch, MicroBatch):
            raise TypeError(reasons.not_a_micro_batch(micro_batch))
        if isinstance(micro_batch.packed, SlotPackedSeqParams):
            micro_batch.packed.check_current("buffer")
        if self._admit(micro_batch):
            return self.fill(micro_batch, capture_size_of(micro_batch))
        # This micro-batch runs eagerly. Without `leave`, captured modules called without metadata
        # would treat its calls as calls of the previously placed micro-batch.
        self.slots.leave()
        return micro_batch.to(self.device, non_blocking=True)

    def fill(self, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Copy ``micro_batch`` into the next slot with graphs of ``size``, and compute its tables."""
        slot = self.slots.choose(lambda slot: size in self.graphs[slot].tables)
        return self.fill_slot(slot, micro_batch, size)

    def fill_slot(self, slot: Slot, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Copy ``micro_batch`` into ``slot``, and compute its tables by a replay of their graph."""
        placed = self.slots.fill(slot, micro_batch, size)
        self.graphs[slot].tables[size].replay()
        return placed

    # -- what is captured --------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return f"{len(self.modules)} modules"

    @property
    def refusals(self) -> list[Refusal]:
        return sorted(
            Refusal(size, module.name, reason)
            for module in self.modules
            for size, reason in module.refusals.items()
        )

    def close(self) -> None:
        """Free the graphs, and restore the original ``forward`` of all modules."""
        super().close()
        for module in self.modules:
            module.remove()
        self.modules = []

    def audit(self, micro_batch: MicroBatch, *, deterministic: bool, seed: int = 0) -> Audit | None:
        """Compare replay and eager pass of every module captured for the size of ``micro_batch``.

        Each module runs on random hidden states from ``seed``. See `StepGraphs.audit`.
        """
        size = capture_size_of(micro_batch)
        if self.why_eager(micro_batch) is not None:
            return None
        fresh = micro_batch.with_buffer(micro_batch.buffer.to(self.device, copy=True)).packed
        fresh = fresh.with_tables(self.tables(fresh))
        # Select the middle document. A pack without documents selects its tail, so that this rank
        # runs the same passes, with the same collectives, as other ranks.
        own_rows = self.own_rows(fresh.seq_idx[0] == fresh.num_seqs // 2, fresh)
        worst, count = 0.0, 0
        audited: set[str] = set()
        for slot in self.slots.slots:
            # If a replay reads bytes that the copy into the slot does not write, the replay must
            # read garbage, not correct values of an earlier micro-batch. Otherwise the audit would
            # miss that fault.
            slot.buffer.fill_(0xFF)
            self.fill_slot(slot, micro_batch, size)
            try:
                for module in self.modules:
                    captured = module.in_slot(slot).get(size)
                    if captured is None:
                        continue
                    count += 1
                    audited.add(module.name)
                    generator = torch.Generator(self.device).manual_seed(seed * 1000 + count)
                    difference = audit_module(
                        module, captured, fresh, own_rows, generator, deterministic
                    )
                    worst = max(worst, difference)
            finally:
                slot.vacate()
        in_slots = f" in each of {len(self.graphs)} slots" if len(self.graphs) > 1 else ""
        return Audit(
            compared=count,
            finding=f"{len(audited)} modules replay what they compute{in_slots}",
            largest_difference=worst,
        )

    def _has_graphs(self, size: CaptureSize) -> bool:
        # The first slot decides: a size that cannot be captured there is not tried in the other
        # slots.
        return size in self.graphs[self.slot].tables

    def _why_not_captured(self, size: CaptureSize) -> str | None:
        if not self.graphs[self.slot].tables:
            return reasons.NO_GRAPHS
        return reasons.NO_GRAPHS_OF_SIZE if size in self.capture_sizes.sizes else None

    def _used_places(self) -> Iterator[AttributePlace]:
        for module in self.modules:
            if module.captured:
                for part in module.module.modules():
                    for tensors in (part._parameters, part._buffers):
                        yield from ((tensors, name) for name in tensors)
                yield from ((vars(weight), "main_grad") for weight in module.parameters)

    def _release(self) -> None:
        self.slots.returned = {}
        for graphs in self.graphs.values():
            graphs.forget()
        for module in self.modules:
            module.refusals.clear()

    # -- capture -----------------------------------------------------------------------------------

    def _rehearsal(self) -> AbstractContextManager[None]:
        return values_restored(
            buffer for module in self.modules for buffer in module.module.buffers()
        )

    def _eager_pass(self, micro_batch: MicroBatch) -> object:
        return self.forward_backward(micro_batch)

    def _capture_all(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        # All warm-ups run before the first capture, because an eager pass may not fit in device
        # memory together with the graphs.
        dummies = {size: make_dummy(size) for size in reversed(self.capture_sizes.sizes)}
        begun, plans = time.perf_counter(), {}
        for size, dummy in dummies.items():
            plans[size] = self._warm_up(dummy, size)
            self._say_tuned(size, begun, len(plans))
        if self._copies is not None:
            self._copies.prepare_for_capture()
        begun, count = time.perf_counter(), len(self.graphs) * len(plans)
        for number, (graphs, size) in enumerate(product(self.graphs.values(), plans), start=1):
            graphs.slot.fill(dummies[size], size)
            sentence = self._capture_for(graphs, size, plans[size])
            self._say(f"{sentence} ({how_far(begun, number, count)})")
        # With one slot all hidden states belong to its micro-batch, and no table is needed.
        if len(self.graphs) > 1:
            self.slots.returned = {
                address: slot
                for slot, graphs in self.graphs.items()
                for address in graphs.addresses()
            }

    def _capture_for(self, graphs: SlotGraphs, size: CaptureSize, observed: _Observed) -> str:
        """Capture one size in one slot, without modules that fail on any rank; return a summary."""
        begun = time.perf_counter()
        self._refuse_together(size, observed.problems)
        while planned := [plan for plan in observed.planned if size not in plan.module.refusals]:
            if not any(
                self._refuse_together(size, failed)
                for failed in graphs.capture_stages(size, planned, self.tables)
            ):
                self.counters.captures += 1 + 2 * len(planned)
                break
            # Graphs of neighbouring modules share memory. When one module is refused, all graphs of
            # this size are dropped and captured again without that module.
            graphs.drop_size(size)
        self.counters.memory_mib = sum(
            graphs.backend.memory_mib() for graphs in self.graphs.values()
        )
        where = f" in slot {self.slots.slots.index(graphs.slot)}" if len(self.graphs) > 1 else ""
        return (
            f"captured {len(planned)} of {len(self.modules)} modules for {self.capture_sizes.words(size)}{where} in "
            f"{time.perf_counter() - begun:.1f} s; graphs hold {self.counters.memory_mib:,.0f} MiB"
        )

    def _refuse_together(self, size: CaptureSize, failed: dict[str, str]) -> bool:
        """Exchange failures between ranks and refuse them on all ranks; return True if any failed.

        Args:
            failed: name of a module or `ALL` -> reason, for this rank's failures.
        Raises:
            GraphFallbackError: a module failed and ``strict`` is set; raised on all ranks.
        """
        together = self._agree(failed)
        for name, reason in together.items():
            modules = [
                module
                for module in self.modules
                if name in (ALL, module.name) and size not in module.refusals
            ]
            # True if the module was already reported with this reason, for a larger size.
            said = name != ALL and any(reason in module.refusals.values() for module in modules)
            for module in modules:
                module.refusals[size] = reason
            what = "no module" if name == ALL else f"{name} not"
            if modules:
                sentence = f"{what} captured for {self.capture_sizes.words(size)}: {reason}"
                self._refuse(sentence, said=said)
        return bool(together)

    def _warm_up(self, dummy: MicroBatch, size: CaptureSize) -> _Observed:
        """Run eager passes on the capture stream, and observe the calls of modules in the last pass.

        The passes tune kernels and allocate workspaces. At least one is needed for the observation.

        Raises:
            torch.OutOfMemoryError: a pass ran out of memory, and other ranks wait in its collectives.
        """
        try:
            with self.backend.side_stream():
                for passes_left in reversed(range(max(self._warmup_steps, 1))):
                    # Drop the tables of the previous pass, so that they are computed again from the
                    # metadata.
                    self.slot.set_tables(size, NO_TABLES)
                    packed = self.slot.fill(dummy, size).packed
                    self.slot.set_tables(size, self.tables(packed))
                    for module in self.modules:
                        module.mode = "bypass" if passes_left else "observe"
                    # Fill the slot again, because only this puts the new tables into the slot's metadata.
                    self.forward_backward(self.slot.fill(dummy, size))
                return self._observed()
        except torch.OutOfMemoryError as error:
            if self._passes_wait:
                raise
            reason = reasons.no_memory_in_warm_up(error)
        finally:
            # Observations hold tensors of the warm-up and must be dropped to free their memory. The
            # modes are reset also after an error.
            self.slot.vacate()
            self.slot.set_tables(size, NO_TABLES)
            self._calls.clear()
            for module in self.modules:
                module.mode = "replay"
                module.observed = None
                module.problem = None
        return _Observed([], {ALL: reason})

    def _observed(self) -> _Observed:
        """Return the modules to capture, in the order of the last warm-up pass; drop its tensors."""
        planned: list[Planned] = []
        previous: GraphedForward | None = None
        # A module that ran twice has a problem by now. ``dict.fromkeys`` lists each module once, at the
        # position of its first call.
        for module in dict.fromkeys(self._calls):
            observation = module.observed
            if module.problem is None and observation is not None:
                observed = None if previous is None else previous.observed
                follows = observed is not None and observation.hidden is observed.output
                hidden = torch.empty_like(observation.hidden, device="meta", requires_grad=False)
                planned.append(
                    Planned(module, previous if follows else None, hidden, observation.takes_packed)
                )
                previous = module
        problems = {
            module.name: module.problem for module in self.modules if module.problem is not None
        }
        for module in self.modules:
            module.observed = None  # frees tensors before the warm-up's memory is returned
        self._calls.clear()
        return _Observed(planned, problems)
