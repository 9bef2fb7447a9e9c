"""Data-parallel collectives that overlap with the model: gradient reduction, parameter all-gather.

Both work bucket by bucket ([Note: buckets] in ``zero1_layout.py``) and stage by stage. Stages are
the modules that the hidden state passes through, in order.

On two H200, an eager step of a model with experts takes 183.5 ms with both and 205.9 ms without. The
share of time in which only NCCL works falls from 15 % to 4 % (2026-11-22).

[Note: when gradients are complete]
All parameter gradients of a stage and of the later stages are complete when the gradient of that
stage's input arrives. The reason is autograd's order: of the nodes that are ready, autograd runs
the most recently created node first. All nodes of this stage and of later stages were created after
the nodes that computed the stage's input. So no parameter has to report that its gradient is ready,
and a parameter without a gradient delays no bucket. The way in which a gradient was computed does
not matter: through ``.grad``, added to ``main_grad`` by a layer's own backward, or by the replay of
a graph. A parameter that several stages use (tied weights) is complete when the first of these
stages is.

[Note: one order on all ranks]
All ranks must start collectives in the same order, also collectives of different groups. So buckets
start in a fixed order, in the thread of the backward pass, at points that depend on the model only.
Hooks of parameters are no alternative, because autograd runs the hooks of parameters without
``.grad`` in another thread. Some gradients are complete only after the backward pass: the gradients
of the first stage, and gradients that are first summed over tensor-parallel ranks. Their buckets
start after the backward pass.
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
from megatron_packed.distributed.low_precision_sums import MOST_UNDER_WAY, RoundedOnceSum
from megatron_packed.distributed.zero1_layout import Bucket


class Stage(NamedTuple):
    """Section of a model, from the input of its module to the input of the next stage's module."""

    module: nn.Module
    """First module of the section; the hidden state is its first argument."""
    parameters: list[nn.Parameter]
    """All parameters that this section uses; other stages may use them too."""


def stages_of_buckets(buffers: FlatBuffers, stages: Sequence[Stage]) -> list[list[int]]:
    """Return for each bucket the ascending numbers of the stages that use its parameters.

    A parameter that no stage lists counts as used by stage 0.
    """
    used: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters:
            used.setdefault(id(parameter), set()).add(number)
    stages_by_bucket: list[set[int]] = [set() for _ in buffers.layout.buckets]
    for slot in buffers.layout.slots:
        stages_by_bucket[slot.bucket] |= used.get(id(buffers.parameters[slot.name]), {0})
    return [sorted(numbers) for numbers in stages_by_bucket]


class OverlappedReduce:
    """Reduction of gradients that starts while the backward pass still runs.

    See [Note: when gradients are complete] and [Note: one order on all ranks].

    Call ``begin()`` before the forward pass of the last micro-batch, ``join()`` after its backward
    pass, then ``finish()``. The result equals the result of ``buffers.reduce``. Between ``join``
    and ``finish`` no collective is in progress. So the passes before and the work after this point
    may be captured in two separate CUDA graphs. ``finish`` reduces the buckets that the backward
    pass, captured or not, did not start.

    Args:
        buffers: flat buffers with the gradients.
        groups: process groups of this rank.
        stages: stages of the model, in the order of the forward pass.
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
        """Number of buckets whose reduction started during the backward pass of the last step."""
        # Gradients of `late` parameters are summed over tensor-parallel ranks after the backward
        # pass, so the buckets of these parameters cannot start before.
        late_ids = {id(parameter) for parameter in late}
        late_buckets = {
            s.bucket for s in buffers.layout.slots if id(buffers.parameters[s.name]) in late_ids
        }
        first_use = [
            0 if number in late_buckets else used[0]
            for number, used in enumerate(stages_of_buckets(buffers, stages))
        ]
        self._queue = sorted(zip(first_use, buffers.layout.buckets), key=lambda item: -item[0])
        """``(first stage that uses the bucket, bucket)`` pairs, in the order of their start."""
        self._next = len(self._queue)
        self._under_way: list[Started | None] = []
        self._active = False
        for number, stage in enumerate(stages[1:], start=1):
            stage.module.register_forward_pre_hook(partial(self._watch, number))

    def begin(self) -> None:
        """Enable reductions for the last micro-batch, whose backward pass makes gradients final."""
        self._next = 0
        self._under_way = []
        self._active = True

    def join(self) -> None:
        """Make the current stream wait for all reductions started so far."""
        self.begun_in_backward = self._next
        self._active = False
        self._wait()

    def abandon(self) -> None:
        """Discard the started reductions; call this instead of ``join`` after a failed pass."""
        # Do not wait, because after a failed pass other ranks may never join these collectives.
        self._under_way = []
        self._active = False

    def finish(self) -> None:
        """Reduce the remaining buckets and the metric slots.

        When it returns, all reductions are complete on the current stream.
        """
        # Reset the position in every call, because a graph capture calls `finish` again after its
        # warm-up.
        self._next = self.begun_in_backward
        self._start(0)
        tail = self.buffers.tail
        if tail.numel():
            self._under_way.append(start_sum(tail, self.groups.dp_cp.group, own_share=False))
        self._wait()

    def _wait(self) -> None:
        for started in self._under_way:
            wait_for(started)
        self._under_way = []

    def _watch(self, stage: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden = inputs[0]
        if self._active and isinstance(hidden, Tensor) and hidden.requires_grad:
            # A tensor hook runs in the thread of the backward pass. See [Note: one order on all
            # ranks].
            hidden.register_hook(lambda _: self._reached(stage))  # type: ignore[no-untyped-call]

    def _reached(self, stage: int) -> None:
        if self._active:
            with record_function("dp::start_reduce"):
                self._start(stage)

    def _start(self, stage: int) -> None:
        """Start the reduction of all buckets that no stage before ``stage`` uses."""
        while self._next < len(self._queue) and self._queue[self._next][0] >= stage:
            bucket = self._queue[self._next][1]
            self._next += 1
            with torch.no_grad():
                if bucket.part.low:
                    self._finish_earlier()
                self._under_way.append(self.buffers.start_sum(bucket, self.groups))

    def _finish_earlier(self) -> None:
        """Wait for the oldest sum that is rounded once, if as many are under way as may have memory."""
        low = [each for each in self._under_way if each and isinstance(each.work, RoundedOnceSum)]
        if len(low) == MOST_UNDER_WAY:
            wait_for(low[0])
            self._under_way.remove(low[0])


class OverlappedGather:
    """Parameter all-gather that overlaps with the next step; for ``FlatBuffers.gather``.

    Buckets are gathered in the order of their first use. A stage waits for its own buckets before
    its forward pass, also in evaluation. Any other code that reads or writes parameters must call
    ``wait`` before.

    Args:
        buffers: flat buffers with the parameters.
        stages: stages of the model, in the order of the forward pass.
    """

    def __init__(self, buffers: FlatBuffers, stages: Sequence[Stage]) -> None:
        self.buffers = buffers
        uses = stages_of_buckets(buffers, stages)
        self._order = sorted(range(len(uses)), key=lambda number: uses[number])
        self._buckets: Sequence[Bucket] = buffers.layout.buckets
        self._under_way: dict[int, Started] = {}
        """Bucket number -> all-gather in progress."""
        for number, stage in enumerate(stages):
            needed = [bucket for bucket, used in enumerate(uses) if number in used]
            stage.module.register_forward_pre_hook(
                partial(_before, partial(self._wait_for, needed))
            )

    def start(self) -> None:
        # Start the buckets in the order of their first use. The first layer of the next step then
        # waits only for the first bucket.
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
        """Number of buckets whose all-gather has started and has not been waited for."""
        return len(self._under_way)

    def _wait_for(self, needed: Iterable[int]) -> None:
        for number in needed:
            wait_for(self._under_way.pop(number, None))


def _before(action: Callable[[], None], module: nn.Module, inputs: tuple[Any, ...]) -> None:
    action()
