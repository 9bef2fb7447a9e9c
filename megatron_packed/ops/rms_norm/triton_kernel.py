# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""RMS normalisation in one pass over memory in forward and one in backward.

Forward saves 1/rms of each row. Backward computes the input's gradient, adds the gradient of the
residual connection if there is one, and stores each program's part of the weight's gradient. A
second small kernel adds these parts in a fixed order. There are no atomics, so equal inputs give
equal bits on GPUs of one model; the number of parts is at most four per multiprocessor.

With ``d = dy * w``, ``n = x / rms`` and a mean over the row, the gradients are
``dx = (d - n * mean(d * n)) / rms`` and ``dw = sum_rows dy * n``. A zero-centered weight adds one to
``w``.

Rows of x may have two strides: the rows of each group of ``inner`` rows have one distance, and the
groups have another. The query heads of a fused projection are such rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.kernel_operands import rows_of
from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.rms_norm.api import RMSNormInputs
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, rows_at
from megatron_packed.ops.triton_mode import device_reasons

_WIDEST = 16384
"""Largest number of features: a program has a complete row in registers."""

_WIDEST_PREFETCHED = 4096
"""Largest number of features of which backward loads several steps in advance."""

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


def not_supported_reasons(inputs: RMSNormInputs) -> list[str]:
    reasons = device_reasons(inputs.device_type)
    if inputs.features > _WIDEST:
        reasons.append(
            f"a row of {inputs.features} features exceeds the {_WIDEST} that fit in registers"
        )
    if inputs.dtype not in _FLOATING or inputs.weight_dtype not in _FLOATING:
        reasons.append(
            f"the kernel computes in fp32, not precise enough for {inputs.dtype} with a weight of {inputs.weight_dtype}"
        )
    return reasons


def run(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    y_TD: Tensor = _RMSNorm.apply(x_TD, weight_D, eps, zero_centered, False)
    return y_TD


def run_with_residual(
    x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = _RMSNorm.apply(x_TD, weight_D, eps, zero_centered, True)
    return outputs


class _RMSNorm(torch.autograd.Function):
    """Normalised x, or (normalised x, x); one backward kernel adds the gradients of both outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        zero_centered: bool,
        with_residual: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, weight = _groups_of_rows(x_TD), weight_D.contiguous()
        tokens, features = x.shape[0] * x.shape[1], x.shape[2]
        y = torch.empty(x_TD.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
        block_d, rows, warps = _block(features)
        if tokens:
            _forward_kernel[(triton.cdiv(tokens, rows),)](
                x,
                weight,
                y,
                rstd,
                tokens,
                eps,
                x.shape[1],
                x.stride(0),
                x.stride(1),
                FEATURES=features,
                ROWS=rows,
                BLOCK_D=block_d,
                ZERO_CENTERED=zero_centered,
                num_warps=warps,
            )
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = x_TD.shape
        ctx.zero_centered = zero_centered
        ctx.main_grad = getattr(weight_D, "main_grad", None)
        return (y, x_TD) if with_residual else y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_TD: Tensor, d_residual_TD: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        tokens, features = x.shape[0] * x.shape[1], x.shape[2]
        dy = rows_of(dy_TD)
        d_residual = None if d_residual_TD is None else rows_of(d_residual_TD)
        dx = torch.empty(ctx.shape, dtype=x.dtype, device=x.device)
        block_d, rows, warps = _block(features)
        programs = max(1, min(_programs(x.device), triton.cdiv(tokens, rows)))
        parts = torch.empty(programs, features, dtype=torch.float32, device=x.device)
        _backward_kernel[(programs,)](
            x,
            weight,
            rstd,
            dy,
            d_residual,
            dx,
            parts,
            tokens,
            x.shape[1],
            x.stride(0),
            x.stride(1),
            dy.stride(0),
            0 if d_residual is None else d_residual.stride(0),
            triton.cdiv(tokens, programs * rows) * rows,
            FEATURES=features,
            ROWS=rows,
            BLOCK_D=block_d,
            ZERO_CENTERED=ctx.zero_centered,
            # Loads of the next two steps are under way. Wider rows have no room in shared memory.
            STAGES=3 if block_d <= _WIDEST_PREFETCHED else 1,
            num_warps=warps if block_d <= _WIDEST_PREFETCHED else min(32, 2 * warps),
        )
        dweight = (
            add_partial_sums(parts, weight, ctx.main_grad) if ctx.needs_input_grad[1] else None
        )
        return dx, dweight, None, None, None


def _groups_of_rows(x_TD: Tensor) -> Tensor:
    """Return (groups, rows of a group, D) with contiguous features; copy only if necessary."""
    if x_TD.dim() == 3 and x_TD.stride(2) == 1 and x_TD.stride(0) != x_TD.shape[1] * x_TD.stride(1):
        return x_TD
    return rows_of(x_TD).unsqueeze(1)


def _block(features: int) -> tuple[int, int, int]:
    """Return the features per block, the rows per step and the warps: about 16 elements a thread."""
    block_d = triton.next_power_of_2(features)
    return block_d, max(1, 2048 // block_d), min(16, max(4, block_d // 512))


@lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """Return the largest number of programs of the backward kernel: four per multiprocessor."""
    return (
        4 * torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 3
    )


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    tokens,
    eps,
    inner,
    group_stride,
    row_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = mask_of(row < tokens, column < FEATURES)
    start = _row_starts(row, inner, group_stride, row_stride)
    x = load_fp32(x_ptr + start[:, None] + column[None, :], mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / FEATURES + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < tokens)
    weight = load_fp32(weight_ptr + column, column < FEATURES)
    if ZERO_CENTERED:
        weight += 1.0
    y = (x * rstd[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(rows_at(y_ptr, row.to(tl.int64), FEATURES, column), y, mask=mask)


@triton.jit
def _row_starts(row, inner, group_stride, row_stride):
    """Return the offsets of the first elements of rows of x.

    The division has 32 bits, because one of 64 bits would take many instructions.
    """
    return (row // inner).to(tl.int64) * group_stride + (row % inner).to(tl.int64) * row_stride


@triton.jit(do_not_specialize=["program_rows"])
def _backward_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    d_residual_ptr,
    dx_ptr,
    parts_ptr,
    tokens,
    inner,
    group_stride,
    row_stride,
    dy_stride,
    d_residual_stride,
    program_rows,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx of ``program_rows`` consecutive rows, and their part of dw in registers."""
    column = tl.arange(0, BLOCK_D)
    real = column < FEATURES
    weight = load_fp32(weight_ptr + column, real)
    if ZERO_CENTERED:
        weight += 1.0
    share = tl.zeros((BLOCK_D,), tl.float32)
    first = tl.program_id(0) * program_rows
    for start in tl.range(0, program_rows, ROWS, num_stages=STAGES):
        number = first + start + tl.arange(0, ROWS)
        row = number.to(tl.int64)
        mask = mask_of(row < tokens, real)
        x_start = _row_starts(number, inner, group_stride, row_stride)
        x = load_fp32(x_ptr + x_start[:, None] + column[None, :], mask)
        dy = load_fp32(rows_at(dy_ptr, row, dy_stride, column), mask)
        rstd = load(rstd_ptr + row, row < tokens)[:, None]
        normed = x * rstd
        share += tl.sum(dy * normed, axis=0)
        d = dy * weight[None, :]
        dx = (d - normed * (tl.sum(d * normed, axis=1) / FEATURES)[:, None]) * rstd
        if d_residual_ptr is not None:
            dx += load_fp32(rows_at(d_residual_ptr, row, d_residual_stride, column), mask)
        tl.store(
            rows_at(dx_ptr, row, FEATURES, column),
            dx,
            mask=mask,
        )
    tl.store(parts_ptr + tl.program_id(0) * FEATURES + column, share, mask=real)
