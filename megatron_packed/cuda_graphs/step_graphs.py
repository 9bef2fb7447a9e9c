"""The interface of CUDA graphs, for both strategies: graphs of layers and graphs of whole steps.

`StepGraphs` decides for each micro-batch whether graphs are replayed or functions are called, counts
both, and notices when a tensor that graphs use was reallocated. `README.md` shows a graph's life.
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
from megatron_packed.cuda_graphs.slots import AddressCheck, Place, Slot, SlotRing, capture_size_of
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import NO_TABLES, SharedTables

Tables = Callable[[PackedSeqParams], SharedTables]
Part = Callable[[MicroBatch], object]
"""One part of a step for one micro-batch on the device."""

_QUIET_SECONDS = 2.0
"""Tuning that ends sooner is not reported."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of one audit: everything that was compared agrees."""

    compared: int
    """Modules, each counted once for every slot, or parts of a step."""
    finding: str
    """Sentence without the difference."""
    largest_difference: float
    """Largest difference of gradients, relative to the largest value; 0 if all bits are equal."""


class StepGraphs(ABC):
    """CUDA graphs of one model's training steps, over one or several slots.

    [Note: captures that ranks agree on]
    What is captured may hold collectives, and all ranks of a collective must either replay it or
    call it. So ranks capture together: the same capture sizes, with the same modules or parts. After
    each step of a capture that may fail they exchange what failed; if any rank fails to capture
    something, all ranks run it eagerly. A capture computes nothing and waits for no rank, so a rank
    that fails in a capture leaves no other rank waiting. A rank that fails in an eager pass does;
    out of memory in such a pass therefore ends the run, as it would in a step.

    Use: `tune`, in turns of ranks that need not wait for each other; `capture`, all ranks together;
    then, for each step, `run` for every micro-batch and `finish_step`. Everything runs eagerly until
    the first capture and after `forget`. Call `close` before the process group is destroyed.

    Args:
        total_tokens: token slots T of every micro-batch.
        capture_sizes: sizes to capture.
        device: of the model.
        tables: derives from a pack's metadata, once per micro-batch, what all layers share.
        check: host checks of a micro-batch's metadata that ``tables`` cannot make inside a graph.
        copies: copies to the host and back that layers queue on other streams inside graphs.
        backend: captures; by default torch's CUDA graphs. Without a backend and without a GPU
            nothing is captured: everything runs eagerly, ``say`` receives one sentence, and
            `off_reason` has the reason.
        num_slots: micro-batches between whose forward and backward another one's may come. Each
            slot has graphs and memory of its own. The trainer has one; more are for library users
            of `LayerGraphs`.
        warmup_steps: eager passes over each capture size that tune kernels: in `tune`, and for
            graphs of layers also in `capture`. For whole steps `capture` runs each part once.
        strict: any fallback is an error.
        agree: what failed on any rank that captures together, name (or `ALL`) -> reason, from what
            failed on this rank; a collective.
        say: receives progress, a sentence at a time.
    """

    tunes_in_capture = False
    """True if `capture` runs the warm-up passes that tune kernels; else `tune` must come before."""
    captures_parts = False
    """True if graphs hold whole parts of a step, with the room that a part itself sets up."""

    def __init__(
        self,
        *,
        total_tokens: int,
        capture_sizes: CaptureSizes,
        device: torch.device,
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
        self.capture_sizes = capture_sizes
        self.device = device
        self.tables = tables
        self.strict = strict
        self.off_reason: str | None = None
        """Reason why nothing can be captured on this device, so that everything runs eagerly; None
        where graphs can be captured.
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
        self._warmup_steps = max(warmup_steps, 1)
        self._agree = agree
        self._say = say
        self._bypassed: str | None = None
        """Reason why nothing is replayed at the moment, though it could be; or None."""
        self._addresses = AddressCheck()
        if self.off_reason is not None:
            if strict:
                raise GraphFallbackError(
                    f"{self.off_reason}; {flags.CUDA_GRAPH_STRICT} forbids running eagerly."
                )
            self._say(f"{self.off_reason}: every micro-batch runs eagerly.")

    @property
    def slot(self) -> Slot:
        """The first slot, which is the only one in training."""
        return self.slots.slots[0]

    def tune(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Run eager passes over every capture size, so that kernels are compiled and tuned.

        Earlier graphs are given up. Where ranks need not wait for each other in a pass, one rank may
        go first and the others find its kernels. Gradients hold garbage afterwards.

        Args:
            make_dummy: makes a host micro-batch that fills a capture size; for tuning kernels it
                should look like real ones.
        """
        if self.off_reason is not None:
            return
        begun = time.perf_counter()
        self.forget()
        # What a former step left must not lead these passes to its stream.
        gc.collect()  # See [Note: nodes of parameters] in whole_step_graphs.py.
        with self._rehearsal(), self.backend.side_stream():
            for number, size in enumerate(reversed(self.capture_sizes.sizes), start=1):
                for _ in range(self._warmup_steps):
                    self._eager_pass(make_dummy(size).to(self.device))
                self._say_tuned(size, begun, number)
        self.counters.capture_seconds += time.perf_counter() - begun

    def capture(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Capture every capture size, the largest first; all ranks together, between steps.

        Gradients hold garbage afterwards; all else is as before.

        Args:
            make_dummy: as for `tune`.
        Raises:
            GraphFallbackError: ``strict``, and something could not be captured.
        """
        if self.off_reason is not None:
            return
        begun = time.perf_counter()
        self.forget()
        gc.collect()  # See [Note: nodes of parameters] in whole_step_graphs.py.
        try:
            with self._rehearsal():
                self._capture_all(make_dummy)
        except BaseException:  # a half-captured set must not be replayed
            self.forget()
            raise
        self.slots.vacate()
        self.counters.capture_seconds += time.perf_counter() - begun
        # Taken after the rehearsal: buffers are back at their values, at the addresses graphs know.
        self._addresses = AddressCheck(self._used_places())

    def forget(self) -> None:
        """Give up all graphs and their memory; everything runs eagerly until the next capture."""
        self.slots.vacate()
        self._release()
        self._addresses = AddressCheck()
        self.counters.memory_mib = 0.0

    def close(self) -> None:
        """Give up the graphs for good, before the process group is destroyed.

        A graph that holds collectives and outlives its group keeps the process from exiting.
        """
        self.forget()

    @abstractmethod
    def run(self, name: str, part: Part, micro_batch: MicroBatch) -> None:
        """Run a part of a step for one micro-batch, by replay where possible.

        Args:
            name: of the part.
            part: the part itself, called with the micro-batch on the device if it is not replayed
                as a whole.
            micro_batch: on the device or pinned on the host; copied to the device once.
        Raises:
            GraphFallbackError: ``strict``, and it would run eagerly.
        """

    def finish_step(self, finish: Callable[[], object]) -> None:
        """End a step: replay its captured end, or call ``finish`` where there is none.

        The captured end is replayed also after micro-batches that ran eagerly or were `bypassed`.
        """
        finish()

    def why_eager(self, micro_batch: MicroBatch) -> str | None:
        """Return why a micro-batch would not be replayed; None if it would.

        Ranks that share captured collectives must get the same answer. So it depends on the size
        that the micro-batch was built in, known to all from the pack plan, and on state that ranks
        agree on. The documents of this rank's pack (``num_seqs``) only choose between two wordings.
        Changed addresses are the exception: such a rank reports it with the step's numbers.
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
            # The plan gave this rank room for another rank's documents, so that both run eagerly.
            return reasons.more_documents_elsewhere(largest)
        return self._why_not_captured(size) or reasons.NO_CAPTURE_SIZE

    @contextmanager
    def bypassed(self, reason: str) -> Iterator[None]:
        """Run every micro-batch inside eagerly: it needs something else than was captured.

        The end of the step is not concerned.
        """
        self._bypassed = reason
        try:
            yield
        finally:
            self._bypassed = None

    @property
    def addresses_changed(self) -> bool:
        """True if a tensor that graphs use was reallocated; then `capture` again.

        Parameters, ``main_grad`` and buffers are compared; for whole steps also optimizer states.
        """
        return self._addresses.addresses_changed

    def _admit(self, micro_batch: MicroBatch) -> bool:
        """Count a micro-batch; return whether it is to be replayed."""
        reason = self.why_eager(micro_batch)
        if reason is None:
            # Checks that need the host must come before the replay: inside a graph none can raise.
            self._check(micro_batch.packed)
            self.counters.replays += 1
            return True
        capacity = micro_batch.layout.capacity
        too_many = self._bypassed is None and capacity > self.capture_sizes.largest
        self.counters.fall_back(reason, strict=self.strict, too_many=too_many)
        return False

    @property
    @abstractmethod
    def description(self) -> str:
        """Name of what is captured, for the console."""

    @property
    @abstractmethod
    def refusals(self) -> list[Refusal]:
        """Modules or parts that could not be captured, with capture size and reason."""

    @abstractmethod
    def audit(self, micro_batch: MicroBatch, *, deterministic: bool, seed: int = 0) -> Audit | None:
        """Compare replays with eager passes on one micro-batch; None if it would not be replayed.

        Waits for the device. Call it between steps; ranks whose passes wait for each other call it
        together.

        Args:
            micro_batch: on the host.
            deterministic: kernels were asked to be; then everything must be equal to the bit.
            seed: of made-up values.
        Raises:
            AuditMismatchError: names what differs.
        """

    @abstractmethod
    def _rehearsal(self) -> AbstractContextManager[None]:
        """Return a context in which passes may run on dummies; lasting state is put back."""

    @abstractmethod
    def _eager_pass(self, micro_batch: MicroBatch) -> object:
        """Run one pass over a micro-batch on the device, to tune kernels."""

    @abstractmethod
    def _capture_all(self, make_dummy: Callable[[CaptureSize], MicroBatch]) -> None:
        """Warm up and capture."""

    @abstractmethod
    def _used_places(self) -> Iterable[Place]:
        """Return where the tensors are kept that graphs read or write."""

    @abstractmethod
    def _release(self) -> None:
        """Reset all graphs and their pools."""

    @abstractmethod
    def _has_graphs(self, size: CaptureSize) -> bool:
        """Return whether micro-batches of this size can be replayed."""

    @abstractmethod
    def _why_not_captured(self, size: CaptureSize) -> str | None:
        """Return why a size has no graphs; None if it is no capture size."""

    def _refuse(self, sentence: str, *, said: bool = False) -> None:
        """Report that something runs eagerly, unless it was said before; an error if ``strict``."""
        if self.strict:
            raise GraphFallbackError(
                f"{sentence}; {flags.CUDA_GRAPH_STRICT} forbids running it eagerly."
            )
        if not said:
            self._say(f"{sentence}; it runs eagerly")

    def _say_tuned(self, size: CaptureSize, begun: float, done: int) -> None:
        """Report that kernels are tuned for a size, if tuning takes so long that one wonders."""
        if time.perf_counter() - begun > _QUIET_SECONDS:
            left = how_far(begun, done, len(self.capture_sizes.sizes))
            self._say(f"tuned kernels for {self.capture_sizes.words(size)} ({left})")


def how_far(begun: float, done: int, total: int) -> str:
    """Return the progress of parts that take about equally long.

    Args:
        begun: ``time.perf_counter()`` at the start of the first part.
    Example:
        30 s for 2 of 3: ``"2 of 3, about 15 s left"``; at the end ``"3 of 3"``.
    """
    left = (time.perf_counter() - begun) / done * (total - done)
    return f"{done} of {total}" + (f", about {left:,.0f} s left" if done < total else "")
