"""Assembly of micro-batches, and the loader that prepares them in a background thread.

The micro-batches of a step are a pure function of (plan, step). Steps may be requested in any
order. The loader therefore has no state that a checkpoint must save.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import torch

from megatron_packed.data.documents import Documents
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.step_plan import PieceNumbers, StepPlan
from megatron_packed.packed.array_types import IntegerArray
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.cu_seqlens_and_seq_idx import aligned
from megatron_packed.packed.micro_batch import Document, MicroBatch

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan

Plan: TypeAlias = "PackPlan | EvaluationPlan"


def collate(
    dataset: Documents,
    pieces: Pieces,
    numbers: Sequence[int] | IntegerArray,
    *,
    total_tokens: int,
    capacity: int | None = None,
    scales: Sequence[float] | None = None,
    max_seqlen: int | None = None,
    alignment: int = 1,
) -> MicroBatch:
    """Build the micro-batch of one pack on the host.

    The label at t is token t + 1, if that token is a target and belongs to the same piece. Otherwise
    t has no label. The last token of a piece therefore has no label, and the first token of a piece
    is no label.

    Args:
        numbers: numbers of the pieces in the pack, in order; empty for a pack without documents.
        total_tokens: slots of the pack.
        capacity, scales, max_seqlen, alignment: as for `MicroBatch.build`.
    Raises:
        DataError: the data on disk changed since it was written.
        ValueError: the pieces do not fit.
    Example:
        Pieces of 3 and 2 tokens, ``a b c`` with targets ``0 1 1`` and ``d e`` with ``0 0``, in 6
        slots: labels ``b c - - - -``, loss mask ``1 1 0 0 0 0``.
    """
    documents = []
    for number in numbers:
        tokens, targets = dataset.document(
            int(pieces.document[number]), int(pieces.start[number]), int(pieces.length[number])
        )
        documents.append(Document(tokens, targets))
    return MicroBatch.build(
        documents,
        total_tokens,
        capacity=capacity,
        scales=scales,
        max_seqlen=max_seqlen,
        alignment=alignment,
    )


class Loader:
    """Loader of the micro-batches of one data-parallel rank.

    Args:
        dataset: the documents.
        plan: plan over the same documents: an endless `PackPlan` or a finite `EvaluationPlan`.
            Documents in the micro-batches have the alignment of the plan.
        dp_rank: rank within the plan's data-parallel ranks.
        total_tokens: slots of every pack.
        capture_sizes: capture sizes of the CUDA graphs. Each micro-batch gets the capacity and the
            longest row of the smallest capture size that fits. If no capture size fits, or without
            capture sizes, the capacity is exactly the number of documents of the micro-batch.
        same_on_all_ranks: True gives micro-batch i the same capture size on all data-parallel ranks, the
            smallest that fits all of them. If none fits, all ranks get the largest number of
            documents of these micro-batches as capacity. The plan contains the documents of all
            ranks, so ranks need not communicate.
        prefetch: number of micro-batches to prepare after the requested step; 0 prepares
            micro-batches only when they are requested.
        device: if the device is a CUDA device, micro-batches are in pinned memory.
    Raises:
        ValueError: the plan does not have the rank, or the plan was made from other documents.
    """

    def __init__(
        self,
        dataset: Documents,
        plan: Plan,
        *,
        dp_rank: int,
        total_tokens: int,
        capture_sizes: CaptureSizes | None = None,
        same_on_all_ranks: bool = False,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= dp_rank < plan.dp_size:
            raise ValueError(
                f"dp_rank ({dp_rank}) is not one of the {plan.dp_size} data-parallel ranks of the plan."
            )
        _check_pieces(plan.pieces, dataset)
        self.dataset = dataset
        self.plan = plan
        self.dp_rank = dp_rank
        self.total_tokens = total_tokens
        self.capture_sizes = capture_sizes
        self._same_on_all_ranks = same_on_all_ranks
        self._prefetch = prefetch
        self._device = torch.device(device)
        self._num_steps = plan.num_steps
        self._alignment = plan.alignment
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, int], Future[MicroBatch]] = {}
        self._plans: dict[int, StepPlan] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return all micro-batches of ``step``, on the host (pinned if the device is a CUDA
        device).

        Raises:
            Exception: any error of the thread that prepared the micro-batches.
        """
        wanted = self._places(step)
        if not self._prefetch:
            return [self._prepare(*place) for place in wanted]
        following = self._following(step + 1)
        for place in self._ahead.keys() - {*wanted, *following}:
            self._ahead.pop(place).cancel()
        for place in [*wanted, *following]:
            if place not in self._ahead:
                self._ahead[place] = self._thread().submit(self._prepare, *place)
        return [self._ahead.pop(place).result() for place in wanted]

    def close(self) -> None:
        """End the background thread. The next call of `micro_batches` starts it again."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Return ``(step, number in the step)`` of this rank's micro-batches of a step."""
        count = self.plan.packs_of_step(step) // self.plan.dp_size
        return [*zip(repeat(step), range(count))]

    def _following(self, step: int) -> list[tuple[int, int]]:
        """Return ``(step, number in the step)`` of the micro-batches to prepare, from ``step`` on.

        The list has no steps after the last step of an `EvaluationPlan`.
        """
        places: list[tuple[int, int]] = []
        while len(places) < self._prefetch and (self._num_steps is None or step < self._num_steps):
            places += self._places(step)
            step += 1
        return places[: self._prefetch]

    def _prepare(self, step: int, number: int) -> MicroBatch:
        plan = self._step_plan(step)
        numbers = plan.packs[self.dp_rank][number]
        capacity, max_seqlen = self._room(plan, number)
        micro_batch = collate(
            self.dataset,
            self.plan.pieces,
            numbers,
            total_tokens=self.total_tokens,
            capacity=capacity,
            scales=plan.scales,
            max_seqlen=max_seqlen,
            alignment=self._alignment,
        )
        return micro_batch.pin_memory() if self._device.type == "cuda" else micro_batch

    def _room(self, plan: StepPlan, number: int) -> tuple[int | None, int | None]:
        """Return capacity in documents and longest row in tokens of micro-batch ``number``.

        None stands for the exact value of the micro-batch.
        """
        if self.capture_sizes is None:
            return None, None
        packs = (
            [of_rank[number] for of_rank in plan.packs]
            if self._same_on_all_ranks
            else [plan.packs[self.dp_rank][number]]
        )
        documents = max(numbers.size for numbers in packs)
        capture_size = self.capture_sizes.smallest_for(
            documents, max(map(self._longest_row, packs))
        )
        if capture_size is not None:
            return capture_size.capacity, capture_size.max_seqlen
        return (documents if self._same_on_all_ranks else None), None

    def _longest_row(self, numbers: PieceNumbers) -> int:
        """Return the longest row of a pack in tokens, including the tail."""
        lengths = aligned(self.plan.pieces.length[numbers], self._alignment)
        return max(int(lengths.max(initial=0)), self.total_tokens - int(lengths.sum()))

    def _step_plan(self, step: int) -> StepPlan:
        plan = self._plans.get(step)
        if plan is None:
            # All micro-batches of a step need the same plan, and one thread prepares them in order.
            # It is therefore enough to cache the plan of one step.
            plan = self.plan.step(step)
            self._plans = {step: plan}
        return plan

    def _thread(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                1, thread_name_prefix="loader", initializer=self._enter_thread
            )
        return self._pool

    def _enter_thread(self) -> None:
        # A new thread has device 0 as its current device on every rank. Without set_device, pinning
        # would create a CUDA context on device 0.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _check_pieces(pieces: Pieces, dataset: Documents) -> None:
    last = int(pieces.document.max(initial=-1))
    if last >= len(dataset):
        raise ValueError(
            f"the plan contains document {last}, but the data set has {len(dataset)} documents; make the plan from "
            "this data set."
        )
    if (pieces.start + pieces.length > dataset.lengths[pieces.document]).any():
        raise ValueError(
            "the plan contains pieces longer than their documents; make the plan from this data set."
        )
