"""A chunk's softmax, loss and logit gradient where the vocabulary is spread over ranks.

Backends differ in the two passes over a rank's logits, before and after the two small collectives
of a chunk:

    largest_C, total_C, label_C = statistics(own logits)     the maximum, sum of exp(z - maximum), the label's logit
    all-reduce (max) of largest_C;  all-reduce (sum) of total_C, rescaled, and of label_C, 0 where
    another rank has it
    dlogits = gradient(own logits, the whole vocabulary's maximum and sum)       (in place)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import VocabShard
from megatron_packed.ops.cross_entropy.chunked import Step

Statistics = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""``statistics(logits_CV, row_C, real)``: three ``(C,)`` in fp32 (fp64), over the first ``real``
columns.

Without any, the maximum is finite and the sum 0. ``row_C`` int64: the label's column, -1 where it
is none of these (then any number will do for its logit).
"""
Gradient = Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor, Tensor], None]
"""``gradient(logits_CV, row_C, real, largest_C, total_C, scale_C, loss_mask_C)``, in place.

``(exp(z - largest) / total - [v = row]) * scale``; 0 in columns beyond ``real`` and in rows whose
mask is 0.
"""


def split_step(statistics: Statistics, gradient: Gradient, shard: VocabShard) -> Step:
    """Return the ``chunked.Step`` of a part of the vocabulary."""
    return partial(_step, statistics, gradient, shard)


def _step(
    statistics: Statistics,
    gradient: Gradient,
    shard: VocabShard,
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_mask_C: Tensor,
    grad_scale: Tensor | None,
    vocab_size: int,
    loss_C: Tensor,
    with_gradient: bool,
) -> None:
    real = min(max(vocab_size - shard.first_row, 0), logits_CV.shape[1])
    labels_C = labels_C.long()
    row_C = labels_C - shard.first_row
    mine_C = (row_C >= 0) & (row_C < real)
    row_C = torch.where(mine_C, row_C, -1)
    own_largest_C, own_total_C, label_C = statistics(logits_CV, row_C, real)
    largest_C = own_largest_C.clone()
    shard.max_over_ranks(largest_C)
    sums_2C = torch.stack(
        [
            own_total_C * (own_largest_C - largest_C).exp(),
            torch.where(mine_C, label_C - largest_C, 0.0),
        ]
    )
    shard.sum_over_ranks(sums_2C)
    total_C, label_C = sums_2C.unbind()
    known_C = (labels_C >= 0) & (labels_C < vocab_size)
    nll_C = torch.where(known_C, total_C.log() - label_C, float("nan"))
    # where, not a product: a NaN in a row without a target must not reach the sum
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if with_gradient:
        scale_C = loss_mask_C if grad_scale is None else loss_mask_C * grad_scale
        gradient(logits_CV, row_C, real, largest_C, total_C, scale_C, loss_mask_C)
