# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Convolution and SiLU: one pass over memory in forward and one in backward.

A program has a block of channels and a run of consecutive tokens. It goes along the tokens and keeps
the last three rows in registers, so each row is read once. The rows of the next steps are on their way
while a step computes: in registers in forward, and in shared memory in backward, which has no registers left.
Backward computes the filter's output u
again, and stores the gradient of x three rows after it has read the row. The gradients of weight and bias are sums per
program, which a second small kernel adds in a fixed order. There are no atomics: equal inputs give
equal bits.

Letters: T tokens, C channels, W width of the filter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.causal_conv1d.api import BLOCK_CHANNELS, CausalConvInputs, run_length
from megatron_packed.ops.causal_conv1d.triton_rows import (
    backward_step,
    filtered,
    four_documents,
    four_rows,
    in_fp32,
    is_one_document,
    rows_before,
    silu,
    store_four,
    taps,
)
from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.kernel_operands import adjacent, main_grads_of
from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.triton_mode import fp32_reasons

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 4
"""Largest width of the filter: the kernels have one variable for each tap."""

TAKES_HALO = True
"""`run` accepts the rows before the first token."""

_WARPS = 1
_BACKWARD_STAGES = 3
"""Steps in flight. Forward with three stages took 100 us where its own loads ahead take 82 (8,192 tokens
and channels, H200)."""


def not_supported_reasons(inputs: CausalConvInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs, if any."""
    reasons = fp32_reasons(inputs.device_type, inputs.dtype)
    unsupported_dtypes = {inputs.weight_dtype, inputs.bias_dtype} - {None, *_FLOATING}
    if unsupported_dtypes:
        reasons.append(
            f"weight ({inputs.weight_dtype}) and bias ({inputs.bias_dtype}) must be bfloat16, float16 or float32"
        )
    if inputs.width > _WIDEST:
        reasons.append(f"the filter's width ({inputs.width}) must be at most {_WIDEST}")
    return reasons


def run(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    seq_idx_1T: Tensor,
    *,
    activation: str | None,
    halo_HC: Tensor | None = None,
) -> Tensor:
    """Run the op (see ``api.causal_conv1d``); copy x first if its channels are not adjacent."""
    slot = gradient_slot(x_TC)
    if x_TC.stride(1) != 1:
        x_TC, slot = x_TC.contiguous(), None
    y_TC: Tensor = _TritonConvolution.apply(
        x_TC, weight_CW, bias_C, halo_HC, seq_idx_1T, activation == "silu", slot
    )
    return y_TC


class _TritonConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        halo_HC: Tensor | None,
        seq_idx_1T: Tensor,
        silu: bool,
        slot: GradientSlot | None,
    ) -> Tensor:
        weight = weight_CW.contiguous()
        halo_HC = None if halo_HC is None else halo_HC.contiguous()
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        if x_TC.numel():
            grid, sizes = _launch(x_TC, weight_CW, halo_HC)
            _forward_kernel[grid](
                x_TC,
                weight,
                bias_C,
                halo_HC,
                seq_idx_1T,
                y_TC,
                x_TC.shape[0],
                x_TC.stride(0),
                SILU=silu,
                **sizes,
            )
        ctx.save_for_backward(x_TC, weight, bias_C, halo_HC, seq_idx_1T)
        ctx.silu = silu
        ctx.slot = slot
        ctx.main_grads = main_grads_of(weight_CW, bias_C)
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight, bias_C, halo_HC, seq_idx_1T = ctx.saved_tensors
        dy_TC = adjacent(dy_TC)
        dx_TC = gradient_like(x_TC, ctx.slot)
        dhalo_HC = None if halo_HC is None else torch.zeros_like(halo_HC)
        grid, sizes = _launch(x_TC, weight, halo_HC)
        parts_XCW, parts_XC = (
            None
            if parameter is None
            else torch.empty(grid[0], *parameter.shape, dtype=torch.float32, device=x_TC.device)
            for parameter in (weight, bias_C)
        )
        if x_TC.numel():
            _backward_kernel[grid](
                x_TC,
                weight,
                bias_C,
                halo_HC,
                seq_idx_1T,
                dy_TC,
                dx_TC,
                dhalo_HC,
                parts_XCW,
                parts_XC,
                x_TC.shape[0],
                x_TC.stride(0),
                dy_TC.stride(0),
                dx_TC.stride(0),
                SILU=ctx.silu,
                STAGES=_BACKWARD_STAGES,
                **sizes,
            )
        dweight_CW, dbias_C = (
            add_partial_sums(parts, parameter, main_grad) if parts is not None and needed else None
            for parts, parameter, main_grad, needed in zip(
                (parts_XCW, parts_XC), (weight, bias_C), ctx.main_grads, ctx.needs_input_grad[1:3]
            )
        )
        return dx_TC, dweight_CW, dbias_C, dhalo_HC, None, None, None


def _launch(
    x_TC: Tensor, weight_CW: Tensor, halo_HC: Tensor | None = None
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid (runs of tokens, blocks of channels) and the sizes for the kernels.

    The sizes do not depend on the device, so neither does the order of the sums.
    """
    tokens, channels = x_TC.shape
    length = run_length(tokens, channels)
    return (triton.cdiv(tokens, length), triton.cdiv(channels, BLOCK_CHANNELS)), {
        "length": length,
        "CHANNELS": channels,
        "WIDTH": weight_CW.shape[1],
        "HALO": 0 if halo_HC is None else len(halo_HC),
        "BLOCK_C": BLOCK_CHANNELS,
        "num_warps": _WARPS,
    }


@triton.jit(do_not_specialize=["tokens", "length"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    halo_ptr,
    seq_idx_ptr,
    y_ptr,
    tokens,
    x_stride,
    length,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute y of ``length`` tokens and one block of channels, four rows a step.

    ``length`` is a multiple of four. Otherwise the last step would store rows of the next program.
    In a step the rows are a, b, c, d. Those before them are x1 (the last one), x2, x3, in the
    documents d1, d2, d3. Before the first token these are the rows of the halo. The documents begin with
    those of the halo.
    """
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w, bias = taps(weight_ptr, bias_ptr, column, column < CHANNELS, WIDTH)
    first = tl.program_id(0) * length
    end = tl.minimum(first + length, tokens)
    x3, x2, x1, d3, d2, d1 = rows_before(
        *(x_ptr, halo_ptr, seq_idx_ptr, first, tokens, x_stride, column, CHANNELS, HALO)
    )
    a, b, c, d = four_rows(x_ptr, first, end, x_stride, column, CHANNELS)
    da, db, dc, dd = four_documents(seq_idx_ptr + HALO, first, end)
    for step in tl.range(0, length, 4, num_stages=1):
        t = first + step
        next_a, next_b, next_c, next_d = four_rows(x_ptr, t + 4, end, x_stride, column, CHANNELS)
        next_da, next_db, next_dc, next_dd = four_documents(seq_idx_ptr + HALO, t + 4, end)
        a, b, c, d = in_fp32(a, b, c, d)
        rows, documents = (x3, x2, x1, a, b, c, d), (d3, d2, d1, da, db, dc, dd)
        # Most steps are inside one document, where no row needs a comparison.
        if is_one_document(documents):
            y = filtered(rows, documents, w, bias, WIDTH, False)
        else:
            y = filtered(rows, documents, w, bias, WIDTH, True)
        if SILU:
            y = (silu(y[0]), silu(y[1]), silu(y[2]), silu(y[3]))
        store_four(y_ptr, t, y, first, tokens, CHANNELS, column, CHANNELS)
        x3, x2, x1, d3, d2, d1 = b, c, d, db, dc, dd
        a, b, c, d = next_a, next_b, next_c, next_d
        da, db, dc, dd = next_da, next_db, next_dc, next_dd


@triton.jit(do_not_specialize=["tokens", "length"])
def _backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    halo_ptr,
    seq_idx_ptr,
    dy_ptr,
    dx_ptr,
    dhalo_ptr,
    parts_weight_ptr,
    parts_bias_ptr,
    tokens,
    x_stride,
    dy_stride,
    dx_stride,
    length,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx of ``length`` tokens and one block of channels, and their part of dw and dbias.

    The names are those of forward. The gradients of u in the same rows are g1, g2, g3, ga, gb, gc, gd.
    The gradient dx of a row needs those of the three rows after it. So it is complete three rows
    later, and a last step reads rows of the next program.
    """
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = column < CHANNELS
    w, bias = taps(weight_ptr, bias_ptr, column, real, WIDTH)
    first = tl.program_id(0) * length
    end = tl.minimum(first + length, tokens)
    x3, x2, x1, d3, d2, d1 = rows_before(
        *(x_ptr, halo_ptr, seq_idx_ptr, first, tokens, x_stride, column, CHANNELS, HALO)
    )
    g1 = tl.zeros((BLOCK_C,), tl.float32)
    g2, g3, dw0, dw1, dw2, dw3, dbias = g1, g1, g1, g1, g1, g1, g1
    for step in tl.range(0, length + 4, 4, num_stages=STAGES):
        t = first + step
        a, b, c, d = in_fp32(*four_rows(x_ptr, t, tokens, x_stride, column, CHANNELS))
        ga, gb, gc, gd = in_fp32(*four_rows(dy_ptr, t, tokens, dy_stride, column, CHANNELS))
        da, db, dc, dd = four_documents(seq_idx_ptr + HALO, t, tokens)
        rows, documents = (x3, x2, x1, a, b, c, d), (d3, d2, d1, da, db, dc, dd)
        g, dw = (g3, g2, g1, ga, gb, gc, gd), (dw0, dw1, dw2, dw3, dbias)
        # As in forward. Rows from end on count in the sums of the next program.
        if is_one_document(documents) & (t + 3 < end):
            latest, dx, sums = backward_step(rows, documents, g, dw, w, bias, 4, SILU, WIDTH, False)
        else:
            latest, dx, sums = backward_step(
                rows, documents, g, dw, w, bias, end - t, SILU, WIDTH, True
            )
        store_four(dx_ptr, t - 3, dx, first, end, dx_stride, column, CHANNELS)
        if HALO > 0:
            store_four(dhalo_ptr, t + HALO - 3, dx, 0, HALO, CHANNELS, column, CHANNELS)
        g3, g2, g1 = latest
        dw0, dw1, dw2, dw3, dbias = sums
        x3, x2, x1, d3, d2, d1 = b, c, d, db, dc, dd
    part = parts_weight_ptr + (tl.program_id(0) * CHANNELS + column) * WIDTH + WIDTH - 1
    tl.store(part, dw0, mask=real)
    if WIDTH > 1:
        tl.store(part - 1, dw1, mask=real)
    if WIDTH > 2:
        tl.store(part - 2, dw2, mask=real)
    if WIDTH > 3:
        tl.store(part - 3, dw3, mask=real)
    if parts_bias_ptr is not None:
        tl.store(parts_bias_ptr + tl.program_id(0) * CHANNELS + column, dbias, mask=real)
