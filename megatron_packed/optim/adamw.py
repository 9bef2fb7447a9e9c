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

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op
from megatron_packed.optim.master_remainders import join_masters, split_masters
from megatron_packed.optim.stochastic_rounding import (
    ElementNumbers,
    round_stochastically,
    words_of,
)
from megatron_packed.torch_private import fused_adamw_

MAX_SLICE_ELEMENTS = 2**30
"""Largest number of elements of a slice: TransformerEngine's and apex's kernels count elements in
32 bits.
"""

MAX_CONVERTED_ELEMENTS = 2**26
"""Largest number of elements of a slice whose gradients are bf16; a copy in float32 has 256 MiB."""


@dataclass(frozen=True, kw_only=True)
class AdamWInputs:
    """Device and dtypes for which an implementation is chosen."""

    device_type: str
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    remainders: bool = False
    """True if masters are bf16 weights with remainders (``master_remainders.py``)."""

    @property
    def wide(self) -> bool:
        """True if the whole state is float32."""
        return self.exp_avg_dtype == self.exp_avg_sq_dtype == torch.float32 and not self.remainders


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Lists of 1-D tensors with one weight decay; the i-th tensors have equal lengths."""

    weight_decay: float | Tensor
    """A 0-d float32 tensor if it changes between steps. See [Note: weight decay on the device]."""
    params: Sequence[Tensor]
    """Float32 master weights, or bf16 weights with ``remainders``; updated in place."""
    grads: Sequence[Tensor]
    """Float32 or bf16 gradients, of one dtype; see `run_on`. An implementation may overwrite them
    with the divided gradients.
    """
    exp_avgs: Sequence[Tensor]
    """First moments, float32 or bf16."""
    exp_avg_sqs: Sequence[Tensor]
    """Second moments, float32 or bf16."""
    weights: Sequence[Tensor] = ()
    """Bf16 weights that the implementation writes beside their masters; empty if it does not."""
    remainders: Sequence[Tensor] = ()
    """Int16 remainders of the weights; empty if ``params`` are the masters."""
    numbers: Sequence[ElementNumbers] = ()
    """Numbers of the elements, for an implementation that needs them; else empty."""
    stochastic: bool = False
    """True if bf16 moments are rounded stochastically, else to the nearest."""

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
        GPUBackend("triton", "megatron_packed.optim.adamw_triton:OnePass"),
        Backend("reference", f"{__name__}:Reference"),
    ),
)
"""Op with ``run(slices: Sequence[Slices], control: Control) -> None``.

``torch`` runs on every device, so 'auto' chooses it for a float32 state. A state of lower precision
is updated by ``triton`` on a GPU and by ``reference`` on a CPU. An implementation with ``one_pass``
also reads bf16 gradients and writes bf16 weights; for the others see `run_on`.
"""


def run_on(
    run: Callable[[Sequence[Slices], Control], None],
    slices: Sequence[Slices],
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


def wide_state_reasons(inputs: AdamWInputs) -> list[str]:
    """Return why a kernel that needs a float32 state cannot be used; empty if it can."""
    return [] if inputs.wide else ["the kernel needs float32 masters and moments"]


def bias_corrections(control: Control) -> tuple[Tensor, Tensor]:
    """Return ``1 - beta^t`` of both moments, 0-d float32 on the device."""
    step = control.step.to(torch.float64)
    return (
        (1 - control.beta1**step).to(torch.float32),
        (1 - control.beta2**step).to(torch.float32),
    )


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
        reasons = wide_state_reasons(inputs)
        if inputs.device_type not in ("cpu", "cuda"):
            reasons.append(
                f"torch._fused_adamw_ is checked on cpu and cuda, not on {inputs.device_type}."
            )
        return reasons

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
    """Implementation of the formulas in plain PyTorch, with which tests compare the kernels.

    It is also the implementation of a state of lower precision on the CPU.
    """

    one_pass = True

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        if inputs.wide or inputs.device_type != "cuda":
            return []
        return ["plain PyTorch needs several float32 copies of a low-precision state on the device"]

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices; gradients are not changed.

        See [Note: predicated step]. The method allocates several temporaries of a slice's size.
        """
        for group in slices:
            for at in range(len(group.params)):
                _update(group, at, control)


def _update(group: Slices, at: int, control: Control) -> None:
    param, grad = group.params[at], _at_least_float32(group.grads[at])
    exp_avg, exp_avg_sq = group.exp_avgs[at], group.exp_avg_sqs[at]
    remainder = group.remainders[at] if group.remainders else None
    master = param if remainder is None else join_masters(param, remainder)
    beta1, beta2 = control.beta1, control.beta2
    if control.grad_divisor is not None:
        grad = grad / control.grad_divisor
    new_exp_avg = beta1 * _at_least_float32(exp_avg) + (1 - beta1) * grad
    new_exp_avg_sq = beta2 * _at_least_float32(exp_avg_sq) + (1 - beta2) * grad.square()
    correction1, correction2 = bias_corrections(control)
    denominator = (new_exp_avg_sq / correction2).sqrt() + control.eps
    decayed = master * (1 - control.lr * group.weight_decay)
    new_master = decayed - control.lr * (new_exp_avg / correction1) / denominator
    low = torch.bfloat16 in (exp_avg.dtype, exp_avg_sq.dtype)
    if group.stochastic and low:
        keys, numbers = group.numbers[at].of_slice(len(grad))
        words = words_of(keys, control.step, numbers)
        new_exp_avg = _rounded(new_exp_avg, exp_avg.dtype, words)
        new_exp_avg_sq = _rounded(new_exp_avg_sq, exp_avg_sq.dtype, words >> 16)
    changes = [(exp_avg, new_exp_avg), (exp_avg_sq, new_exp_avg_sq)]
    if remainder is None:
        changes.append((param, new_master))
    else:
        weight, rest = split_masters(new_master)
        changes += [(param, weight), (remainder, rest)]
    if group.weights:
        changes.append((group.weights[at], new_master))
    skip = control.skip.bool()
    for old, new in changes:
        old.copy_(torch.where(skip, old, new.to(old.dtype)))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype == torch.bfloat16 else values


def _rounded(moments: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """Return moments in their dtype, rounded stochastically with the lowest 16 bits of ``words``."""
    return round_stochastically(moments, words & 0xFFFF) if dtype == torch.bfloat16 else moments
