"""Replay or eager: which modules are captured for which capture sizes, and where each micro-batch
runs.

A captured module keeps its place in the model (`graphed_module`). So a model runs as it is written,
a micro-batch beyond the largest capture size runs eagerly with identical results, and a module
whose capture fails is eager among captured ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs.backend import CudaGraphBackend, GraphBackend
from megatron_packed.cuda_graphs.captured_module import kept
from megatron_packed.cuda_graphs.copies import Copies
from megatron_packed.cuda_graphs.counters import GraphCounters, GraphFallbackError
from megatron_packed.cuda_graphs.graphed_module import GraphedModule
from megatron_packed.cuda_graphs.places import MOVED, Places
from megatron_packed.cuda_graphs.progress import how_far, say_tuned
from megatron_packed.cuda_graphs.slot_graphs import ALL, Planned, SlotGraphs, Tables
from megatron_packed.cuda_graphs.slots import Slot, SlotPackedSeqParams, SlotRing
from megatron_packed.cuda_graphs.transformer_engine import Maker
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import NO_TABLES


class Refusal(NamedTuple):
    """A module that is not captured for a capture size."""

    capture_size: CaptureSize
    module: str


class _Observed(NamedTuple):
    """What the warm-up of a capture size has seen."""

    planned: list[Planned]
    problems: dict[str, str]
    """Module, or `ALL` -> why it cannot be captured."""


class LayerGraphs:
    """All graphs of a model.

    [Note: captures that ranks agree on]
    Modules may hold collectives, and a capture may have eager passes of its own
    (TransformerEngine's has). So ranks capture together: the same capture sizes with the same
    modules, and behind each step that may fail they tell each other what has. What one rank cannot
    capture none does. A capture computes nothing and waits for nobody, so a rank that fails in the
    middle of one leaves nobody waiting. One that fails in an eager pass does; that it finds no
    memory there ends the run, as it would in a step.

    Args:
        modules: name -> module. Each takes hidden states, and either the pack's metadata or nothing
            else. Trainable parameters must have ``main_grad``. No module may draw random numbers
            (dropout): a graph would replay the same ones.
        total_tokens: token slots T of every micro-batch.
        capture_sizes: sizes to capture, each a graph or several.
        device: of the modules.
        tables: what all modules share and derive from a pack's metadata once; by name. Captured as
        a graph of its own.
        check: host checks of a micro-batch's metadata that ``tables`` cannot make inside a graph.
        own_rows: of what has one entry for each slot, those of the rows that hidden states have on
        this rank.
        copies: what modules queue on other streams by themselves; for one slot.
        backend: captures; by default torch's CUDA graphs.
        made_by: TransformerEngine's capture, to be used for modules in the place of the backend's.
        num_slots: micro-batches between whose forward and backward another one's may come. Each
            slot has graphs and memory of its own.
        warmup_steps: eager passes before each capture size's capture.
        strict: any fallback is an error.
        agree: what some rank that captures together cannot capture, module (or `ALL`) -> why, from
            what this one cannot; a collective.
        passes_wait: ranks wait for each other in passes of the modules.
        say: takes progress, a sentence at a time.
    Raises:
        ValueError: a module has graphs already, or is a part of another one; or there is no slot.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        total_tokens: int,
        capture_sizes: CaptureSizes,
        device: torch.device,
        tables: Tables = lambda packed: NO_TABLES,
        check: Callable[[PackedSeqParams], None] = lambda packed: None,
        own_rows: Callable[[Tensor, PackedSeqParams], Tensor] = lambda x_T, packed: x_T,
        copies: Copies | None = None,
        backend: GraphBackend | None = None,
        made_by: Maker | None = None,
        num_slots: int = 1,
        warmup_steps: int = 3,
        strict: bool = False,
        agree: Callable[[dict[str, str]], dict[str, str]] = lambda failed: failed,
        passes_wait: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        _check_apart(modules)
        self.capture_sizes, self.device, self.strict = capture_sizes, device, strict
        self.backend: GraphBackend = CudaGraphBackend(device) if backend is None else backend
        if num_slots < 1:
            raise ValueError(f"num_slots ({num_slots}) must be 1 or more.")
        if num_slots > 1 and copies is not None:
            raise ValueError(
                f"num_slots ({num_slots}) must be 1 where graphs copy to the host: slots would share it."
            )
        self.slots = SlotRing(
            [Slot(total_tokens, capture_sizes.largest, device) for _ in range(num_slots)]
        )
        backends = [self.backend, *(self.backend.another() for _ in range(num_slots - 1))]
        self.graphs = {
            slot: SlotGraphs(slot, backend, made_by, passes_wait=passes_wait, copies=copies)
            for slot, backend in zip(self.slots.slots, backends)
        }
        self.counters = GraphCounters()
        self._calls: list[GraphedModule] = []
        self.modules = [
            GraphedModule(
                name,
                module,
                self.slots,
                self.backend,
                self.counters,
                strict=strict,
                calls=self._calls,
            )
            for name, module in modules.items()
        ]
        self.tables, self.own_rows, self._check, self._say = tables, own_rows, check, say
        self._warmup_steps, self._agree, self._passes_wait = (
            max(warmup_steps, 1),
            agree,
            passes_wait,
        )
        self._copies = copies
        self._bypassed: str | None = None
        """Why nothing is replayed at the moment, though it could be."""
        self._used_by_graphs = Places()

    def tune(
        self,
        driver: Callable[[MicroBatch], object],
        make_dummy: Callable[[CaptureSize], MicroBatch],
    ) -> None:
        """Eager passes over every capture size: kernels are compiled and tuned. Gives up earlier
        graphs; arguments and what is left behind are those of `capture`.

        Where ranks need not wait for each other in a pass, one may go first and the others find its
        kernels.
        """
        started = time.perf_counter()
        self.forget()
        with self._keeping_buffers(), self.backend.side_stream():
            for number, size in enumerate(reversed(self.capture_sizes.sizes), start=1):
                for _ in range(self._warmup_steps):
                    driver(make_dummy(size).to(self.device))
                say_tuned(self._say, size.capacity, started, number, len(self.capture_sizes.sizes))
        self.counters.capture_seconds += time.perf_counter() - started

    def capture(
        self,
        driver: Callable[[MicroBatch], object],
        make_dummy: Callable[[CaptureSize], MicroBatch],
    ) -> None:
        """Capture every capture size, the largest first; all ranks together. Call it between steps:
        gradients hold garbage afterwards, all else is as before.

        Reads: [Note: captures that ranks agree on].

        Args:
            driver: forward and backward of one micro-batch, as in training.
            make_dummy: a host micro-batch that fills a capture size; for tuning kernels it should
            look like real ones.
        Raises:
            GraphFallbackError: ``strict``, and something could not be captured.
        """
        started = time.perf_counter()
        self.forget()
        try:
            with self._keeping_buffers():
                self._capture_all(driver, make_dummy)
        except BaseException:  # what is half captured must not be replayed
            self.forget()
            raise
        self.slots.vacate()
        self.counters.capture_seconds += time.perf_counter() - started
        captured = [module for module in self.modules if module.captured]
        parts = [part for module in captured for part in module.module.modules()]
        places = [place for part in parts for place in (part._parameters, part._buffers)]
        gradients = (
            (vars(weight), "main_grad") for module in captured for weight in module.parameters
        )
        self._used_by_graphs = Places(
            [*((place, name) for place in places for name in place), *gradients]
        )
        if len(self.graphs) > 1:
            self.slots.returned = {
                address: slot
                for slot, graphs in self.graphs.items()
                for address in graphs.addresses()
            }

    @property
    def slot(self) -> Slot:
        """The first slot, which is the only one in training."""
        return self.slots.slots[0]

    def place(self, micro_batch: MicroBatch) -> MicroBatch:
        """``micro_batch`` on the device, in one copy: in a slot where graphs can replay it, else
        beside them.

        It belongs to its slot until the slot is filled again, which comes to slots with a
        micro-batch in flight last.

        Raises:
            GraphFallbackError: ``strict``, and it would run eagerly.
            StaleMetadataError: it lay in a slot, where another one lies now.
        """
        if isinstance(micro_batch.packed, SlotPackedSeqParams):
            micro_batch.packed.check_current("buffer")
        size = CaptureSize(micro_batch.layout.capacity, micro_batch.packed.max_seqlen)
        reason = self.why_eager(micro_batch, size)
        if reason is None:
            self._check(micro_batch.packed)
            self.counters.replays += 1
            return self.fill(micro_batch, size)
        too_many = self._bypassed is None and size.capacity > self.capture_sizes.largest
        self.counters.fall_back(reason, strict=self.strict, too_many=too_many)
        self.slots.leave()
        return micro_batch.to(self.device, non_blocking=True)

    def fill(self, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """``micro_batch`` in a slot, with its tables; it must be one that can be replayed."""
        return self.fill_slot(
            self.slots.choose(lambda slot: size in self.graphs[slot].tables), micro_batch, size
        )

    def fill_slot(self, slot: Slot, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """``micro_batch`` in this slot, with its tables."""
        placed = self.slots.fill(slot, micro_batch, size)
        self.graphs[slot].tables[size].replay()
        return placed

    @property
    def refusals(self) -> list[Refusal]:
        """What could not be captured, and for which capture sizes."""
        return sorted(
            Refusal(size, module.name) for module in self.modules for size in module.refusals
        )

    @property
    def moved(self) -> bool:
        """Whether a captured parameter, its gradient or a buffer has left the address that graphs
        use; then `capture` again.
        """
        return self._used_by_graphs.moved

    def forget(self) -> None:
        """Give up all graphs and their memory; everything runs eagerly until the next capture."""
        self.slots.vacate()
        self.slots.returned = {}
        for graphs in self.graphs.values():
            graphs.forget()
        for module in self.modules:
            module.refusals.clear()
        self._used_by_graphs = Places()
        self.counters.memory_mib = 0.0

    def close(self) -> None:
        """Give up the graphs and give the modules back; before the process group is destroyed, or
        exit hangs.
        """
        self.forget()
        for module in self.modules:
            module.remove()
        self.modules = []

    @contextmanager
    def bypassed(self, reason: str) -> Iterator[None]:
        """Inside, every micro-batch runs eagerly: what it needs is not what was captured."""
        self._bypassed = reason
        try:
            yield
        finally:
            self._bypassed = None

    def why_eager(self, micro_batch: MicroBatch, size: CaptureSize) -> str | None:
        """Why a micro-batch would not be replayed; None if it would."""
        if self._bypassed is not None:
            return self._bypassed
        tables = self.graphs[
            self.slot
        ].tables  # what could not be captured here was not tried in another slot
        if size in tables:
            if micro_batch.layout.total_tokens != self.slot.total_tokens:
                return f"another size than {self.slot.total_tokens} tokens"
            return MOVED if self.moved else None
        if micro_batch.packed.num_seqs > self.capture_sizes.largest:
            return f"more than {self.capture_sizes.largest} documents"
        if size.capacity > self.capture_sizes.largest:
            return f"more than {self.capture_sizes.largest} documents on another rank, whose graphs share collectives"
        if not tables:
            return "no graphs"
        return (
            "no graphs for its capacity"
            if size in self.capture_sizes.sizes
            else "padded to a size for which no graph was captured"
        )

    def _keeping_buffers(self) -> AbstractContextManager[None]:
        return kept(buffer for module in self.modules for buffer in module.module.buffers())

    def _capture_all(
        self,
        driver: Callable[[MicroBatch], object],
        make_dummy: Callable[[CaptureSize], MicroBatch],
    ) -> None:
        # All warm-ups before all captures: an eager pass has no room beside the memory of graphs.
        dummies = {size: make_dummy(size) for size in reversed(self.capture_sizes.sizes)}
        begun, plans = time.perf_counter(), {}
        for size, dummy in dummies.items():
            plans[size] = self._warm_up(driver, dummy, size)
            say_tuned(self._say, size.capacity, begun, len(plans), len(dummies))
        if self._copies is not None:
            self._copies.prepare_for_capture()
        begun, count = time.perf_counter(), len(self.graphs) * len(plans)
        for number, (graphs, size) in enumerate(product(self.graphs.values(), plans), start=1):
            graphs.slot.fill(dummies[size], size)
            sentence = self._capture_for(graphs, size, plans[size])
            self._say(f"{sentence} ({how_far(begun, number, count)})")

    def _capture_for(self, graphs: SlotGraphs, size: CaptureSize, observed: _Observed) -> str:
        """Capture one capture size in one slot, without the modules that turn out impossible on any
        rank; what came of it.
        """
        begun = time.perf_counter()
        self._refuse_together(size, observed.problems)
        while planned := [one for one in observed.planned if size not in one.module.refusals]:
            if not any(
                self._refuse_together(size, failed)
                for failed in graphs.steps(size, planned, self.tables)
            ):
                self.counters.captures += 1 + 2 * len(planned)
                break
            graphs.drop_size(size)
        self.counters.memory_mib = sum(
            graphs.backend.memory_mib() for graphs in self.graphs.values()
        )
        where = f" in slot {self.slots.slots.index(graphs.slot)}" if len(self.graphs) > 1 else ""
        return (
            f"captured {len(planned)} of {len(self.modules)} modules for up to {size.capacity} documents{where} in "
            f"{time.perf_counter() - begun:.1f} s; graphs hold {self.counters.memory_mib:,.0f} MiB"
        )

    def _refuse_together(self, size: CaptureSize, failed: dict[str, str]) -> bool:
        """Whether something has failed on some rank; what it is, all refuse from here on.

        Args:
            failed: module or `ALL` -> why, of this rank.
        Raises:
            GraphFallbackError: ``strict``, on all ranks.
        """
        together = self._agree(failed)
        for name, reason in together.items():
            modules = [
                one for one in self.modules if name in (ALL, one.name) and size not in one.refusals
            ]
            said = name != ALL and any(
                reason in one.refusals.values() for one in modules
            )  # of a larger capture size
            for module in modules:
                module.refusals[size] = reason
            what = "no module" if name == ALL else f"{name} not"
            sentence = f"{what} captured for up to {size.capacity} documents: {reason}"
            if modules and self.strict:
                raise GraphFallbackError(
                    f"{sentence}; {flags.CUDA_GRAPH_STRICT} forbids running it eagerly."
                )
            if modules and not said:
                self._say(f"{sentence}; it runs eagerly")
        return bool(together)

    def _warm_up(
        self, driver: Callable[[MicroBatch], object], dummy: MicroBatch, size: CaptureSize
    ) -> _Observed:
        """Eager passes on the stream of the captures: kernels are tuned, workspaces made, and calls
        are observed.

        Raises:
            torch.OutOfMemoryError: while other ranks wait for this one.
        """
        try:
            with self.backend.side_stream():
                for number in range(self._warmup_steps):
                    # What is derived must not come from what was derived before.
                    self.slot.set_tables(size, NO_TABLES)
                    packed = self.slot.fill(dummy, size).packed
                    self.slot.set_tables(size, self.tables(packed))
                    for module in self.modules:
                        module.mode = "observe" if number == self._warmup_steps - 1 else "bypass"
                    driver(self.slot.fill(dummy, size))  # once more, with its tables
                return self._observed()
        except torch.OutOfMemoryError as error:
            if self._passes_wait:
                raise
            reason = f"warm-up found no memory: {error}".splitlines()[0]
        finally:
            self.slot.vacate()
            self.slot.set_tables(size, NO_TABLES)
            self._calls.clear()
            for module in self.modules:
                module.mode, module.observed, module.problem = "replay", None, None
        return _Observed([], {ALL: reason})

    def _observed(self) -> _Observed:
        """What can be captured, in the order of the calls in the last warm-up; keeps none of its
        tensors.
        """
        planned: list[Planned] = []
        before: GraphedModule | None = None
        for module in dict.fromkeys(self._calls):
            found = module.observed
            if module.problem is None and found is not None:
                observed = None if before is None else before.observed
                source = (
                    before if observed is not None and found.hidden is observed.output else None
                )
                hidden = torch.empty_like(found.hidden, device="meta", requires_grad=False)
                planned.append(Planned(module, source, hidden, found.takes_packed))
                before = module
        problems = {
            module.name: module.problem for module in self.modules if module.problem is not None
        }
        for module in self.modules:
            module.observed = None  # before the warm-up's memory goes back
        self._calls.clear()
        return _Observed(planned, problems)


def _check_apart(modules: Mapping[str, nn.Module]) -> None:
    """
    Raises:
        ValueError: a module has graphs already, or is a part of another one.
    """
    names = {id(module): name for name, module in modules.items()}
    for name, module in modules.items():
        if isinstance(module.forward, GraphedModule):
            raise ValueError(f"{name} has the graphs of another runner; close that one first.")
        for part in module.modules():
            other = names.get(id(part), name)
            if other != name:
                raise ValueError(f"{other} is (a part of) {name}; capture one of the two.")
