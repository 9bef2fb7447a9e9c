"""Accumulation of ``.grad`` into flat gradients and their data-parallel reduction.

[Note: main_grad protocol]
Every parameter of a ``FlatBuffers`` has an attribute ``main_grad``, a view into a flat buffer of
float32, or of bf16 ([Note: gradients in bf16] in ``zero1_layout.py``). A gradient reaches
``main_grad`` in one of two ways. A tied weight can use both ways in one backward pass.

* autograd accumulates into ``.grad``. The hook of this module then adds ``.grad`` to ``main_grad``
  and sets ``.grad`` to None at once. So only a few parameters hold a second gradient at any time,
  and micro-batches accumulate in the dtype of ``main_grad``.
* A layer's own backward adds the gradient to ``main_grad`` and returns None for the parameter.
  The hook then does not run, because autograd accumulates nothing. So no gradient is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups


def accumulate_into_main_grad(parameter: Tensor) -> None:
    """Add ``parameter.grad`` of any dtype to ``parameter.main_grad``, then drop it."""
    if parameter.grad is not None:
        # Add in place, because captured graphs and collectives use the address of `main_grad`.
        with torch.no_grad():
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        # Free `.grad` at once. Otherwise every parameter would have a second gradient until the end
        # of the step.
        parameter.grad = None


def attach_accumulation(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Register ``accumulate_into_main_grad`` as post-accumulate-grad hook of each parameter.

    See [Note: main_grad protocol].
    """
    return [
        parameter.register_post_accumulate_grad_hook(accumulate_into_main_grad)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]


def all_reduce_gradients(storage: Tensor, groups: ParallelGroups, expert_numel: int = 0) -> None:
    """All-reduce the flat gradients and the extra slots after them over the data-parallel ranks.

    The result is a sum, not a mean, because each loss is already divided by the number of target
    tokens of the global batch. There is one all-reduce over ``dp_cp``, and one over ``expert_dp``
    if there are expert gradients. On CUDA the all-reduces are queued on the current stream.

    Args:
        storage: ``(gradients + extras,)`` float32, summed in place.
        groups: process groups of this rank.
        expert_numel: number of elements at the start of ``storage`` that are gradients of experts.
            The ranks with a copy of an expert are ``expert_dp``, not ``dp_cp``.
    """
    # Gradients of experts come first, so that each group reduces one slice without a copy.
    if expert_numel:
        all_reduce_sum(storage[:expert_numel], groups.expert_dp.group)
    all_reduce_sum(storage[expert_numel:], groups.dp_cp.group)
