"""The calling convention that apex's and TransformerEngine's capturable Adam kernels share.

Both take beta1 and beta2 as float32 and subtract them from 1 in float32: for beta2 = 0.999 their
second moments are off by 1.3e-5 of themselves against torch's. The bias correction carries the same
error, so parameters hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_packed.optim.adamw import Control, Slices

_DECOUPLED_WEIGHT_DECAY = 1
_BIAS_CORRECTION = 1


def launch(
    apply: Callable[..., Any],
    kernel: Callable[..., Any],
    slices: Sequence[Slices],
    control: Control,
) -> None:
    """Call ``apply(kernel, noop_flag, [grads, params, exp_avgs, exp_avg_sqs], ...)`` once per
    weight decay.

    The kernels want int32 for flag and step and one-element vectors throughout; the conversions are
    device work.
    """
    noop_flag = control.skip.to(torch.int32).reshape(1)
    step = control.step.to(torch.int32).reshape(1)
    lr = control.lr.reshape(1)
    divisor = control.grad_divisor
    inv_scale = torch.ones_like(lr) if divisor is None else divisor.reciprocal().reshape(1)
    for group in slices:
        apply(
            kernel,
            noop_flag,
            [list(group.grads), list(group.params), list(group.exp_avgs), list(group.exp_avg_sqs)],
            lr,
            control.beta1,
            control.beta2,
            control.eps,
            step,
            _DECOUPLED_WEIGHT_DECAY,
            _BIAS_CORRECTION,
            group.weight_decay,
            inv_scale,
        )
