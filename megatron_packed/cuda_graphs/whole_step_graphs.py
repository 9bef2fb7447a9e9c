"""Graphs of whole steps: one graph for the work on a micro-batch, one graph for the end of the step.

A caller splits its step into functions: ``parts``, each called with a micro-batch, and ``finish``.
The functions read values that change from step to step from the device, and write their results to
memory that they own. For every capture size each part is captured as one graph, from the metadata to
the last addition of gradients. ``finish`` is captured as one more graph. So a step of k micro-batches,
of any capture sizes, is k + 1 replays. If a graph cannot be replayed, the same function is called.
A step of two micro-batches, of one of eight tensor-parallel shares of an 8 B model, takes 54.4 ms on
an H200. Eagerly it takes 178 ms, because the host queues 1,294 kernels instead of 10 graphs and
copies (2026-11-29).

[Note: memory of whole parts]
All graphs share one pool. A part returns nothing, so no memory of the pool is in use at the end of a
capture, and every graph may use the complete pool. So the graphs may be replayed in any order, and
the pool is as large as its largest graph needs.

[Note: nodes of parameters]
The gradient of a parameter is accumulated by an autograd node, on the stream that was current when
the node was created. The node lives as long as any tensor that was computed from the parameter with
gradients. A node from an eager step would run on the stream of eager steps, and the capture would
fail. So no tensor of an earlier forward pass may be alive when graphs are captured. An example is a
loss that was stored without ``detach()``. Reference cycles also hold such tensors, so ``gc.collect``
runs before a capture.
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
from megatron_packed.cuda_graphs.slots import AttributePlace, HostFactError, capture_size_of
from megatron_packed.cuda_graphs.step_graphs import (
    Audit,
    StepGraphs,
    StepPart,
    how_far,
)
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.micro_batch import MicroBatch, MicroBatchLayout
from megatron_packed.packed.params import NO_TABLES

_HOST_FACTS_OF_MICRO_BATCH = frozenset({"num_real_tokens", "num_target_tokens"})


class StaticMicroBatch(MicroBatch):
    """Micro-batch with which a part is captured: the slot's tensors, without numbers of one pack.

    Raises:
        HostFactError: a host number of one pack is read; a graph would repeat it for all packs.
    """

    def __getattribute__(self, name: str) -> object:
        if name in _HOST_FACTS_OF_MICRO_BATCH:
            raise HostFactError(name, "the micro-batch")
        return object.__getattribute__(self, name)


class FullIterationGraphs(StepGraphs):
    """Strategy with a graph for every part of a step and capture size, and a graph for the step's end.

    The strategy uses one slot. See [Note: memory of whole parts].

    Args:
        parts: name -> function of a micro-batch on the device. A part returns nothing and draws no
            random numbers. Every tensor that it uses is either allocated inside the part, or stays
            at the same address for the complete run. Kernels are tuned on the first part.
        finish: function that ends a step; the same rules apply.
        rehearsing: returns a context in which parts and ``finish`` may run on dummy micro-batches.
            At its end persistent tensors are restored and gradients are zero.
        places: returns the places of all tensors that parts and ``finish`` read or write. It is
            called after each capture.
        audited: name of a part -> function that returns name -> tensor for the tensors to which the
            part adds its results. Parts without an entry are not audited.
        reset: sets these tensors to zero.
        dtype: dtype of the computation; determines the allowed difference of gradients in an audit.
        options: other arguments of `StepGraphs`.
    Raises:
        ValueError: ``num_slots`` is not 1.
    """

    def __init__(
        self,
        parts: Mapping[str, StepPart],
        finish: Callable[[], object],
        *,
        rehearsing: Callable[[], AbstractContextManager[None]],
        places: Callable[[], Iterable[AttributePlace]],
        audited: Mapping[str, Callable[[], Mapping[str, Tensor]]] | None = None,
        reset: Callable[[], object] = lambda: None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        num_slots = options.get("num_slots", 1)
        if num_slots != 1:
            raise ValueError(
                f"num_slots ({num_slots}) must be 1 for graphs of whole steps, whose parts run forward and backward of "
                "one micro-batch; use LayerGraphs for several micro-batches in flight."
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
        """Capture size -> reason why it could not be captured."""
        self._graphs: dict[CaptureSize, dict[str, Graph]] = {}
        self._finish_graph: Graph | None = None

    # -- steps -------------------------------------------------------------------------------------

    def run(self, name: str, part: StepPart, micro_batch: MicroBatch) -> None:
        if not isinstance(micro_batch, MicroBatch):
            raise TypeError(reasons.not_a_micro_batch(micro_batch))
        if self._admit(micro_batch):
            self.replay(name, micro_batch)
        else:
            part(micro_batch.to(self.device, non_blocking=True))

    def replay(self, name: str, micro_batch: MicroBatch) -> None:
        """Copy ``micro_batch`` into the slot and replay the graph of a part.

        Graphs of the micro-batch's capture size must exist.
        """
        size = capture_size_of(micro_batch)
        self.slot.fill(micro_batch, size)
        self._graphs[size][name].replay()

    def finish_step(self, finish: Callable[[], object]) -> None:
        # If weights were reallocated, the captured end would update their old memory.
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
        """Compare replay and eager pass of every audited part, on ``micro_batch`` itself.

        The audit copies the tensors to which the parts add their results. ``seed`` is not used,
        because no random values are needed. See `StepGraphs.audit`.
        """
        if self.why_eager(micro_batch) is not None:
            return None
        names = [name for name in self._audited if name in self.parts]
        worst = 0.0
        for name in names:
            worst = max(worst, self._audit_part(name, micro_batch, deterministic))
        return Audit(
            compared=len(names),
            finding=f"whole steps ({', '.join(names)}) replay what they compute",
            largest_difference=worst,
        )

    def _audit_part(self, name: str, micro_batch: MicroBatch, deterministic: bool) -> float:
        """Return the largest difference between replay and eager pass of one part."""
        with self._rehearsing():
            return audit_part(
                name,
                lambda: self.parts[name](micro_batch.to(self.device)),
                lambda: self._replay_over_nonsense(name, micro_batch),
                self._audited[name](),
                self._reset,
                dtype=self._dtype,
                deterministic=deterministic,
            )

    def _replay_over_nonsense(self, name: str, micro_batch: MicroBatch) -> None:
        # If a replay reads bytes that the copy into the slot does not write, the replay must read
        # garbage, not correct values of an earlier micro-batch. Otherwise the audit would miss that
        # fault.
        self.slot.buffer.fill_(0xFF)
        self.replay(name, micro_batch)

    def _has_graphs(self, size: CaptureSize) -> bool:
        return size in self._graphs

    def _why_not_captured(self, size: CaptureSize) -> str | None:
        if size in self._refused:
            return f"{reasons.NO_GRAPHS_OF_SIZE} ({self._refused[size]})"
        return None if self._graphs else reasons.NO_GRAPHS

    def _used_places(self) -> Iterable[AttributePlace]:
        # Without graphs no address matters, and a reallocation must not make ranks capture again.
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
        """Capture the end of the step once, then the parts for each size, the largest size first.

        If the capture of the end fails, complete steps run eagerly. The graph of the end is
        replayed both after eager and after replayed parts, because both write their results to the
        same memory.
        """
        self._warm_up(make_dummy)
        if self._copies is not None:
            self._copies.prepare_for_capture()
        failure = self._try_finish()
        if failure is not None:
            self._refused = dict.fromkeys(self.capture_sizes.sizes, failure)
            self._refuse(f"no graphs, because the end of a step cannot be captured: {failure}")
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
            # No part was captured, and the graph of the end is useless without parts. Keep the
            # refusals, because `why_eager` reports them as reasons.
            self._reset_graphs()
            self.counters.memory_mib = 0.0

    def _warm_up(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Run each part once over each capture size, and the end of a step, eagerly.

        These passes allocate workspaces and connect communicators, which is impossible in a capture.
        """
        with self.backend.side_stream():
            for size in reversed(self.capture_sizes.sizes):
                for part in self.parts.values():
                    part(make_dummy(size).to(self.device))
            self._finish()

    def _try_finish(self) -> str | None:
        """Capture the end of a step; return the reason if this failed on any rank, else None."""
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
        """Capture all parts for a size; return the failed part and the reason if any rank failed."""
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
        """Capture a function; return ``(graph, None)``, or ``(None, reason)`` if the capture failed."""
        try:
            return self.backend.capture(lambda: _nothing(function()))[0], None
        except Exception as error:
            return None, error_in_capture(error)

    def _run_static(self, part: StepPart, size: CaptureSize) -> None:
        """Run ``part`` on the slot, and on tables computed from the slot; called under capture."""
        self.slot.set_tables(size, NO_TABLES)
        try:
            self.slot.set_tables(size, self.tables(self.slot.static(size)))
            part(self._static(size))
        finally:
            # The tables are in the pool, and the next graph uses their memory for other tensors.
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
            depth_scales=views["depth_scales"],
            num_real_tokens=0,
            num_target_tokens=0,
        )

    def _drop(self, graphs: Iterable[Graph | None]) -> None:
        for graph in graphs:
            if graph is not None:
                graph.reset()
        gc.collect()  # reference cycles may hold tensors of the graphs, whose memory must be freed
        if self._finish_graph is None:  # the pool is freed with its last graph
            self.backend.reset()


def _nothing(_: object) -> None:
    """Discard the result of a part, which would keep memory of the pool allocated."""
