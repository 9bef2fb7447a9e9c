"""AdamW over flat slices: inputs of every implementation, the reference, and torch's kernel.

The update of a parameter p with gradient g at step t, in float32 (decoupled weight decay, as in
torch and Megatron)::

    g <- g / grad_divisor
    m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
    p <- p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

[Note: predicated step]
``skip`` is a device flag. If it is 1, p, m, v and t do not change by a single bit. The host learns
of a non-finite gradient one step late, and the weights are still valid then. Learning rate, step
and flag are device tensors, so one captured graph works for every step. An implementation that
cannot read them on the device is refused.

[Note: weight decay on the device]
The kernels take the weight decay as a number of the host, which a graph would freeze. A weight decay
that changes between steps is therefore a device tensor. `kernel_decay` then applies it to the
parameters, and the kernel gets 0. This reads and writes the masters once more, so a constant weight
decay stays an argument of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op
from megatron_packed.torch_private import fused_adamw_

MAX_SLICE_ELEMENTS = 2**30
"""Largest number of elements of a slice: TransformerEngine's and apex's kernels count elements in
32 bits.
"""

MAX_CONVERTED_ELEMENTS = 2**26
"""Largest number of elements of a slice whose gradients are bf16; a copy in float32 has 256 MiB."""


@dataclass(frozen=True, kw_only=True)
class AdamWInputs:
    """Device for which an implementation is chosen."""

    device_type: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Lists of float32 1-D tensors with one weight decay; the i-th tensors have equal lengths.

    All gradients may be bf16 instead; see `run_on`.
    """

    weight_decay: float | Tensor
    """A 0-d float32 tensor if it changes between steps. See [Note: weight decay on the device]."""
    params: Sequence[Tensor]
    """Master weights, updated in place."""
    grads: Sequence[Tensor]
    """Gradients; an implementation may overwrite them with the divided gradients."""
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]

    def in_float32(self) -> Iterator[Slices]:
        """Yield the slices one by one, each with a copy of its gradients in float32."""
        lists = {name: value for name, value in vars(self).items() if isinstance(value, Sequence)}
        for number, grad in enumerate(self.grads):
            one: dict[str, Any] = {
                name: value[number : number + 1] for name, value in lists.items()
            }
            yield replace(self, **{**one, "grads": [grad.float()]})


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """Settings of one step. The tensors are 0-d float32 on the device of the slices."""

    lr: Tensor
    step: Tensor
    """Number of this step, from 1; not advanced in a skipped step. Exact up to 2**24 steps."""
    skip: Tensor
    """1.0: the step changes no tensor; 0.0: the step updates the parameters."""
    grad_divisor: Tensor | None
    """Divisor of the gradients; None if they are not clipped."""
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
"""Op with ``run(slices: Sequence[Slices], control: Control) -> None``.

``torch`` runs on every device, so 'auto' chooses it.
"""


def run_on(
    slices: Sequence[Slices],
    run: Callable[[Sequence[Slices], Control], None],
    control: Control,
) -> None:
    """Update all slices with an implementation that reads float32 gradients.

    Gradients in bf16 are converted slice by slice, so that a copy of few of them exists at a time.
    """
    low = [group for group in slices if group.grads[0].dtype == torch.bfloat16]
    if len(low) < len(slices):
        run([group for group in slices if group not in low], control)
    for group in low:
        for one in group.in_float32():
            run([one], control)


def check_constants(beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Check the constants of the update.

    Raises:
        ValueError: a constant is out of range.
    """
    for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} ({beta}) must be in [0, 1).")
    if eps <= 0:
        raise ValueError(
            f"adam_eps ({eps}) must be positive, because the second moment of padding is zero."
        )
    if weight_decay < 0:
        raise ValueError(f"weight_decay ({weight_decay}) must not be negative.")


def kernel_decay(group: Slices, control: Control) -> float:
    """Return the weight decay for a kernel that takes a number.

    A weight decay on the device is applied to the parameters, and the result is 0.
    See [Note: weight decay on the device].
    """
    if not isinstance(group.weight_decay, Tensor):
        return group.weight_decay
    decay_factor = 1 - control.lr * group.weight_decay
    # In a skipped step the factor is 1, which changes no bit.
    factor = torch.where(control.skip.bool(), torch.ones_like(decay_factor), decay_factor)
    for param in group.params:
        param.mul_(factor)
    return 0.0


class TorchFused:
    """Implementation by torch's fused kernel, CPU and CUDA.

    ``torch.optim.AdamW(fused=True)`` calls ``torch._fused_adamw_``. In torch 2.11 to 2.13, the kernel

    * reads ``lr`` from a float32 tensor on the device (on the CPU it reads the value on the host);
    * returns without a change if ``found_inf`` is 1;
    * divides gradients by ``grad_scale``, if given, and writes the quotients back;
    * only reads ``state_steps``, which must already count this step. torch.optim adds 1 before the call
      and subtracts ``found_inf`` after it. ``Control.step`` already includes both, and one tensor is
      used for all slices.

    On CUDA (2.11, H200), second moments with beta2 = 0.999 have relative errors up to 1.3e-5. There
    are no such errors if ``1 - beta2`` is exact in float32. So the kernel computes ``1 - beta2`` in
    float32, as the kernels in ``adamw_multi_tensor.py`` do.
    """

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        if inputs.device_type not in ("cpu", "cuda"):
            return [f"torch._fused_adamw_ is checked on cpu and cuda, not on {inputs.device_type}."]
        return []

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices, with one call per weight decay; clipped gradients are written back.

        See [Note: predicated step].
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
                weight_decay=kernel_decay(group, control),
                eps=control.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=control.grad_divisor,
                found_inf=control.skip,
            )


class Reference:
    """Implementation of the formulas in plain PyTorch, with which tests compare the kernels."""

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        return []

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices; gradients are not changed.

        See [Note: predicated step]. The method allocates several temporaries of a slice's size.
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
    weight_decay: float | Tensor,
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
