"""Softmax, loss and logit gradient of a chunk if the vocabulary is split over ranks.

A chunk needs two passes over the rank's logits and two small collectives between them. The backends
differ in the two passes:

1. ``statistics(own logits)``: for each token the maximum, the sum of exp(z - maximum) and the
   label's logit.
2. All-reduce (max) of the maxima. All-reduce (sum) of the rescaled sums and of the label's logits,
   which are 0 on ranks that do not have the label's row.
3. ``gradient(own logits, maximum and sum of the complete vocabulary)``: the logit gradient, in
   place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import Step, VocabShard

Statistics = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Signature ``statistics(logits_CV, row_C, real)``, over the first ``real`` columns.

The function returns the maximum, the sum and the label's logit, each ``(C,)`` in fp32 (fp64 for fp64
inputs). If ``real`` is 0, the maximum is finite and the sum is 0. ``row_C`` (int64) is the label's
column, or -1 if this rank does not have it; the returned logit may then have any value.
"""
Gradient = Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor, Tensor], None]
"""Signature ``gradient(logits_CV, row_C, real, largest_C, total_C, scale_C, loss_mask_C)``.

The function overwrites the logits by ``(exp(z - largest) / total - [v = row]) * scale``, with 0 in
columns from ``real`` on and in rows of mask 0.
"""


def split_step(statistics: Statistics, gradient: Gradient, shard: VocabShard) -> Step:
    """Return a ``api.Step`` for a rank that has a part of the vocabulary."""
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
    # Use torch.where, not a product: a NaN in a row without a target must not reach the sum.
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if with_gradient:
        scale_C = loss_mask_C if grad_scale is None else loss_mask_C * grad_scale
        gradient(logits_CV, row_C, real, largest_C, total_C, scale_C, loss_mask_C)
