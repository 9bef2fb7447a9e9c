"""Reduction of gradients over data-parallel ranks: from autograd's ``.grad`` into the flat float32
gradients, and from there through one all-reduce or reduce-scatter.

[Note: main_grad protocol]
Every parameter of a ``FlatBuffers`` carries ``main_grad``, a float32 view into one flat buffer. A
gradient reaches it in one of two ways, and a tied weight uses both in one backward pass:

* autograd accumulates into ``.grad``; the hook here adds that to ``main_grad`` and drops it at
  once, so that at most a few parameters hold a second gradient at any time, and micro-batches
  accumulate in float32;
* a layer's own backward adds to ``main_grad`` and returns None for the parameter: autograd then has
  nothing to accumulate and the hook does not run, so nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_packed.distributed.collectives import all_reduce_sum, reduce_scatter_in_place
from megatron_packed.distributed.groups import ParallelGroups


def accumulate_into_main_grad(parameter: Tensor) -> None:
    """Add ``parameter.grad`` to ``parameter.main_grad`` (float32, whatever the dtype of the former)
    and drop it.
    """
    if parameter.grad is not None:
        # In place: captured graphs and collectives know the address of `main_grad`.
        with torch.no_grad():
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        # Dropped at once, or every parameter would hold a second gradient until the step's end.
        parameter.grad = None


def attach_accumulation(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Call ``accumulate_into_main_grad`` whenever autograd has accumulated into one of
    ``parameters``.

    Reads: [Note: main_grad protocol].
    """
    return [
        parameter.register_post_accumulate_grad_hook(accumulate_into_main_grad)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]


def all_reduce_gradients(storage: Tensor, groups: ParallelGroups, expert_numel: int = 0) -> None:
    """Sum the flat gradients and the slots behind them over all ranks with the same parameters, one
    all-reduce each.

    A sum and no mean: losses are already divided by the target tokens of the whole global batch.

    Args:
        storage: ``(gradients + extras,)`` float32, summed in place. Queued on the current stream on
        CUDA.
        expert_numel: elements in front that are weights of experts, whose copies are on other
            ranks.
    """
    # Experts lie in front, so that one slice goes to each group and nothing is copied.
    if expert_numel:
        all_reduce_sum(storage[:expert_numel], groups.expert_dp_group)
    all_reduce_sum(storage[expert_numel:], groups.dp_cp_group)


def reduce_scatter_gradients(
    spans: Iterable[tuple[Tensor, dist.ProcessGroup | None]], tail: Tensor, groups: ParallelGroups
) -> None:
    """Sum each span over its group, every rank its own equal share of it; sum ``tail`` everywhere.

    Args:
        spans: 1-D float32 gradients, in place. What lies outside of a rank's own share is undefined
        afterwards.
        tail: the slots behind the gradients, as in ``all_reduce_gradients``.
    """
    # Metrics ride in the tail: every rank needs their sum, whoever owns the gradients.
    for span, group in spans:
        reduce_scatter_in_place(span, group)
    if tail.numel():
        all_reduce_sum(tail, groups.dp_cp_group)
