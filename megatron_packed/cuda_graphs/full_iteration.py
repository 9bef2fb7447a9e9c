"""Whole parts of a training step in graphs: what is done with one micro-batch, and what ends the
step.

A caller cuts its step into functions that read what differs from step to step from the device and
leave their results in memory of their own: ``parts``, each given a micro-batch, and ``finish``. For
every capture size each part becomes one graph, from the metadata to the last addition, and
``finish`` becomes one: a step of k micro-batches, of whatever capture sizes, is k + 1 replays. What
cannot be replayed is the same function, called.

[Note: memory of whole parts]
All graphs share one pool. A part returns nothing, so at the end of each capture the pool holds
nothing that lives, and every graph has all of it for itself: they may be replayed in any order, and
hold together what the largest one needs.

[Note: nodes of parameters]
Autograd adds to a parameter's ``grad`` on the stream that was current when its node for that was
made, and the node lives as long as anything that was computed from the parameter with gradients.
One that was made before, on the stream of eager steps, would take the capture there, which fails
it. So nothing of a former forward pass may be alive when graphs are captured: neither a loss that
was kept without ``detach()``, nor what only a cycle of references keeps.

[Note: captures of several ranks]
Parts may hold collectives. A rank cannot capture one alone, nor replay one that another rank calls
as a function (NCCL asks for one way on all ranks). So ranks capture together, after a warm-up that
they also run together, and what one cannot capture none keeps. Which way a micro-batch goes must be
alike on all ranks that share a collective of its part; its size and what it says of itself decide
that, so it can be read off the plan.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs.backend import CudaGraphBackend, Graph, GraphBackend
from megatron_packed.cuda_graphs.copies import Copies
from megatron_packed.cuda_graphs.counters import GraphCounters, GraphFallbackError
from megatron_packed.cuda_graphs.places import MOVED, Place, Places
from megatron_packed.cuda_graphs.progress import how_far, say_tuned
from megatron_packed.cuda_graphs.slots import HostFactError, Slot
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch, MicroBatchLayout
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import NO_TABLES, SharedTables

_OF_ONE_PACK = frozenset({"num_real_tokens", "num_target_tokens"})


class StaticMicroBatch(MicroBatch):
    """What a part sees while it is captured: the slot's tensors, and no number that only one pack
    has.

    Raises:
        HostFactError: when a host fact of one pack is read; a graph would keep it for all packs.
    """

    def __getattribute__(self, name: str) -> object:
        if name in _OF_ONE_PACK:
            raise HostFactError(name, "the micro-batch")
        return object.__getattribute__(self, name)


class FullIterationGraphs:
    """Graphs of all parts of a step, over one slot.

    Use: `tune`, in turns of ranks that need not wait for each other; `capture`, all ranks together;
    then, for each step, `run` for every micro-batch and `finish`. Until the first capture and after
    `forget` all runs eagerly.

    Args:
        parts: name -> what to do with a micro-batch on the device. They return nothing, draw no
            random numbers, and touch no memory that comes and goes but their own. The first is the
            one that kernels are tuned on.
        finish: ends a step; the same rules.
        rehearsing: inside, parts and ``finish`` may run on made-up micro-batches, and everything
            that lasts is put back at the end.
        places: where the tensors are kept that they read or write: a mapping and a name in it.
        Asked at each capture.
        total_tokens: token slots T of every micro-batch.
        capture_sizes: sizes to capture, each a graph or several.
        device: of the tensors.
        copies: what parts queue on other streams by themselves; each part waits for its own.
        tables: what a part would else derive from a pack's metadata with the help of the host; by
        name.
        check: host checks of a micro-batch's metadata that ``tables`` cannot make inside a graph.
        backend: captures; by default torch's CUDA graphs.
        warmup_steps: eager passes before each capture size's capture.
        strict: any micro-batch that runs eagerly is an error.
        agree: what failed on some rank that captures together, from what failed on this one; a
        collective.
        say: takes progress, a sentence at a time.
    """

    def __init__(
        self,
        parts: Mapping[str, Callable[[MicroBatch], object]],
        finish: Callable[[], object],
        *,
        rehearsing: Callable[[], AbstractContextManager[None]],
        places: Callable[[], Iterable[Place]],
        total_tokens: int,
        capture_sizes: CaptureSizes,
        device: torch.device,
        tables: Callable[[PackedSeqParams], SharedTables] = lambda packed: NO_TABLES,
        check: Callable[[PackedSeqParams], None] = lambda packed: None,
        copies: Copies | None = None,
        backend: GraphBackend | None = None,
        warmup_steps: int = 3,
        strict: bool = False,
        agree: Callable[[str | None], str | None] = lambda failed: failed,
        say: Callable[[str], None] = print,
    ) -> None:
        self.parts, self._finish = dict(parts), finish
        self.capture_sizes, self.device, self.strict = capture_sizes, device, strict
        self.backend: GraphBackend = CudaGraphBackend(device) if backend is None else backend
        self.slot = Slot(total_tokens, capture_sizes.largest, device)
        self.counters = GraphCounters()
        self.refusals: dict[CaptureSize, str] = {}
        """Why a capture size is not captured."""
        self._rehearsing, self._places, self._copies = rehearsing, places, copies
        self._tables, self._check, self._agree, self._say = tables, check, agree, say
        self._warmup_steps = max(warmup_steps, 1)
        self._graphs: dict[CaptureSize, dict[str, Graph]] = {}
        self._finish_graph: Graph | None = None
        self._bypassed: str | None = None
        """Why nothing is replayed at the moment, though it could be."""
        self._used = Places()

    # -------------------------------------------------------------------------------------------------------
    # capture

    def tune(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Eager passes of the first part over every capture size: kernels are compiled and tuned.
        Gives up earlier graphs.

        Args:
            make_dummy: a host micro-batch that fills a capture size; for tuning kernels it should
                look like real ones.
        """
        begun = time.perf_counter()
        self.forget()
        part = next(iter(self.parts.values()))
        gc.collect()  # See [Note: nodes of parameters].
        with self._rehearsing(), self.backend.side_stream():
            for number, size in enumerate(reversed(self.capture_sizes.sizes), start=1):
                for _ in range(self._warmup_steps):
                    part(make_dummy(size).to(self.device))
                say_tuned(self._say, size.capacity, begun, number, len(self.capture_sizes.sizes))
        self.counters.capture_seconds += time.perf_counter() - begun

    def capture(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Capture everything, the largest capture size first; between steps, all ranks together,
        behind `tune`.

        Reads: [Note: captures of several ranks].

        Raises:
            GraphFallbackError: ``strict``, and something could not be captured.
        """
        begun = time.perf_counter()
        self.forget()
        self.refusals.clear()
        gc.collect()  # See [Note: nodes of parameters].
        try:
            with self._rehearsing():
                self._warm_up(make_dummy)
                if self._copies is not None:
                    self._copies.prepare_for_capture()
                self._capture_all(make_dummy)
        except BaseException:  # what is half captured must not be replayed
            self.forget()
            raise
        self.counters.capture_seconds += time.perf_counter() - begun
        self._used = Places(self._places())

    def _warm_up(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Each part once over each capture size, and the end: workspaces are made, and
        communicators connect.
        """
        with self.backend.side_stream():
            for size in reversed(self.capture_sizes.sizes):
                for part in self.parts.values():
                    part(make_dummy(size).to(self.device))
            self._finish()

    def _capture_all(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        failure = self._try_finish()
        if failure is not None:
            for size in self.capture_sizes.sizes:
                self.refusals[size] = failure
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
                self._say(
                    f"captured whole steps for up to {size.capacity} documents in {time.perf_counter() - begun:.1f} s; "
                    f"graphs hold {self.counters.memory_mib:,.0f} MiB ({how_far(first, number, count)})"
                )
            else:
                self.refusals[size] = failure
                self._refuse(f"no graphs for up to {size.capacity} documents: {failure}")
        if not self._graphs:
            self.forget()

    def _try_finish(self) -> str | None:
        """What failed on this or another rank; None if nothing did."""
        self._finish_graph, reason = self._try(self._finish)
        failure = self._agree(reason)
        if failure is None:
            self.counters.captures += 1
            return None
        graph, self._finish_graph = self._finish_graph, None
        self._drop([graph])
        return failure

    def _try_size(self, size: CaptureSize) -> str | None:
        graphs = self._graphs[size] = {}
        for name, part in self.parts.items():
            graph, reason = self._try(partial(self._run_static, part, size))
            if graph is not None:
                graphs[name] = graph
            failure = self._agree(reason)
            if failure is not None:
                self._drop(self._graphs.pop(size).values())
                return f"{name}: {failure}"
        self.counters.captures += len(graphs)
        return None

    def _try(self, function: Callable[[], object]) -> tuple[Graph | None, str | None]:
        """The graph, or why there is none: whatever goes wrong under capture, out of memory
        included.
        """
        try:
            return self.backend.capture(lambda: _nothing(function()))[0], None
        except Exception as error:
            text = str(error).strip().splitlines()
            return None, f"{type(error).__name__}: {text[0] if text else ''}"

    def _run_static(self, part: Callable[[MicroBatch], object], size: CaptureSize) -> None:
        """``part`` on what lies in the slot, with what is derived from it; all of it belongs to the
        capture.
        """
        self.slot.set_tables(size, NO_TABLES)
        try:
            self.slot.set_tables(size, self._tables(self.slot.static(size)))
            part(self._static(size))
        finally:
            self.slot.set_tables(size, NO_TABLES)

    def _static(self, size: CaptureSize) -> MicroBatch:
        layout, buffer = (
            MicroBatchLayout(self.slot.total_tokens, size.capacity),
            self.slot.bytes_of(size),
        )
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
        gc.collect()
        if self._finish_graph is None:  # a pool does not outlive its last graph
            self.backend.reset()

    def _refuse(self, sentence: str) -> None:
        if self.strict:
            raise GraphFallbackError(
                f"{sentence}; {flags.CUDA_GRAPH_STRICT} forbids running it eagerly."
            )
        self._say(f"{sentence}; it runs eagerly")

    # ---------------------------------------------------------------------------------------------------------
    # steps

    def run(self, name: str, micro_batch: MicroBatch) -> None:
        """A part for one micro-batch, in one copy and one replay where that is right.

        Args:
            micro_batch: on the device or pinned on the host.
        Raises:
            GraphFallbackError: ``strict``, and it would run eagerly.
        """
        size = capture_size_of(micro_batch)
        reason = self.why_eager(micro_batch)
        if reason is None:
            self._check(micro_batch.packed)
            self.counters.replays += 1
            self.replay(name, micro_batch, size)
            return
        too_many = self._bypassed is None and size.capacity > self.capture_sizes.largest
        self.counters.fall_back(reason, strict=self.strict, too_many=too_many)
        self.parts[name](micro_batch.to(self.device, non_blocking=True))

    def replay(self, name: str, micro_batch: MicroBatch, size: CaptureSize) -> None:
        """The graph of a part over ``micro_batch``, which must be one that can be replayed."""
        self.slot.fill(micro_batch, size)
        self._graphs[size][name].replay()

    def finish(self) -> None:
        """The end of a step, by replay unless nothing is."""
        if self._finish_graph is None or self.moved:
            self._finish()
        else:
            self._finish_graph.replay()

    def why_eager(self, micro_batch: MicroBatch) -> str | None:
        """Why a micro-batch would not be replayed; None if it would."""
        if self._bypassed is not None:
            return self._bypassed
        size = capture_size_of(micro_batch)
        if size in self._graphs:
            if micro_batch.layout.total_tokens != self.slot.total_tokens:
                return f"another size than {self.slot.total_tokens} tokens"
            return MOVED if self.moved else None
        if micro_batch.packed.num_seqs > self.capture_sizes.largest:
            return f"more than {self.capture_sizes.largest} documents"
        if size.capacity > self.capture_sizes.largest:
            return f"more than {self.capture_sizes.largest} documents on another rank, whose graphs share collectives"
        if size in self.refusals:
            return f"no graphs for its capacity ({self.refusals[size]})"
        if not self._graphs:
            return "no graphs"
        return "padded to a size for which no graph was captured"

    @contextmanager
    def bypassed(self, reason: str) -> Iterator[None]:
        """Inside, every micro-batch runs eagerly: what it needs is not what was captured."""
        self._bypassed = reason
        try:
            yield
        finally:
            self._bypassed = None

    @property
    def moved(self) -> bool:
        """Whether a tensor has left the address that graphs use; then `tune` and `capture` again."""
        return self._used.moved

    # -----------------------------------------------------------------------------------------------------------
    # end

    def forget(self) -> None:
        """Give up all graphs and their memory; everything runs eagerly until the next capture."""
        self.slot.vacate()
        for graphs in self._graphs.values():
            for graph in graphs.values():
                graph.reset()
        self._graphs.clear()
        if self._finish_graph is not None:
            self._finish_graph.reset()
        self._finish_graph = None
        self._used = Places()
        self.backend.reset()
        self.counters.memory_mib = 0.0

    close = forget
    """Before the process group is destroyed: a graph that holds collectives would keep the process
    from its exit.
    """


def capture_size_of(micro_batch: MicroBatch) -> CaptureSize:
    """The size that it was built in."""
    return CaptureSize(micro_batch.layout.capacity, micro_batch.packed.max_seqlen)


def _nothing(_: object) -> None:
    """What a part returns would keep memory of the pool alive."""
