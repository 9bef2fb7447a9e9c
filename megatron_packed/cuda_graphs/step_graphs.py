"""Interface of CUDA graphs for both strategies: graphs of layers and graphs of whole steps.

`StepGraphs` decides for each micro-batch whether graphs are replayed or the functions run eagerly,
and counts both. It also detects that a tensor used by graphs was reallocated. The ``README.md`` of
this package describes the life of a graph.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs import fallback_reasons as reasons
from megatron_packed.cuda_graphs.capture_and_pool import (
    Copies,
    CudaGraphBackend,
    GraphBackend,
    NoGraphs,
)
from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters, GraphFallbackError, Refusal
from megatron_packed.cuda_graphs.slots import (
    AddressCheck,
    AttributePlace,
    Slot,
    SlotRing,
    capture_size_of,
)
from megatron_packed.distributed.rng import generators_kept
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import NO_TABLES, PackedSeqParams, SharedTables

Tables = Callable[[PackedSeqParams], SharedTables]
StepPart = Callable[[MicroBatch], object]
"""One part of a step for one micro-batch on the device."""

_QUIET_SECONDS = 2.0
"""Seconds; tuning that takes less time is not reported."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of an audit in which every difference was within its allowed limit."""

    compared: int
    """Number of comparisons: modules, counted once per slot, or parts of a step."""
    finding: str
    """Summary for the console, without the largest difference."""
    largest_difference: float
    """Largest difference, relative to the largest value of its tensor; 0 if all bits are equal."""


class StepGraphs(ABC):
    """CUDA graphs of one model's training steps, over one or several slots.

    [Note: captures that ranks agree on]
    A captured module or part may contain collectives. All ranks of a collective must take part in
    it, by replay or eagerly. So ranks capture together: the same capture sizes, with the same modules
    or parts. After each stage of a capture that may fail, ranks exchange their failures. If any rank
    fails to capture a module or part, all ranks run it eagerly. A capture executes no collective, so
    a rank whose capture fails leaves no other rank waiting. But a rank that fails in an eager pass
    leaves other ranks waiting in a collective. So out of memory in such a pass ends the run, as it
    would in a training step.

    Use: call `tune`, on one rank after another where ranks do not wait for each other. Then call
    `capture` on all ranks together. Then, for each step, call `run` for every micro-batch, and
    `finish_step`. Everything runs eagerly until the first `capture`, and after `forget`. Call
    `close` before the process group is destroyed.

    Args:
        total_tokens: token slots T of every micro-batch.
        capture_sizes: sizes to capture.
        device: device of the model.
        tables: computes the tables that all layers share from the metadata of a micro-batch; called
            once per micro-batch.
        check: checks the metadata of a micro-batch on the host. ``tables`` cannot make these checks
            inside a graph.
        copies: copies to the host and back that layers queue on other streams inside graphs.
        backend: captures the graphs; by default with torch's CUDA graphs. Without a backend and
            without a GPU nothing is captured: everything runs eagerly, ``say`` receives one
            sentence, and `off_reason` has the reason.
        num_slots: largest number of micro-batches in flight (between forward and backward) at the
            same time. Each slot has separate graphs and memory. The trainer uses one slot; more are
            for library users of `LayerGraphs`.
        warmup_steps: number of eager passes over each capture size that tune kernels. They run in
            `tune`, and for graphs of layers also in `capture`. With 0, `tune` does nothing;
            `capture` still runs each layer or part once, eagerly.
        strict: any fallback is an error.
        agree: collective of all ranks that capture together. It takes this rank's failures (name or
            `ALL` -> reason) and returns the failures of all ranks.
        say: receives messages about progress, one sentence per call.
    """

    tunes_in_capture = False
    """True if `capture` runs the warm-up passes that tune kernels; else `tune` must be called first."""

    def __init__(
        self,
        *,
        total_tokens: int,
        capture_sizes: CaptureSizes,
        device: torch.device | str,
        tables: Tables = lambda packed: NO_TABLES,
        check: Callable[[PackedSeqParams], None] = lambda packed: None,
        copies: Copies | None = None,
        backend: GraphBackend | None = None,
        num_slots: int = 1,
        warmup_steps: int = 3,
        strict: bool = False,
        agree: Callable[[dict[str, str]], dict[str, str]] = lambda failed: failed,
        say: Callable[[str], None] = print,
    ) -> None:
        device = torch.device(device)
        self.capture_sizes = capture_sizes
        self.device = device
        self.tables = tables
        self.strict = strict
        self.off_reason: str | None = None
        """Reason why this device cannot capture graphs, so that everything runs eagerly; None if it
        can.
        """
        if backend is None and device.type != "cuda":
            self.off_reason = reasons.no_gpu(device)
            backend = NoGraphs()
        self.backend: GraphBackend = CudaGraphBackend(device) if backend is None else backend
        self.slots = SlotRing(
            [Slot(total_tokens, capture_sizes.largest, device) for _ in range(num_slots)]
        )
        self.counters = GraphCounters()
        self._check = check
        self._copies = copies
        self._warmup_steps = warmup_steps
        self._agree = agree
        self._say = say
        self._bypassed: str | None = None
        """Reason of the current `bypassed` context; None outside such a context."""
        self._addresses = AddressCheck()
        if self.off_reason is not None:
            if strict:
                raise GraphFallbackError(
                    f"{self.off_reason}; {flags.CUDA_GRAPH_STRICT} forbids running eagerly."
                )
            self._say(f"{self.off_reason}: every micro-batch runs eagerly.")

    @property
    def slot(self) -> Slot:
        """The first slot, which is the only slot in training."""
        return self.slots.slots[0]

    def tune(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Run eager passes over every capture size, so that kernels are compiled and tuned.

        Earlier graphs are freed. If ranks do not wait for each other in a pass, one rank may tune
        first, and the other ranks find its kernels in the cache. Gradients hold garbage afterwards.

        Args:
            make_dummy: makes a micro-batch on the host that fills a capture size. Its documents
                should have realistic lengths, because kernels are tuned on it.
        """
        if self.off_reason is not None or self._warmup_steps == 0:
            return
        begun = time.perf_counter()
        self.forget()
        # Autograd nodes of an earlier step would make parts of these passes run on that step's stream.
        gc.collect()  # See [Note: nodes of parameters] in whole_step_graphs.py.
        with generators_kept(self.device), self._rehearsal(), self.backend.side_stream():
            for number, size in enumerate(reversed(self.capture_sizes.sizes), start=1):
                for _ in range(self._warmup_steps):
                    self._eager_pass(make_dummy(size).to(self.device))
                self._say_tuned(size, begun, number)
        self.counters.capture_seconds += time.perf_counter() - begun

    def capture(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Capture every capture size, the largest first. Call it on all ranks, between steps.

        Gradients hold garbage afterwards. Parameters, buffers, optimizer states and random states
        are unchanged.

        Args:
            make_dummy: as for `tune`.
        Raises:
            GraphFallbackError: ``strict`` is set, and a module or part could not be captured.
        """
        if self.off_reason is not None:
            return
        begun = time.perf_counter()
        self.forget()
        gc.collect()  # See [Note: nodes of parameters] in whole_step_graphs.py.
        try:
            with generators_kept(self.device), self._rehearsal():
                self._capture_all(make_dummy)
        except BaseException:  # an incomplete set of graphs must not be replayed
            self.forget()
            raise
        self.slots.vacate()
        self.counters.capture_seconds += time.perf_counter() - begun
        # Record addresses after the rehearsal has restored the buffers in place.
        self._addresses = AddressCheck(self._used_places())

    def forget(self) -> None:
        """Free all graphs and their memory. Everything runs eagerly until the next `capture`."""
        self.slots.vacate()
        self._release()
        self._addresses = AddressCheck()
        self.counters.memory_mib = 0.0

    def close(self) -> None:
        """Free the graphs for the last time, before the process group is destroyed.

        If a graph with collectives outlives its process group, the process cannot exit.
        """
        self.forget()

    @abstractmethod
    def run(self, name: str, part: StepPart, micro_batch: MicroBatch) -> None:
        """Run a part of a step for one micro-batch, by replay where possible.

        Args:
            name: name of the part.
            part: function that runs the part. If one graph contains the complete part, the graph is
                replayed. Otherwise the function is called with the micro-batch on the device.
            micro_batch: micro-batch on the device, or on the host in pinned memory. A micro-batch
                on the host is copied to the device once.
        Raises:
            GraphFallbackError: ``strict`` is set, and the micro-batch would run eagerly.
        """

    def finish_step(self, finish: Callable[[], object]) -> None:
        """End a step: replay its captured end, or call ``finish`` if the end was not captured.

        The captured end is also replayed after micro-batches that ran eagerly or were `bypassed`.
        """
        finish()

    def why_eager(self, micro_batch: MicroBatch) -> str | None:
        """Return the reason why a micro-batch would run eagerly; None if it would be replayed.

        Ranks that share captured collectives must all replay or all run eagerly. So the decision
        depends only on the micro-batch's capture size, which all ranks know from the pack plan, and
        on state that ranks agree on. The number of documents of this rank (``num_seqs``) only
        selects between two wordings of the reason. Changed addresses are an exception: only the
        rank with changed addresses runs eagerly, and it reports them with the metrics of the step.
        """
        if self.off_reason is not None:
            return self.off_reason
        if self._bypassed is not None:
            return self._bypassed
        size = capture_size_of(micro_batch)
        largest = self.capture_sizes.largest
        if self._has_graphs(size):
            if micro_batch.layout.total_tokens != self.slot.total_tokens:
                return reasons.other_tokens(self.slot.total_tokens)
            return reasons.ADDRESSES_CHANGED if self.addresses_changed else None
        if micro_batch.packed.num_seqs > largest:
            return reasons.more_documents(largest)
        if size.capacity > largest:
            # Another rank has too many documents. The pack plan padded this rank's micro-batch to the
            # same capacity, so that both ranks run eagerly.
            return reasons.more_documents_elsewhere(largest)
        return self._why_not_captured(size) or reasons.NO_CAPTURE_SIZE

    @contextmanager
    def bypassed(self, reason: str) -> Iterator[None]:
        """Return a context in which every micro-batch runs eagerly.

        The end of the step is still replayed.

        Args:
            reason: reason to count for each of these micro-batches.
        """
        self._bypassed = reason
        try:
            yield
        finally:
            self._bypassed = None

    @property
    def addresses_changed(self) -> bool:
        """True if a tensor that graphs use was reallocated. Call `capture` again in this case.

        The compared addresses are those of parameters, ``main_grad`` and buffers, and for whole
        steps also those of optimizer states.
        """
        return self._addresses.addresses_changed

    def _admit(self, micro_batch: MicroBatch) -> bool:
        """Count a micro-batch as replay or fallback; return True if it must be replayed."""
        reason = self.why_eager(micro_batch)
        if reason is None:
            # Check the metadata on the host before the replay, because a replay cannot raise an error.
            self._check(micro_batch.packed)
            self.counters.replays += 1
            return True
        capacity = micro_batch.layout.capacity
        too_many = self._bypassed is None and capacity > self.capture_sizes.largest
        # A caller that bypasses graphs has no other way to get the result, for example a repeat of a
        # step whose expert buffers overflowed. So strictness does not apply.
        strict = self.strict and self._bypassed is None
        self.counters.fall_back(reason, strict=strict, too_many=too_many)
        return False

    @property
    @abstractmethod
    def description(self) -> str:
        """Description of the captured modules or parts, for the console."""

    @property
    @abstractmethod
    def refusals(self) -> list[Refusal]:
        """Modules or parts that could not be captured, each with its capture size and the reason."""

    @abstractmethod
    def audit(self, micro_batch: MicroBatch, *, deterministic: bool, seed: int = 0) -> Audit | None:
        """Compare replays with eager passes on one micro-batch.

        The method synchronizes with the device. Call it between steps. If passes contain
        collectives, call the method on all ranks of these collectives together.

        Args:
            micro_batch: micro-batch on the host.
            deterministic: kernels are deterministic; all results must then be bitwise equal.
            seed: seed of random values.
        Returns:
            The result, or None if the micro-batch would run eagerly.
        Raises:
            AuditMismatchError: a result differs by more than allowed; names the result.
        """

    @abstractmethod
    def _rehearsal(self) -> AbstractContextManager[None]:
        """Return a context in which passes may run on dummies, and which restores persistent state
        at its end."""

    @abstractmethod
    def _eager_pass(self, micro_batch: MicroBatch) -> object:
        """Run one eager pass over a micro-batch on the device, to tune kernels."""

    @abstractmethod
    def _capture_all(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Warm up and capture."""

    @abstractmethod
    def _used_places(self) -> Iterable[AttributePlace]:
        """Return the places where the tensors that graphs read or write are stored."""

    @abstractmethod
    def _release(self) -> None:
        """Reset all graphs and their pools."""

    @abstractmethod
    def _has_graphs(self, size: CaptureSize) -> bool:
        """Return whether micro-batches of this size can be replayed."""

    @abstractmethod
    def _why_not_captured(self, size: CaptureSize) -> str | None:
        """Return the reason why a capture size has no graphs; None if ``size`` is no capture size."""

    def _refuse(self, sentence: str, *, said: bool = False) -> None:
        """Report that a module or part runs eagerly, or raise an error if ``strict`` is set.

        Args:
            sentence: module or part, capture size and reason.
            said: the same fact was reported before, so do not report it again.
        """
        if self.strict:
            raise GraphFallbackError(
                f"{sentence}; {flags.CUDA_GRAPH_STRICT} forbids running it eagerly."
            )
        if not said:
            self._say(f"{sentence}; it runs eagerly")

    def _say_tuned(self, size: CaptureSize, begun: float, done: int) -> None:
        """Report that kernels are tuned for a size, if tuning has taken longer than 2 seconds."""
        if time.perf_counter() - begun > _QUIET_SECONDS:
            left = how_far(begun, done, len(self.capture_sizes.sizes))
            self._say(f"tuned kernels for {self.capture_sizes.words(size)} ({left})")


def how_far(begun: float, done: int, total: int) -> str:
    """Return the progress of a sequence of parts that take about the same time.

    Args:
        begun: ``time.perf_counter()`` at the start of the first part.
        done: number of parts that are done.
        total: number of all parts.
    Example:
        30 s for 2 of 3: ``"2 of 3, about 15 s left"``; at the end ``"3 of 3"``.
    """
    left = (time.perf_counter() - begun) / done * (total - done)
    return f"{done} of {total}" + (f", about {left:,.0f} s left" if done < total else "")
