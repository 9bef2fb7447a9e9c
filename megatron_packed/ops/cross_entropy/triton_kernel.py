# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Softmax, loss and logit gradient of a chunk in one kernel; the gradient overwrites the logits.

One program per token: a first pass over its row finds the maximum and the sum of exponentials together, a second writes
``(p - onehot) * scale``. Rows are some ten to a few hundred KiB, so the second pass finds them in the L2 cache. fp32
math, fixed order, no atomics, no host sync.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.cross_entropy.api import Inputs
from megatron_packed.ops.cross_entropy.chunked import run_chunked
from megatron_packed.ops.triton_mode import device_reasons

_BLOCK = 4096
"""Logits per step of a program: 16 per thread at 8 warps."""


def not_supported_reasons(inputs: Inputs) -> list[str]:
    reasons = device_reasons(inputs.device_type)
    if inputs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"it computes in fp32, too little for {inputs.dtype}")
    if inputs.split:
        reasons.append("it does not sum over the ranks that share the vocabulary")
    if inputs.vocab_rows >= 2**31:
        reasons.append(f"a row of {inputs.vocab_rows} logits exceeds 32-bit offsets")
    return reasons


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
    rows, vocab_rows = logits_CV.shape
    block = min(_BLOCK, max(64, triton.next_power_of_2(vocab_rows)))
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


@triton.jit
def _logits(row_ptr, position, VOCAB_SIZE: tl.constexpr, VOCAB_ROWS: tl.constexpr):
    """-inf in padding columns. They are loaded too: V is a round number where the number of tokens is not, and a mask
    that ends anywhere would make every access a narrow one."""
    logit = tl.load(row_ptr + position, mask=position < VOCAB_ROWS, other=float("-inf")).to(tl.float32)
    return tl.where(position < VOCAB_SIZE, logit, float("-inf"))


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
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -3.0e38, tl.float32)  # finite, so that a lane without a logit subtracts no infinities
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        logit = _logits(row_ptr, start + column, VOCAB_SIZE, VOCAB_ROWS)
        larger = tl.maximum(largest, logit)
        total = total * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), axis=0)
    known = (label >= 0) & (label < VOCAB_SIZE)
    label_logit = tl.load(row_ptr + tl.where(known, label, 0)).to(tl.float32)
    nll = tl.where(known, tl.log(row_total) + row_largest - label_logit, float("nan"))
    tl.store(loss_ptr + token, tl.where(weight == 0, 0.0, nll * weight))
    if WITH_GRADIENT:
        scale = weight
        if grad_scale_ptr is not None:
            scale *= tl.load(grad_scale_ptr)
        inverse = 1.0 / row_total
        # every thread has read the label's logit before any overwrites it
        tl.debug_barrier()
        for start in range(0, VOCAB_ROWS, BLOCK):
            position = start + column
            logit = _logits(row_ptr, position, VOCAB_SIZE, VOCAB_ROWS)
            p = tl.exp(logit - row_largest) * inverse
            gradient = tl.where(position == label, p - 1.0, p) * scale
            gradient = tl.where(weight == 0, 0.0, tl.where(position < VOCAB_SIZE, gradient, 0.0))
            tl.store(row_ptr + position, gradient.to(logits_ptr.dtype.element_ty), mask=position < VOCAB_ROWS)
