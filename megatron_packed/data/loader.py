"""Micro-batches as a pure function of (plan, step), prepared ahead by a background thread.

There is no state to save: asking for step s gives the micro-batches of step s, in any order of
asking, in any run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_packed.data.collate import collate
from megatron_packed.data.documents import Documents
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.packing.step_plan import PieceNumbers, StepPlan
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.cu_seqlens import aligned
from megatron_packed.packed.micro_batch import MicroBatch

Plan = PackPlan | EvaluationPlan


class Loader:
    """The micro-batches of one data-parallel rank.

    Args:
        dataset: the documents.
        plan: over the same documents; `PackPlan` without end, or a finite `EvaluationPlan`. Its
            alignment is that of documents in the micro-batches.
        dp_rank: rank within the plan's data-parallel ranks.
        total_tokens: slots of every pack.
        capture_sizes: each micro-batch gets exactly the capacity and the bound of the longest row
            of the smallest capture size that holds it. One that no capture size holds, and all
            without capture sizes, have room for their own documents and no more.
        alike: the same capture size for micro-batch i of all data-parallel ranks, read off the
            plan: the smallest that holds each of them. Where none does, all have room for the most
            documents that one of them has, beyond the capture sizes.
        prefetch: micro-batches to prepare ahead of those asked for; 0 prepares them when they are
        asked for.
        device: micro-batches are pinned for it if it is a CUDA device.
    Raises:
        ValueError: the rank is not one of the plan's, or the plan was made of other documents.
    """

    def __init__(
        self,
        dataset: Documents,
        plan: Plan,
        *,
        dp_rank: int,
        total_tokens: int,
        capture_sizes: CaptureSizes | None = None,
        alike: bool = False,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= dp_rank < plan.dp_size:
            raise ValueError(
                f"dp_rank ({dp_rank}) is not one of the plan's {plan.dp_size} data-parallel ranks."
            )
        _check_pieces(plan.pieces, dataset)
        self.dataset = dataset
        self.plan = plan
        self.dp_rank = dp_rank
        self.total_tokens = total_tokens
        self.capture_sizes = capture_sizes
        self._alike = alike
        self._prefetch = prefetch
        self._device = torch.device(device)
        self._num_steps = plan.num_steps if isinstance(plan, EvaluationPlan) else None
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, int], Future[MicroBatch]] = {}
        self._plans: dict[int, StepPlan] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """All micro-batches of ``step``, on the host (pinned if the device is a CUDA device).

        Raises:
            Exception: whatever went wrong while they were prepared.
        """
        count = self.plan.packs_per_step // self.plan.dp_size
        wanted = [(step, number) for number in range(count)]
        if not self._prefetch:
            return [self._prepare(*place) for place in wanted]
        following = self._following(step + 1, count)
        for place in self._ahead.keys() - {*wanted, *following}:
            self._ahead.pop(place).cancel()
        for place in [*wanted, *following]:
            if place not in self._ahead:
                self._ahead[place] = self._thread().submit(self._prepare, *place)
        return [self._ahead.pop(place).result() for place in wanted]

    def close(self) -> None:
        """End the background thread. The loader stays usable: asking for a step starts it again."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _following(self, step: int, count: int) -> list[tuple[int, int]]:
        """Places of the micro-batches from ``step`` on, as many as are prepared ahead, up to the
        end of the plan.
        """
        places = [(step + ahead // count, ahead % count) for ahead in range(self._prefetch)]
        return [place for place in places if self._num_steps is None or place[0] < self._num_steps]

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
            alignment=self.plan.alignment,
        )
        return micro_batch.pin_memory() if self._device.type == "cuda" else micro_batch

    def _room(self, plan: StepPlan, number: int) -> tuple[int | None, int | None]:
        """Documents and longest row that micro-batch ``number`` has room for; None for exactly its
        own.
        """
        if self.capture_sizes is None:
            return None, None
        packs = (
            [of_rank[number] for of_rank in plan.packs]
            if self._alike
            else [plan.packs[self.dp_rank][number]]
        )
        documents = max(numbers.size for numbers in packs)
        capture_size = self.capture_sizes.smallest_for(
            documents, max(map(self._longest_row, packs))
        )
        if capture_size is not None:
            return capture_size.capacity, capture_size.max_seqlen
        return (documents if self._alike else None), None

    def _longest_row(self, numbers: PieceNumbers) -> int:
        """In tokens, the tail included."""
        lengths = aligned(self.plan.pieces.length[numbers], self.plan.alignment)
        return max(int(lengths.max(initial=0)), self.total_tokens - int(lengths.sum()))

    def _step_plan(self, step: int) -> StepPlan:
        plan = self._plans.get(step)
        if plan is None:
            # All micro-batches of a step need it, one after the other in one thread: one step is
            # worth remembering.
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
        # A new thread's current device is 0 on every rank; pinning would make a context there.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _check_pieces(pieces: Pieces, dataset: Documents) -> None:
    last = int(pieces.document.max(initial=-1))
    if last >= len(dataset):
        raise ValueError(
            f"the plan names document {last}, but the data set has {len(dataset)} documents."
        )
    if (pieces.start + pieces.length > dataset.lengths[pieces.document]).any():
        raise ValueError(
            "the plan names pieces longer than their documents; it was made of another data set."
        )
