# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""AdamW in one pass over the state: each byte is read once and written once.

One program updates one run of `ElementNumbers`, 1,024 elements at a time. It reads the gradient, the
moments and the master, computes in float32, and writes the moments, the master and the bf16 weight.
Moments may be bf16, and masters may be a bf16 weight with a 16-bit remainder
(``master_remainders.py``). The draws of stochastic rounding are those of ``stochastic_rounding.py``.

All starts are multiples of 64 elements, which the compiler must know to load vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_mode import device_reasons
from megatron_packed.optim.adamw import AdamWInputs, Control, Slices, bias_corrections
from megatron_packed.optim.stochastic_rounding import (
    COLUMNS,
    ELEMENT_GAMMA,
    MULTIPLIERS,
    SEGMENTS,
    SHIFTS,
    STEP_GAMMA,
)

_BLOCK = tl.constexpr(1024)
_SEGMENTS, _COLUMNS = tl.constexpr(SEGMENTS), tl.constexpr(COLUMNS)
_STEP_GAMMA, _ELEMENT_GAMMA = tl.constexpr(STEP_GAMMA), tl.constexpr(ELEMENT_GAMMA)
_MULTIPLIER_1, _MULTIPLIER_2 = (tl.constexpr(word) for word in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(bits) for bits in SHIFTS)
_WARPS = 4
"""4 warps were faster than 8 in a first version of the kernel, on one H200."""


class OnePass:
    """Implementation by a kernel that reads and writes each byte of the state once."""

    one_pass = True

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        return device_reasons(inputs.device_type)

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices with one launch for each; gradients are not changed.

        See [Note: predicated step].
        """
        corrections = bias_corrections(control)
        for group in slices:
            for at in range(len(group.params)):
                _update(group, at, control, corrections)


def _update(group: Slices, at: int, control: Control, corrections: tuple[Tensor, Tensor]) -> None:
    """Update the slices of number ``at``; a tensor that the step does not have is not read."""
    params, numbers = group.params[at], group.numbers[at]
    if not len(numbers.runs):
        return
    changes = isinstance(group.weight_decay, Tensor)
    _adamw_kernel[(len(numbers.runs),)](
        params,
        group.remainders[at] if group.remainders else params,
        group.weights[at] if group.weights else params,
        group.grads[at],
        group.exp_avgs[at],
        group.exp_avg_sqs[at],
        numbers.runs,
        numbers.listed,
        control.skip,
        control.step,
        control.lr,
        *corrections,
        control.lr if control.grad_divisor is None else control.grad_divisor,
        group.weight_decay if changes else control.lr,
        0.0 if changes else group.weight_decay,
        control.beta1,
        control.beta2,
        1 - control.beta1,
        1 - control.beta2,
        control.eps,
        CLIPS=control.grad_divisor is not None,
        DECAY_CHANGES=changes,
        REMAINDERS=bool(group.remainders),
        WRITES_WEIGHTS=bool(group.weights),
        STOCHASTIC=group.stochastic,
        num_warps=_WARPS,
    )


@triton.jit
def _mix(word):
    word = (word ^ (word >> _SHIFT_1)) * _MULTIPLIER_1
    word = (word ^ (word >> _SHIFT_2)) * _MULTIPLIER_2
    return word ^ (word >> _SHIFT_3)


@triton.jit
def _numbers(run, listed_ptr, element, mask):
    """Return the number of each element of a block of a run, int64; `ElementNumbers.runs` has the rules."""
    kind = tl.load(run + 3)
    a, b, c, d = tl.load(run + 4), tl.load(run + 5), tl.load(run + 6), tl.load(run + 7)
    if kind == _SEGMENTS:
        numbers = tl.where(element < b.to(tl.int32), a, c) + element
    elif kind == _COLUMNS:
        # A row begins near, so the division is one of 32 bits.
        width = c.to(tl.int32)
        place = element + b.to(tl.int32)
        row = place // width
        numbers = a + row.to(tl.int64) * d + (place - row * width)
    else:
        numbers = tl.load(listed_ptr + a + element, mask, 0)
    return numbers


@triton.jit
def _store_rounded(pointers, moments, bits, mask, STOCHASTIC: tl.constexpr):
    """Write moments in the dtype of their memory, rounded with the lowest 16 bits."""
    if pointers.dtype.element_ty == tl.bfloat16 and STOCHASTIC:
        raw = moments.to(tl.uint32, bitcast=True) + (bits & 0xFFFF).to(tl.uint32)
        moments = (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(pointers, moments.to(pointers.dtype.element_ty), mask)


@triton.jit
def _adamw_kernel(
    params_ptr,
    remainders_ptr,
    weights_ptr,
    grads_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    runs_ptr,
    listed_ptr,
    skip_ptr,
    step_ptr,
    lr_ptr,
    correction1_ptr,
    correction2_ptr,
    divisor_ptr,
    decay_ptr,
    weight_decay,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    CLIPS: tl.constexpr,
    DECAY_CHANGES: tl.constexpr,
    REMAINDERS: tl.constexpr,
    WRITES_WEIGHTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    if tl.load(skip_ptr) > 0:
        return
    run = runs_ptr + 8 * tl.program_id(0)
    start = tl.multiple_of(tl.load(run), 64)
    count = tl.multiple_of(tl.load(run + 1).to(tl.int32), 64)
    grads_ptr += start
    params_ptr += start
    remainders_ptr += start
    weights_ptr += start
    exp_avg_ptr += start
    exp_avg_sq_ptr += start
    lr = tl.load(lr_ptr)
    rate = lr / tl.load(correction1_ptr)
    scale_sq = 1 / tl.load(correction2_ptr)
    if DECAY_CHANGES:
        weight_decay = tl.load(decay_ptr)
    kept = 1 - lr * weight_decay
    scale = 1.0
    if CLIPS:
        scale = 1 / tl.load(divisor_ptr)
    step_word = tl.full((), 0, tl.uint64)
    if STOCHASTIC:
        step = tl.load(step_ptr).to(tl.int64).to(tl.uint64, bitcast=True)
        step_word = _mix(tl.load(run + 2).to(tl.uint64, bitcast=True) + step * _STEP_GAMMA)

    for offset in range(0, count, _BLOCK):
        element = offset + tl.arange(0, _BLOCK)
        mask = element < count
        grad = tl.load(grads_ptr + element, mask, 0).to(tl.float32) * scale
        exp_avg = tl.load(exp_avg_ptr + element, mask, 0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + element, mask, 0).to(tl.float32)
        param = tl.load(params_ptr + element, mask, 0)
        if REMAINDERS:
            remainder = tl.load(remainders_ptr + element, mask, 0).to(tl.int32)
            upper = param.to(tl.int16, bitcast=True).to(tl.int32)
            param = ((upper << 16) + remainder).to(tl.float32, bitcast=True)

        exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
        param = param * kept - rate * exp_avg / (tl.sqrt(exp_avg_sq * scale_sq) + eps)

        bits = element.to(tl.uint64)
        if STOCHASTIC:
            numbers = _numbers(run, listed_ptr, element, mask)
            bits = _mix(step_word + numbers.to(tl.uint64, bitcast=True) * _ELEMENT_GAMMA)
        _store_rounded(exp_avg_ptr + element, exp_avg, bits, mask, STOCHASTIC)
        _store_rounded(exp_avg_sq_ptr + element, exp_avg_sq, bits >> 16, mask, STOCHASTIC)
        if REMAINDERS:
            raw = param.to(tl.int32, bitcast=True)
            upper = (raw + 0x8000) >> 16
            weight = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
            tl.store(params_ptr + element, weight, mask)
            tl.store(remainders_ptr + element, (raw - (upper << 16)).to(tl.int16), mask)
        else:
            tl.store(params_ptr + element, param, mask)
            if WRITES_WEIGHTS:
                tl.store(weights_ptr + element, param.to(tl.bfloat16), mask)
