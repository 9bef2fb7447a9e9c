"""Softmax and loss of a chunk in plain PyTorch, for CPUs and as the reference in tests.

The arithmetic is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import VocabShard
from megatron_packed.ops.cross_entropy.chunked import run_chunked
from megatron_packed.ops.cross_entropy.split import split_step


def run(*tensors: Tensor, shard: VocabShard | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Run the op; see ``api.linear_cross_entropy``."""
    step = softmax_step if shard is None else split_step(statistics, gradient, shard)
    return run_chunked(step, *tensors, **options)


def softmax_step(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_mask_C: Tensor,
    grad_scale: Tensor | None,
    vocab_size: int,
    loss_C: Tensor,
    with_gradient: bool,
) -> None:
    """Compute losses and logit gradients of a chunk; see ``chunked.Step``."""
    real_CV = logits_CV[:, :vocab_size]
    log_p_CV = real_CV.to(torch.promote_types(real_CV.dtype, torch.float32)).log_softmax(-1)
    label_C1 = labels_C.long().clamp(0, vocab_size - 1)[:, None]
    known_C = (labels_C >= 0) & (labels_C < vocab_size)
    nll_C = torch.where(known_C, -log_p_CV.gather(1, label_C1)[:, 0], float("nan"))
    # Use torch.where, not a product: a NaN in a row without a target must not reach the sum.
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if not with_gradient:
        return
    scale_C1 = (loss_mask_C if grad_scale is None else loss_mask_C * grad_scale)[:, None]
    gradient_CV = log_p_CV.exp_()
    gradient_CV.scatter_(1, label_C1, gradient_CV.gather(1, label_C1) - 1)
    real_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, gradient_CV * scale_C1))
    logits_CV[:, vocab_size:].zero_()


def statistics(logits_CV: Tensor, row_C: Tensor, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax statistics of a rank's logits; see ``split.Statistics``."""
    precise_CV = _precise(logits_CV, real)
    largest_C = precise_CV.amax(-1).clamp(min=torch.finfo(precise_CV.dtype).min)
    label_C = precise_CV.gather(1, row_C.clamp(min=0)[:, None])[:, 0]
    return largest_C, (precise_CV - largest_C[:, None]).exp_().sum(-1), label_C


def gradient(
    logits_CV: Tensor,
    row_C: Tensor,
    real: int,
    largest_C: Tensor,
    total_C: Tensor,
    scale_C: Tensor,
    loss_mask_C: Tensor,
) -> None:
    """Overwrite a rank's logits by their gradient; see ``split.Gradient``."""
    p_CV = (_precise(logits_CV, real) - largest_C[:, None]).exp_() / total_C[:, None]
    p_CV.scatter_add_(1, row_C.clamp(min=0)[:, None], -(row_C >= 0)[:, None].to(p_CV.dtype))
    logits_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, p_CV * scale_C[:, None]))
    logits_CV[:, real:].zero_()


def _precise(logits_CV: Tensor, real: int) -> Tensor:
    """Return a copy in fp32 (fp64 for fp64 inputs) with -inf in columns from ``real`` on."""
    precise_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32), copy=True)
    precise_CV[:, real:] = float("-inf")
    return precise_CV
