# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""AdamW in one pass over the state: each byte is read once and written once.

One program updates `BLOCK_ELEMENTS` elements of one parameter. It reads the gradient, the moments and
the master, computes in float32, and writes the moments, the master and the bf16 weight. Moments may be
bf16, and masters may be a bf16 weight with a 16-bit remainder (``master_remainders.py``). The draws of
stochastic rounding are those of ``stochastic_rounding.py``.

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
    BLOCK_ELEMENTS,
    ELEMENT_GAMMA,
    MULTIPLIERS,
    SHIFTS,
    STEP_GAMMA,
)

_BLOCK = tl.constexpr(BLOCK_ELEMENTS)
_STEP_GAMMA, _ELEMENT_GAMMA = tl.constexpr(STEP_GAMMA), tl.constexpr(ELEMENT_GAMMA)
_MULTIPLIER_1, _MULTIPLIER_2 = (tl.constexpr(word) for word in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(bits) for bits in SHIFTS)
_WARPS = 4
"""97 to 99 % of the bandwidth of a copy on one H200 for all dtypes; 8 warps read up to 9 % less."""


class OnePass:
    """Implementation by a kernel that reads and writes each byte of the state once."""

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
    if not len(numbers.blocks):
        return
    changes = isinstance(group.weight_decay, Tensor)
    _adamw_kernel[(len(numbers.blocks),)](
        params,
        group.remainders[at] if group.remainders else params,
        group.weights[at] if group.weights else params,
        group.grads[at],
        group.exp_avgs[at],
        group.exp_avg_sqs[at],
        numbers.blocks,
        numbers.parameters,
        numbers.parameters.shape[1],
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
def _words(parameter, step, first):
    """Return one word of random bits for each element of a block; `ElementNumbers` has the formula."""
    element = tl.arange(0, _BLOCK)
    local, whole = tl.load(parameter + 1), tl.load(parameter + 2)
    # A block is far from its parameter's first element, but its elements are near to one another. So
    # the division of each element is one of 32 bits.
    row, column = first // local, first % local
    if local < 2**31 - _BLOCK:
        element += column.to(tl.int32)
        rows = element // local.to(tl.int32)
        columns = (element - rows * local.to(tl.int32)).to(tl.int64)
        rows = rows.to(tl.int64) + row
    else:
        rows = (element + column) // local
        columns = (element + column) % local
        rows += row
    number = rows * whole + columns
    for piece in range(tl.load(parameter + 3)):
        begin = tl.load(parameter + 4 + 2 * piece)
        start = tl.load(parameter + 5 + 2 * piece)
        number = tl.where(columns >= begin, rows * whole + columns + (start - begin), number)
    key = tl.load(parameter).to(tl.uint64, bitcast=True)
    of_step = _mix(key + step.to(tl.int64).to(tl.uint64, bitcast=True) * _STEP_GAMMA)
    return _mix(of_step + number.to(tl.uint64, bitcast=True) * _ELEMENT_GAMMA)


@triton.jit
def _rounded(values, pointers, bits, STOCHASTIC: tl.constexpr):
    """Return moments in the dtype of their memory, rounded with the lowest 16 bits."""
    if pointers.dtype.element_ty == tl.bfloat16 and STOCHASTIC:
        raw = values.to(tl.uint32, bitcast=True) + (bits & 0xFFFF).to(tl.uint32)
        values = (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(pointers.dtype.element_ty)


@triton.jit
def _adamw_kernel(
    params_ptr,
    remainders_ptr,
    weights_ptr,
    grads_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    blocks_ptr,
    parameters_ptr,
    parameter_width,
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
    block = blocks_ptr + 4 * tl.program_id(0)
    start = tl.multiple_of(tl.load(block), 64)
    count = tl.multiple_of(tl.load(block + 1).to(tl.int32), 64)
    parameter = parameters_ptr + tl.load(block + 2) * parameter_width
    first = tl.load(block + 3)
    element = tl.arange(0, _BLOCK)
    mask = element < count
    lr = tl.load(lr_ptr)
    if DECAY_CHANGES:
        weight_decay = tl.load(decay_ptr)

    grad = tl.load(grads_ptr + start + element, mask, 0).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + start + element, mask, 0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + start + element, mask, 0).to(tl.float32)
    param = tl.load(params_ptr + start + element, mask, 0)
    if REMAINDERS:
        remainder = tl.load(remainders_ptr + start + element, mask, 0).to(tl.int32)
        upper = param.to(tl.int16, bitcast=True).to(tl.int32)
        param = ((upper << 16) + remainder).to(tl.float32, bitcast=True)

    if CLIPS:
        grad = grad * (1 / tl.load(divisor_ptr))
    exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    denominator = tl.sqrt(exp_avg_sq * (1 / tl.load(correction2_ptr))) + eps
    rate = lr / tl.load(correction1_ptr)
    param = param * (1 - lr * weight_decay) - rate * exp_avg / denominator

    bits = element.to(tl.uint64)
    if STOCHASTIC:
        bits = _words(parameter, tl.load(step_ptr), first)
    exp_avg_pointers = exp_avg_ptr + start + element
    tl.store(exp_avg_pointers, _rounded(exp_avg, exp_avg_pointers, bits, STOCHASTIC), mask)
    exp_avg_sq_pointers = exp_avg_sq_ptr + start + element
    tl.store(
        exp_avg_sq_pointers, _rounded(exp_avg_sq, exp_avg_sq_pointers, bits >> 16, STOCHASTIC), mask
    )
    if REMAINDERS:
        raw = param.to(tl.int32, bitcast=True)
        upper = (raw + 0x8000) >> 16
        weight = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(params_ptr + start + element, weight, mask)
        tl.store(remainders_ptr + start + element, (raw - (upper << 16)).to(tl.int16), mask)
    else:
        tl.store(params_ptr + start + element, param, mask)
        if WRITES_WEIGHTS:
            tl.store(weights_ptr + start + element, param.to(tl.bfloat16), mask)
