# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Softmax, loss and logit gradient of a chunk in one Triton kernel.

The gradient overwrites the logits. Each program handles one token. Its first pass over the row
computes the maximum and the sum of exponentials, and its second pass writes ``(p - onehot) * scale``.
A row has tens to hundreds of KiB, so the second pass reads it from the L2 cache. The arithmetic is
fp32 in a fixed order, without atomics or host syncs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import CrossEntropyInputs, VocabShard
from megatron_packed.ops.cross_entropy.reference import run_chunked
from megatron_packed.ops.cross_entropy.split import split_step
from megatron_packed.ops.triton_loads import tile_of
from megatron_packed.ops.triton_mode import fp32_reasons

_BLOCK = 4096
"""Logits that a program processes at a time: 16 per thread with 8 warps."""


def not_supported_reasons(inputs: CrossEntropyInputs) -> list[str]:
    reasons = fp32_reasons(inputs.device_type, inputs.dtype)
    if inputs.vocab_rows >= 2**31:
        reasons.append(f"a row of {inputs.vocab_rows} logits exceeds the kernel's 32-bit offsets")
    return reasons


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
    """Compute losses and logit gradients of a chunk; see ``api.Step``."""
    rows, vocab_rows = logits_CV.shape
    block = _block(vocab_rows)
    _softmax_kernel[(rows,)](
        logits_CV,
        labels_C,
        loss_mask_C,
        grad_scale,
        loss_C,
        logits_CV.stride(0),
        labels_C.stride(0),
        loss_mask_C.stride(0),
        VOCAB_SIZE=vocab_size,
        VOCAB_ROWS=vocab_rows,
        WITH_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=8 if block == _BLOCK else 4,
    )


def statistics(logits_CV: Tensor, row_C: Tensor, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run the first pass for a vocabulary that is split over ranks; see ``split.Statistics``."""
    rows, vocab_rows = logits_CV.shape
    largest_C, total_C, label_C = torch.empty(
        3, rows, dtype=torch.float32, device=logits_CV.device
    ).unbind()
    block = _block(vocab_rows)
    _statistics_kernel[(rows,)](
        logits_CV,
        row_C,
        largest_C,
        total_C,
        label_C,
        logits_CV.stride(0),
        VOCAB_SIZE=real,
        VOCAB_ROWS=vocab_rows,
        BLOCK=block,
        num_warps=8 if block == _BLOCK else 4,
    )
    return largest_C, total_C, label_C


def gradient(
    logits_CV: Tensor,
    row_C: Tensor,
    real: int,
    largest_C: Tensor,
    total_C: Tensor,
    scale_C: Tensor,
    loss_mask_C: Tensor,
) -> None:
    """Run the second pass for a vocabulary that is split over ranks; see ``split.Gradient``."""
    rows, vocab_rows = logits_CV.shape
    block = _block(vocab_rows)
    _gradient_kernel[(rows,)](
        logits_CV,
        row_C,
        largest_C,
        total_C,
        scale_C,
        loss_mask_C,
        logits_CV.stride(0),
        scale_C.stride(0),
        loss_mask_C.stride(0),
        VOCAB_SIZE=real,
        VOCAB_ROWS=vocab_rows,
        BLOCK=block,
        num_warps=8 if block == _BLOCK else 4,
    )


def _block(vocab_rows: int) -> int:
    return min(_BLOCK, max(64, int(triton.next_power_of_2(vocab_rows))))


@triton.jit
def _logits(row_ptr, position, VOCAB_SIZE: tl.constexpr, VOCAB_ROWS: tl.constexpr):
    """Load logits as fp32, with -inf in padding columns.

    Padding columns are loaded and then replaced. V is padded to a round number, which allows wide
    memory accesses. A load mask that ends at an arbitrary column would make all accesses narrow.
    """
    logit = tl.load(row_ptr + position, mask=position < VOCAB_ROWS, other=float("-inf")).to(
        tl.float32
    )
    return (
        logit if VOCAB_SIZE == VOCAB_ROWS else tl.where(position < VOCAB_SIZE, logit, float("-inf"))
    )


@triton.jit
def _exp(x):
    """Return exp(x), or 0 for results below 2^-126. Exact results there would take instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _largest_and_total(
    row_ptr, VOCAB_SIZE: tl.constexpr, VOCAB_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest logit of a row, and the sum of the exponentials of differences from it.

    Each lane has a maximum and a sum. In a step it reads eight adjacent logits and rescales its sum
    once.
    """
    column = tile_of(tl.arange(0, BLOCK // 8), 8, tl.arange(0, 8))
    # The start value is finite, because -inf minus -inf would give NaN in a lane without a logit.
    largest = tl.full((BLOCK // 8,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        logit = _logits(row_ptr, start + column, VOCAB_SIZE, VOCAB_ROWS)
        larger = tl.maximum(largest, tl.max(logit, axis=1))
        total = total * _exp(largest - larger) + tl.sum(_exp(logit - larger[:, None]), axis=1)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    return row_largest, tl.sum(total * _exp(largest - row_largest), axis=0)


@triton.jit
def _write_gradient(
    row_ptr,
    largest,
    inverse,
    label,
    scale,
    weight,
    VOCAB_SIZE: tl.constexpr,
    VOCAB_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite the logits of a row by their gradients.

    The loop begins with the block that was read last, which is probably still in a cache.
    """
    column = tl.arange(0, BLOCK)
    BLOCKS: tl.constexpr = (VOCAB_ROWS + BLOCK - 1) // BLOCK
    for step in range(BLOCKS):
        position = (BLOCKS - 1 - step) * BLOCK + column
        logit = _logits(row_ptr, position, VOCAB_SIZE, VOCAB_ROWS)
        p = _exp(logit - largest) * inverse
        gradient = tl.where(position == label, p - 1.0, p) * scale
        gradient = tl.where(weight == 0, 0.0, gradient)
        if VOCAB_SIZE < VOCAB_ROWS:
            gradient = tl.where(position < VOCAB_SIZE, gradient, 0.0)
        tl.store(row_ptr + position, gradient, mask=position < VOCAB_ROWS)


@triton.jit
def _softmax_kernel(
    logits_ptr,
    label_ptr,
    loss_mask_ptr,
    grad_scale_ptr,
    loss_ptr,
    logits_stride,
    label_stride,
    loss_mask_stride,
    VOCAB_SIZE: tl.constexpr,
    VOCAB_ROWS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * logits_stride
    label = tl.load(label_ptr + token * label_stride).to(tl.int64)
    weight = tl.load(loss_mask_ptr + token * loss_mask_stride)
    row_largest, row_total = _largest_and_total(row_ptr, VOCAB_SIZE, VOCAB_ROWS, BLOCK)
    known = (label >= 0) & (label < VOCAB_SIZE)
    label_logit = tl.load(row_ptr + tl.where(known, label, 0)).to(tl.float32)
    nll = tl.where(known, tl.log(row_total) + row_largest - label_logit, float("nan"))
    tl.store(loss_ptr + token, tl.where(weight == 0, 0.0, nll * weight))
    if WITH_GRADIENT:
        scale = weight
        if grad_scale_ptr is not None:
            scale *= tl.load(grad_scale_ptr)
        inverse = 1.0 / row_total
        # Wait until all threads have read the label's logit, before any thread overwrites it.
        tl.debug_barrier()
        _write_gradient(
            row_ptr,
            row_largest,
            inverse,
            tl.where(known, label, -1).to(tl.int32),
            scale,
            weight,
            VOCAB_SIZE,
            VOCAB_ROWS,
            BLOCK,
        )


@triton.jit
def _statistics_kernel(
    logits_ptr,
    row_ptr,
    largest_ptr,
    total_ptr,
    label_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    VOCAB_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits_row_ptr = logits_ptr + token * logits_stride
    row_largest, row_total = _largest_and_total(logits_row_ptr, VOCAB_SIZE, VOCAB_ROWS, BLOCK)
    tl.store(largest_ptr + token, row_largest)
    tl.store(total_ptr + token, row_total)
    row = tl.load(row_ptr + token)
    tl.store(label_ptr + token, tl.load(logits_row_ptr + tl.where(row < 0, 0, row)).to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits_ptr,
    row_ptr,
    largest_ptr,
    total_ptr,
    scale_ptr,
    loss_mask_ptr,
    logits_stride,
    scale_stride,
    loss_mask_stride,
    VOCAB_SIZE: tl.constexpr,
    VOCAB_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits_row_ptr = logits_ptr + token * logits_stride
    row = tl.load(row_ptr + token).to(tl.int32)
    largest = tl.load(largest_ptr + token)
    inverse = 1.0 / tl.load(total_ptr + token)
    scale = tl.load(scale_ptr + token * scale_stride)
    weight = tl.load(loss_mask_ptr + token * loss_mask_stride)
    _write_gradient(
        logits_row_ptr, largest, inverse, row, scale, weight, VOCAB_SIZE, VOCAB_ROWS, BLOCK
    )
