"""Collectives of data parallelism beside the work of the model: sums of gradients, and parameters
that come back.

Both go by buckets ([Note: buckets] in ``zero1_layout.py``) and by stages: the modules that the
hidden state goes through, one after the other.

[Note: when gradients are complete]
The gradient of a stage's input arrives when autograd is done with everything from that stage on: it
takes the node made last of those that are ready, and what is used in a later stage was made later
than what gave the stage's input. It does not matter whether a layer's gradients went through
``.grad`` or were added to ``main_grad`` by its own backward or by a graph's replay, and no
parameter has to report: one without a gradient holds nothing up. A parameter that several stages
use (tied weights) is complete with the first of them.

[Note: one order on all ranks]
Ranks must begin collectives in one order, across groups too. Buckets are therefore begun in a fixed
order, in the thread of the backward pass, at places that depend on the model alone; hooks of
parameters would not do, since autograd runs those of parameters without ``.grad`` in another
thread. What is complete too late (the first stage, and gradients that are summed over
tensor-parallel ranks before) is begun behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron_packed.distributed.collectives import Started, start_all_gather, start_sum, wait_for
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import Bucket


class Stage(NamedTuple):
    """A part of a model, from the input of a module on to that of the next stage's."""

    module: nn.Module
    """Called with the hidden state as its first argument."""
    parameters: list[nn.Parameter]
    """All that are used in this part; others may use them too."""


def stages_of_buckets(buffers: FlatBuffers, stages: Sequence[Stage]) -> list[list[int]]:
    """For each bucket the numbers of the stages that use its parameters, ascending; 0 for one that
    none knows.
    """
    used: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters:
            used.setdefault(id(parameter), set()).add(number)
    found: list[set[int]] = [set() for _ in buffers.layout.buckets]
    for slot in buffers.layout.slots:
        found[slot.bucket] |= used.get(id(buffers.parameters[slot.name]), {0})
    return [sorted(numbers) for numbers in found]


class OverlappedReduce:
    """Sums of gradients that begin while the backward pass still runs.

    See [Note: when gradients are complete] and [Note: one order on all ranks].

    Use: ``begin()`` before the last micro-batch's forward pass, ``join()`` behind its backward
    pass, then ``finish()``. The result is that of ``buffers.reduce``. Between ``join`` and
    ``finish`` nothing is under way, so each side may be captured in a CUDA graph of its own;
    ``finish`` sums what the pass before it, captured or not, has left.

    Args:
        buffers: gradients, by bucket.
        groups: of this rank.
        stages: of the model, in the order of the forward pass.
        late: parameters whose gradients are not final before ``finish``.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        groups: ParallelGroups,
        stages: Sequence[Stage],
        late: Iterable[nn.Parameter] = (),
    ) -> None:
        self.buffers = buffers
        self.groups = groups
        self.begun_in_backward = 0
        """Buckets whose sum began before the backward pass had ended, in the last step."""
        # Their sum over tensor-parallel ranks comes after the backward pass, so theirs must wait.
        late_ids = {id(parameter) for parameter in late}
        late_buckets = {
            s.bucket for s in buffers.layout.slots if id(buffers.parameters[s.name]) in late_ids
        }
        first_use = [
            0 if number in late_buckets else used[0]
            for number, used in enumerate(stages_of_buckets(buffers, stages))
        ]
        self._queue = sorted(zip(first_use, buffers.layout.buckets), key=lambda item: -item[0])
        """First stage and bucket, in the order in which they are begun."""
        self._next = len(self._queue)
        self._under_way: list[Started | None] = []
        self._active = False
        for number, stage in enumerate(stages[1:], start=1):
            stage.module.register_forward_pre_hook(partial(self._watch, number))

    def begin(self) -> None:
        """Begin the last micro-batch: gradients that are complete from here on are final."""
        self._next = 0
        self._under_way = []
        self._active = True

    def join(self) -> None:
        """Let later work on the current stream see all sums that have begun."""
        self.begun_in_backward = self._next
        self._active = False
        self._wait()

    def abandon(self) -> None:
        """Instead of ``join``, where the pass has failed: what it has begun is of no use."""
        # No wait: in a failed pass other ranks may never join these collectives.
        self._under_way = []
        self._active = False

    def finish(self) -> None:
        """Reduce the remaining buckets and the metric slots.

        When it returns, all reductions are complete on the current stream.
        """
        # Set anew in every call: a capture calls it once more after its warm-up.
        self._next = self.begun_in_backward
        self._start(0)
        tail = self.buffers.tail
        if tail.numel():
            self._under_way.append(start_sum(tail, self.groups.dp_cp_group, own_share=False))
        self._wait()

    def _wait(self) -> None:
        for started in self._under_way:
            wait_for(started)
        self._under_way = []

    def _watch(self, stage: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden = inputs[0]
        if self._active and isinstance(hidden, Tensor) and hidden.requires_grad:
            # The hook of a tensor runs in the thread of the backward pass, see [Note: one order on all
            # ranks].
            hidden.register_hook(lambda _: self._reached(stage))  # type: ignore[no-untyped-call]

    def _reached(self, stage: int) -> None:
        if self._active:
            with record_function("dp::start_reduce"):
                self._start(stage)

    def _start(self, stage: int) -> None:
        """Begin all buckets that no stage before ``stage`` uses."""
        while self._next < len(self._queue) and self._queue[self._next][0] >= stage:
            bucket = self._queue[self._next][1]
            self._next += 1
            # With owners a rank needs the sum of its own share alone: half the bytes.
            own_share = not self.buffers.owns_all
            group = self.groups.expert_dp_group if bucket.part.expert else self.groups.dp_cp_group
            with torch.no_grad():
                self._under_way.append(
                    start_sum(self.buffers.bucket_grads(bucket), group, own_share=own_share)
                )


class OverlappedGather:
    """Parameters that come back from their owners while the next step has begun; for
    ``FlatBuffers.gather``.

    Buckets come in the order of first use. A stage waits for its own before its forward pass, in
    evaluation too; who reads or writes parameters otherwise calls ``wait`` before.

    Args:
        buffers: parameters, by bucket.
        stages: of the model, in the order of the forward pass.
    """

    def __init__(self, buffers: FlatBuffers, stages: Sequence[Stage]) -> None:
        self.buffers = buffers
        uses = stages_of_buckets(buffers, stages)
        self._order = sorted(range(len(uses)), key=lambda number: uses[number])
        self._buckets: Sequence[Bucket] = buffers.layout.buckets
        self._under_way: dict[int, Started] = {}
        """Number of the bucket -> what is under way."""
        for number, stage in enumerate(stages):
            needed = [bucket for bucket, used in enumerate(uses) if number in used]
            stage.module.register_forward_pre_hook(
                partial(_before, partial(self._wait_for, needed))
            )

    def start(self) -> None:
        """Begin to gather all parameters."""
        # In the order of first use: the first layer of the next step waits for the first bucket only.
        for number in self._order:
            bucket = self._buckets[number]
            started = start_all_gather(
                self.buffers.bucket_params(bucket), self.buffers.owners(bucket.part).group
            )
            if started is not None:
                self._under_way[number] = started

    def wait(self) -> None:
        """Wait until all parameters are complete on the current stream."""
        self._wait_for(list(self._under_way))

    @property
    def under_way(self) -> int:
        """Number of buckets that were not waited for yet."""
        return len(self._under_way)

    def _wait_for(self, needed: Iterable[int]) -> None:
        for number in needed:
            wait_for(self._under_way.pop(number, None))


def _before(action: Callable[[], None], module: nn.Module, inputs: tuple[Any, ...]) -> None:
    action()
