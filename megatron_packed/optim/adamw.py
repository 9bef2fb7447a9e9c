"""AdamW over flat slices: what every implementation receives, the reference, and torch's kernel.

The update of a parameter p with gradient g at step t, in float32 (decoupled weight decay, as in
torch and Megatron)::

    g <- g / grad_divisor
    m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
    p <- p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

[Note: predicated step]
``skip`` is a device flag. When it is 1, p, m, v and t keep every bit: the host learns of a
non-finite gradient one step late and finds clean weights. Learning rate, step and flag are device
tensors, so one captured graph serves every step. An implementation that cannot be told so on the
device is refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op
from megatron_packed.torch_private import fused_adamw_

MAX_SLICE_ELEMENTS = 2**30
"""Kernels of TransformerEngine and apex count a tensor's elements in 32 bits; longer slices are
passed in pieces.
"""


@dataclass(frozen=True, kw_only=True)
class AdamWInputs:
    """Device that an implementation is chosen for."""

    device_type: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Float32 1-D tensors of equal lengths, list by list, that share one weight decay."""

    weight_decay: float
    params: Sequence[Tensor]
    """Masters: updated in place."""
    grads: Sequence[Tensor]
    """Read; may be overwritten with the divided gradients."""
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """Numbers of one step. The tensors are 0-d float32 on the device of the slices."""

    lr: Tensor
    step: Tensor
    """Number of this step, from 1; already advanced unless ``skip``. Exact up to 2**24 steps."""
    skip: Tensor
    """1.0: change nothing; 0.0: update."""
    grad_divisor: Tensor | None
    """None when gradients are not clipped."""
    beta1: float
    beta2: float
    eps: float


OP = Op(
    "adamw",
    (
        Backend("torch", f"{__name__}:TorchFused"),
        Backend("transformer_engine", "megatron_packed.optim.adamw_multi_tensor:TransformerEngine"),
        Backend("apex", "megatron_packed.optim.adamw_multi_tensor:Apex"),
        Backend("reference", f"{__name__}:Reference", automatic=False),
    ),
)
"""``run(slices: Sequence[Slices], control: Control) -> None``. ``torch`` serves every device, so
'auto' chooses it.
"""


def check_constants(beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Check the constants of the update.

    Raises:
        ValueError: one is out of range.
    """
    for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} ({beta}) must lie in [0, 1).")
    if eps <= 0:
        raise ValueError(f"adam_eps ({eps}) must be positive: padding has a zero second moment.")
    if weight_decay < 0:
        raise ValueError(f"weight_decay ({weight_decay}) must not be negative.")


class TorchFused:
    """Implementation by torch's fused kernel, CPU and CUDA.

    ``torch._fused_adamw_`` is what ``torch.optim.AdamW(fused=True)`` calls. In torch 2.11 to 2.13 it

    * reads ``lr`` from a float32 tensor on the device (on the CPU it reads the value on the host);
    * returns without touching anything where ``found_inf`` is 1;
    * divides gradients by ``grad_scale`` and writes the quotients back, when one is given;
    * only reads ``state_steps``, which must already count this step. torch.optim adds 1 before the call
      and subtracts ``found_inf`` after it; our ``step`` arrives with both done, and one tensor serves
      all slices.

    On CUDA (2.11, H200) its second moments with beta2 = 0.999 are up to 1.3e-5 off, relatively, and
    with a beta2 whose distance from 1 is exact in float32 they are not: the mark of ``1 - beta2`` taken
    in float32, as in ``adamw_multi_tensor.py``.
    """

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        if inputs.device_type not in ("cpu", "cuda"):
            return [f"torch._fused_adamw_ is checked on cpu and cuda, not on {inputs.device_type}."]
        return []

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Reads: [Note: predicated step]. One call per weight decay; clipped gradients are written
        back.
        """
        for group in slices:
            fused_adamw_(
                list(group.params),
                list(group.grads),
                list(group.exp_avgs),
                list(group.exp_avg_sqs),
                [],
                [control.step] * len(group.params),
                lr=control.lr,
                beta1=control.beta1,
                beta2=control.beta2,
                weight_decay=group.weight_decay,
                eps=control.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=control.grad_divisor,
                found_inf=control.skip,
            )


class Reference:
    """Implementation in plain PyTorch, formula by formula: the oracle of the fused ones."""

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        return []

    @staticmethod
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
