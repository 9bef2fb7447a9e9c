"""AdamW in plain PyTorch, step by step as in ``adamw.py``: the oracle of the fused ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_packed.optim.adamw import Control, Inputs, Slices


def not_supported_reasons(inputs: Inputs) -> list[str]:
    return []


@torch.no_grad()
def run(slices: Sequence[Slices], control: Control) -> None:
    """Reads: [Note: predicated step]. Uses several temporaries of a slice's size; gradients are
    left as they are.
    """
    for group in slices:
        for param, grad, exp_avg, exp_avg_sq in zip(
            group.params, group.grads, group.exp_avgs, group.exp_avg_sqs
        ):
            _update(param, grad, exp_avg, exp_avg_sq, group.weight_decay, control)


def _update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight_decay: float,
    control: Control,
) -> None:
    beta1, beta2 = control.beta1, control.beta2
    if control.grad_divisor is not None:
        grad = grad / control.grad_divisor
    new_exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    new_exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    step = control.step.to(torch.float64)
    correction1 = (1 - beta1**step).to(torch.float32)
    correction2 = (1 - beta2**step).to(torch.float32)
    denominator = (new_exp_avg_sq / correction2).sqrt() + control.eps
    decayed = param * (1 - control.lr * weight_decay)
    new_param = decayed - control.lr * (new_exp_avg / correction1) / denominator
    skip = control.skip.bool()
    for old, new in ((param, new_param), (exp_avg, new_exp_avg), (exp_avg_sq, new_exp_avg_sq)):
        old.copy_(torch.where(skip, old, new))
