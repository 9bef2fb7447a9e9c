"""Plain PyTorch softmax and loss of a chunk, fp32 (fp64 for fp64 inputs). The oracle, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import Inputs
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
) -> tuple[Tensor, Tensor]:
    return run_chunked(
        softmax_step,
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
