"""Plain PyTorch softmax and loss of a chunk, fp32 (fp64 for fp64 inputs). The oracle, and the CPU path."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import Inputs, VocabShard
from megatron_packed.ops.cross_entropy.chunked import run_chunked


def not_supported_reasons(inputs: Inputs) -> list[str]:
    return []


def run(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    grad_scale: Tensor | None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    return run_chunked(
        softmax_step if shard is None else partial(split_softmax_step, shard),
        hidden_TD,
        weight_VD,
        labels_T,
        loss_mask_T,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        grad_scale=grad_scale,
    )


def softmax_step(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_mask_C: Tensor,
    grad_scale: Tensor | None,
    vocab_size: int,
    loss_C: Tensor,
    with_gradient: bool,
) -> None:
    """See ``chunked.Step``."""
    real_CV = logits_CV[:, :vocab_size]
    log_p_CV = real_CV.to(torch.promote_types(real_CV.dtype, torch.float32)).log_softmax(-1)
    label_C1 = labels_C.long().clamp(0, vocab_size - 1)[:, None]
    known_C = (labels_C >= 0) & (labels_C < vocab_size)
    nll_C = torch.where(known_C, -log_p_CV.gather(1, label_C1)[:, 0], float("nan"))
    # where, not a product: a NaN in a row without a target must not reach the sum
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if not with_gradient:
        return
    scale_C1 = (loss_mask_C if grad_scale is None else loss_mask_C * grad_scale)[:, None]
    gradient_CV = log_p_CV.exp_()
    gradient_CV.scatter_(1, label_C1, gradient_CV.gather(1, label_C1) - 1)
    real_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, gradient_CV * scale_C1))
    logits_CV[:, vocab_size:].zero_()


def split_softmax_step(
    shard: VocabShard,
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_mask_C: Tensor,
    grad_scale: Tensor | None,
    vocab_size: int,
    loss_C: Tensor,
    with_gradient: bool,
) -> None:
    """``softmax_step`` for a part of the vocabulary: two small collectives for each chunk."""
    rows = logits_CV.shape[1]
    real = min(max(vocab_size - shard.first_row, 0), rows)
    precise_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32), copy=True)
    precise_CV[:, real:] = float("-inf")
    largest_C = precise_CV.amax(-1)
    shard.max_over_ranks(largest_C)
    precise_CV -= largest_C[:, None]
    row_C = labels_C.long() - shard.first_row
    mine_C = (row_C >= 0) & (row_C < real)
    row_C1 = row_C.clamp(0, rows - 1)[:, None]
    label_C = torch.where(mine_C, precise_CV.gather(1, row_C1)[:, 0], 0.0)
    exp_CV = precise_CV.exp_()
    sums_2C = torch.stack([exp_CV.sum(-1), label_C])
    shard.sum_over_ranks(sums_2C)
    total_C, label_C = sums_2C.unbind()
    known_C = (labels_C >= 0) & (labels_C < vocab_size)
    nll_C = torch.where(known_C, total_C.log() - label_C, float("nan"))
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if not with_gradient:
        return
    scale_C1 = (loss_mask_C if grad_scale is None else loss_mask_C * grad_scale)[:, None]
    gradient_CV = exp_CV.div_(total_C[:, None])
    gradient_CV.scatter_add_(1, row_C1, -mine_C[:, None].to(gradient_CV.dtype))
    logits_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, gradient_CV * scale_C1))
    logits_CV[:, real:].zero_()
