"""Graphs of whole steps: one graph of what is done with a micro-batch, one of what ends the step.

A caller cuts its step into functions that read what differs from step to step from the device and
leave their results in memory of their own: ``parts``, each given a micro-batch, and ``finish``. For
every capture size each part becomes one graph, from the metadata to the last addition, and
``finish`` becomes one: a step of k micro-batches, of whatever capture sizes, is k + 1 replays. What
cannot be replayed is the same function, called.

[Note: memory of whole parts]
All graphs share one pool. A part returns nothing, so nothing in the pool is alive at the end of a
capture, and every graph has all of the pool for itself. The graphs may be replayed in any order, and
hold together what the largest one needs.

[Note: nodes of parameters]
Autograd adds to a parameter's ``grad`` on the stream that was current when its node for that was
made. The node lives as long as anything that was computed from the parameter with gradients. A node
that was made before, on the stream of eager steps, would lead the capture to that stream, which
fails it. So nothing of a former forward pass may be alive when graphs are captured: neither a loss
that was kept without ``detach()``, nor what only a cycle of references keeps (hence ``gc.collect``).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_packed.cuda_graphs import fallback_reasons as reasons
from megatron_packed.cuda_graphs.audit import audit_part
from megatron_packed.cuda_graphs.capture_and_pool import Graph
from megatron_packed.cuda_graphs.fallback_reasons import ALL, Refusal, error_in_capture
from megatron_packed.cuda_graphs.slots import HostFactError, Place, capture_size_of
from megatron_packed.cuda_graphs.step_graphs import (
    Audit,
    Part,
    StepGraphs,
    how_far,
)
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.micro_batch import MicroBatch, MicroBatchLayout
from megatron_packed.packed.shared_tables import NO_TABLES

_HOST_FACTS_OF_MICRO_BATCH = frozenset({"num_real_tokens", "num_target_tokens"})


class StaticMicroBatch(MicroBatch):
    """Micro-batch that a part sees while it is captured: tensors of the slot, no fact of one pack.

    Raises:
        HostFactError: when a host fact of one pack is read; a graph would keep it for all packs.
    """

    def __getattribute__(self, name: str) -> object:
        if name in _HOST_FACTS_OF_MICRO_BATCH:
            raise HostFactError(name, "the micro-batch")
        return object.__getattribute__(self, name)


class FullIterationGraphs(StepGraphs):
    """A graph for every part of a step and capture size, and one for the end of a step; one slot.

    See [Note: memory of whole parts].

    Args:
        parts: name -> what to do with a micro-batch on the device. They return nothing, draw no
            random numbers, and touch no memory that comes and goes but their own. The first is the
            one that kernels are tuned on.
        finish: ends a step; the same rules.
        rehearsing: returns a context in which parts and ``finish`` may run on made-up
            micro-batches; everything that lasts is put back at the end, and gradients are zero.
        places: returns where the tensors are kept that parts and ``finish`` read or write. Called
            after each capture.
        audited: part -> a function that returns what the part adds to, by name. Other parts are not
            audited.
        reset: sets those tensors to zero.
        dtype: of the computation; decides how far gradients may differ in an audit.
        options: as for `StepGraphs`.
    Raises:
        ValueError: several slots.
    """

    captures_parts = True

    def __init__(
        self,
        parts: Mapping[str, Part],
        finish: Callable[[], object],
        *,
        rehearsing: Callable[[], AbstractContextManager[None]],
        places: Callable[[], Iterable[Place]],
        audited: Mapping[str, Callable[[], Mapping[str, Tensor]]] | None = None,
        reset: Callable[[], object] = lambda: None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        num_slots = options.get("num_slots", 1)
        if num_slots != 1:
            raise ValueError(
                f"num_slots ({num_slots}) must be 1 for graphs of whole steps, whose parts run forward and backward of "
                "one micro-batch; take LayerGraphs for several micro-batches in flight."
            )
        super().__init__(**options)
        self.parts = dict(parts)
        self._finish = finish
        self._rehearsing = rehearsing
        self._places = places
        self._audited = dict(audited or {})
        self._reset = reset
        self._dtype = dtype
        self._refused: dict[CaptureSize, str] = {}
        """Why a capture size is not captured."""
        self._graphs: dict[CaptureSize, dict[str, Graph]] = {}
        self._finish_graph: Graph | None = None

    # -- steps -------------------------------------------------------------------------------------

    def run(self, name: str, part: Part, micro_batch: MicroBatch) -> None:
        if self._admit(micro_batch):
            self.replay(name, micro_batch)
        else:
            part(micro_batch.to(self.device, non_blocking=True))

    def replay(self, name: str, micro_batch: MicroBatch) -> None:
        """Replay the graph of a part over ``micro_batch``, which must be one that can be replayed."""
        size = capture_size_of(micro_batch)
        self.slot.fill(micro_batch, size)
        self._graphs[size][name].replay()

    def finish_step(self, finish: Callable[[], object]) -> None:
        # The captured end would update weights where they no longer lie.
        if self._finish_graph is None or self.addresses_changed:
            finish()
        else:
            self._finish_graph.replay()

    # -- what is captured --------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return "whole steps"

    @property
    def refusals(self) -> list[Refusal]:
        return sorted(Refusal(size, ALL, reason) for size, reason in self._refused.items())

    def audit(self, micro_batch: MicroBatch, *, deterministic: bool, seed: int = 0) -> Audit | None:
        """Compare replay with eager for every audited part, on ``micro_batch`` itself.

        Holds copies of what the parts add to. ``seed`` is not used: no values are made up. See
        `StepGraphs.audit`.
        """
        if self.why_eager(micro_batch) is not None:
            return None
        names = [name for name in self._audited if name in self.parts]
        worst = 0.0
        for name in names:
            with self._rehearsing():
                difference = audit_part(
                    name,
                    lambda name=name: self.parts[name](micro_batch.to(self.device)),
                    lambda name=name: self._replay_over_nonsense(name, micro_batch),
                    self._audited[name](),
                    self._reset,
                    dtype=self._dtype,
                    deterministic=deterministic,
                )
            worst = max(worst, difference)
        return Audit(
            compared=len(names),
            finding=f"whole steps ({', '.join(names)}) replay what they compute",
            largest_difference=worst,
        )

    def _replay_over_nonsense(self, name: str, micro_batch: MicroBatch) -> None:
        # A replay that reads bytes which the fill did not write must not find the right ones.
        self.slot.buffer.fill_(0xFF)
        self.replay(name, micro_batch)

    def _has_graphs(self, size: CaptureSize) -> bool:
        return size in self._graphs

    def _why_not_captured(self, size: CaptureSize) -> str | None:
        if size in self._refused:
            return f"{reasons.NO_GRAPHS_OF_SIZE} ({self._refused[size]})"
        return None if self._graphs else reasons.NO_GRAPHS

    def _used_places(self) -> Iterable[Place]:
        # Without a graph nothing depends on an address, and a change must not make ranks recapture.
        return self._places() if self._graphs else ()

    def _release(self) -> None:
        self._refused.clear()
        self._reset_graphs()

    def _reset_graphs(self) -> None:
        for graphs in self._graphs.values():
            for graph in graphs.values():
                graph.reset()
        self._graphs.clear()
        if self._finish_graph is not None:
            self._finish_graph.reset()
        self._finish_graph = None
        self.backend.reset()

    # -- capture -----------------------------------------------------------------------------------

    def _rehearsal(self) -> AbstractContextManager[None]:
        return self._rehearsing()

    def _eager_pass(self, micro_batch: MicroBatch) -> object:
        return next(iter(self.parts.values()))(micro_batch)

    def _capture_all(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Capture the end of the step, then each size; without its end a step is eager as a whole.

        The end reads what eager and replayed parts alike have left, so it is captured first and once.
        """
        self._warm_up(make_dummy)
        if self._copies is not None:
            self._copies.prepare_for_capture()
        failure = self._try_finish()
        if failure is not None:
            self._refused = dict.fromkeys(self.capture_sizes.sizes, failure)
            self._refuse(f"no graphs, as the end of a step cannot be captured: {failure}")
            return
        first, count = time.perf_counter(), len(self.capture_sizes.sizes)
        for number, size in enumerate(reversed(self.capture_sizes.sizes), start=1):
            begun = time.perf_counter()
            self.slot.fill(make_dummy(size), size)
            failure = self._try_size(size)
            self.slot.vacate()
            self.counters.memory_mib = self.backend.memory_mib()
            if failure is None:
                seconds = time.perf_counter() - begun
                self._say(
                    f"captured whole steps for {self.capture_sizes.words(size)} in {seconds:.1f} s; "
                    f"graphs hold {self.counters.memory_mib:,.0f} MiB ({how_far(first, number, count)})"
                )
            else:
                self._refused[size] = failure
                self._refuse(f"no graphs for {self.capture_sizes.words(size)}: {failure}")
        if not self._graphs:
            # The end alone is of no use. Refusals stay, as the reasons of fallbacks.
            self._reset_graphs()
            self.counters.memory_mib = 0.0

    def _warm_up(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Run each part once over each capture size, and the end of a step.

        Workspaces are made and communicators connect, which a capture could not do.
        """
        with self.backend.side_stream():
            for size in reversed(self.capture_sizes.sizes):
                for part in self.parts.values():
                    part(make_dummy(size).to(self.device))
            self._finish()

    def _try_finish(self) -> str | None:
        """Capture the end of a step; return what failed on any rank, None if nothing did."""
        self._finish_graph, reason = self._try(self._finish)
        failure = self._failed_anywhere(reason)
        if failure is None:
            self.counters.captures += 1
            return None
        graph = self._finish_graph
        self._finish_graph = None
        self._drop([graph])
        return failure

    def _try_size(self, size: CaptureSize) -> str | None:
        """Capture all parts for a size; return what failed on any rank, None if nothing did."""
        graphs = self._graphs[size] = {}
        for name, part in self.parts.items():
            graph, reason = self._try(partial(self._run_static, part, size))
            if graph is not None:
                graphs[name] = graph
            failure = self._failed_anywhere(reason)
            if failure is not None:
                self._drop(self._graphs.pop(size).values())
                return f"{name}: {failure}"
        self.counters.captures += len(graphs)
        return None

    def _failed_anywhere(self, reason: str | None) -> str | None:
        return self._agree({} if reason is None else {ALL: reason}).get(ALL)

    def _try(self, function: Callable[[], object]) -> tuple[Graph | None, str | None]:
        """Capture a function; return its graph, or why there is none, out of memory included."""
        try:
            return self.backend.capture(lambda: _nothing(function()))[0], None
        except Exception as error:
            return None, error_in_capture(error)

    def _run_static(self, part: Part, size: CaptureSize) -> None:
        """Run ``part`` on the slot and on tables derived from it; all of it belongs to the capture."""
        self.slot.set_tables(size, NO_TABLES)
        try:
            self.slot.set_tables(size, self.tables(self.slot.static(size)))
            part(self._static(size))
        finally:
            # The tables lie in the pool, which the next graph uses for something else.
            self.slot.set_tables(size, NO_TABLES)

    def _static(self, size: CaptureSize) -> MicroBatch:
        layout = MicroBatchLayout(self.slot.total_tokens, size.capacity)
        buffer = self.slot.bytes_of(size)
        views = layout.buffer.views(buffer)
        return StaticMicroBatch(
            buffer=buffer,
            layout=layout,
            tokens=views["tokens"],
            labels=views["labels"],
            loss_mask=views["loss_mask"],
            packed=self.slot.static(size),
            scales=views["scales"],
            num_real_tokens=0,
            num_target_tokens=0,
        )

    def _drop(self, graphs: Iterable[Graph | None]) -> None:
        for graph in graphs:
            if graph is not None:
                graph.reset()
        gc.collect()  # a graph's memory is free only when no cycle of references keeps a tensor of it
        if self._finish_graph is None:  # a pool does not outlive its last graph
            self.backend.reset()


def _nothing(_: object) -> None:
    """Drop what a part returns: it would keep memory of the pool alive."""
