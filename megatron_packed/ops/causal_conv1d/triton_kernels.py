# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Convolution and SiLU: one pass over memory in forward and one in backward.

A program has a block of channels and a run of consecutive tokens. It goes along the tokens and keeps
the last three rows in registers, so each row is read once. Backward computes the filter's output u
again, and stores the gradient of x three rows after it has read the row. The gradients of weight and bias are sums per
program, which a second small kernel adds in a fixed order. There are no atomics: equal inputs give
equal bits.

Letters: T tokens, C channels, W width of the filter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.triton_mode import fp32_reasons

if TYPE_CHECKING:
    from megatron_packed.ops.causal_conv1d.api import CausalConvInputs

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 4
"""Largest width of the filter: the kernels have one variable for each tap."""

_BLOCK_CHANNELS = 128
_WARPS = 1
_SHORTEST_RUN = 32
"""Fewest tokens of a program. Each program reads some rows of its neighbours, too."""

_PROGRAMS = 4096
"""Programs of a launch, about two rounds on a GPU of 132 processors; longer packs have longer runs.

Each program has a partial sum of ``_BLOCK_CHANNELS`` filters, so the sums of a launch take at most
8 MiB for filters of width 4.
"""


def not_supported_reasons(inputs: CausalConvInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs, if any."""
    reasons = fp32_reasons(inputs.device_type, inputs.dtype)
    wrong = {inputs.weight_dtype, inputs.bias_dtype} - {None, *_FLOATING}
    if wrong:
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
) -> Tensor:
    """Run the op (see ``api.causal_conv1d``); copy x first if its channels are not adjacent."""
    slot = gradient_slot(x_TC)
    if x_TC.stride(1) != 1:
        x_TC, slot = x_TC.contiguous(), None
    y_TC: Tensor = _TritonConvolution.apply(
        x_TC, weight_CW, bias_C, seq_idx_1T, activation == "silu", slot
    )
    return y_TC


class _TritonConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        seq_idx_1T: Tensor,
        silu: bool,
        slot: GradientSlot | None,
    ) -> Tensor:
        weight = weight_CW.contiguous()
        y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        if x_TC.numel():
            grid, sizes = _launch(x_TC, weight_CW)
            _forward_kernel[grid](
                x_TC,
                weight,
                bias_C,
                seq_idx_1T,
                y_TC,
                x_TC.shape[0],
                x_TC.stride(0),
                SILU=silu,
                **sizes,
            )
        ctx.save_for_backward(x_TC, weight, bias_C, seq_idx_1T)
        ctx.silu = silu
        ctx.slot = slot
        # Backward writes to these buffers, so save_for_backward would report a modified tensor.
        ctx.main_grads = [
            getattr(parameter, "main_grad", None) for parameter in (weight_CW, bias_C)
        ]
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight, bias_C, seq_idx_1T = ctx.saved_tensors
        dy_TC = dy_TC if dy_TC.stride(1) == 1 else dy_TC.contiguous()
        dx_TC = gradient_like(x_TC, ctx.slot)
        grid, sizes = _launch(x_TC, weight)
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
                seq_idx_1T,
                dy_TC,
                dx_TC,
                parts_XCW,
                parts_XC,
                x_TC.shape[0],
                x_TC.stride(0),
                dy_TC.stride(0),
                dx_TC.stride(0),
                SILU=ctx.silu,
                **sizes,
            )
        dweight_CW, dbias_C = (
            _summed(parts, parameter, main_grad) if parts is not None and needed else None
            for parts, parameter, main_grad, needed in zip(
                (parts_XCW, parts_XC), (weight, bias_C), ctx.main_grads, ctx.needs_input_grad[1:3]
            )
        )
        return dx_TC, dweight_CW, dbias_C, None, None, None


def _summed(parts: Tensor, parameter: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """Return the sum of the programs' parts, or add it to ``main_grad`` and return None."""
    gradient = add_partial_sums(
        parts.flatten(1), parameter.flatten(), None if main_grad is None else main_grad.view(-1)
    )
    return None if gradient is None else gradient.view_as(parameter)


def _launch(x_TC: Tensor, weight_CW: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid (runs of tokens, blocks of channels) and the sizes for the kernels.

    The sizes do not depend on the device, so neither does the order of the sums.
    """
    tokens, channels = x_TC.shape
    blocks = triton.cdiv(channels, _BLOCK_CHANNELS)
    # Four rows are one step of a program.
    length = max(_SHORTEST_RUN, triton.cdiv(triton.cdiv(tokens * blocks, _PROGRAMS), 4) * 4)
    return (triton.cdiv(tokens, length), blocks), {
        "length": length,
        "CHANNELS": channels,
        "WIDTH": weight_CW.shape[1],
        "BLOCK_C": _BLOCK_CHANNELS,
        "num_warps": _WARPS,
    }


@triton.jit(do_not_specialize=["tokens", "length"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    seq_idx_ptr,
    y_ptr,
    tokens,
    x_stride,
    length,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute y of ``length`` tokens and one block of channels, four rows a step.

    In a step the rows are a, b, c, d. Those before them are x1 (the last one), x2, x3, in the
    documents d1, d2, d3.
    """
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = column < CHANNELS
    w0, w1, w2, w3, bias = _taps(weight_ptr, bias_ptr, column, real, WIDTH)
    first = tl.program_id(0) * length
    x3, x2, x1, d3, d2, d1 = _three_rows(
        x_ptr, seq_idx_ptr, first - 3, tokens, x_stride, column, CHANNELS
    )
    for step in range(0, length, 4):
        t = first + step
        a, b, c, da, db, dc = _three_rows(x_ptr, seq_idx_ptr, t, tokens, x_stride, column, CHANNELS)
        d, dd = _row(x_ptr, seq_idx_ptr, t + 3, tokens, x_stride, column, CHANNELS)
        ya = _filter(a, x1, x2, x3, da, d1, d2, d3, w0, w1, w2, w3, WIDTH) + bias
        yb = _filter(b, a, x1, x2, db, da, d1, d2, w0, w1, w2, w3, WIDTH) + bias
        yc = _filter(c, b, a, x1, dc, db, da, d1, w0, w1, w2, w3, WIDTH) + bias
        yd = _filter(d, c, b, a, dd, dc, db, da, w0, w1, w2, w3, WIDTH) + bias
        if SILU:
            ya, yb, yc, yd = (
                ya * tl.sigmoid(ya),
                yb * tl.sigmoid(yb),
                yc * tl.sigmoid(yc),
                yd * tl.sigmoid(yd),
            )
        _store_four(y_ptr, t, ya, yb, yc, yd, first, tokens, CHANNELS, column, CHANNELS)
        x3, x2, x1, d3, d2, d1 = b, c, d, db, dc, dd


@triton.jit(do_not_specialize=["tokens", "length"])
def _backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    seq_idx_ptr,
    dy_ptr,
    dx_ptr,
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
    BLOCK_C: tl.constexpr,
):
    """Compute dx of ``length`` tokens and one block of channels, and their part of dw and dbias.

    The names are those of forward. The gradients of u in the same rows are g1, g2, g3, ga, gb, gc, gd.
    The gradient dx of a row needs those of the three rows after it. So it is complete three rows
    later, and a last step reads rows of the next program.
    """
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = column < CHANNELS
    w0, w1, w2, w3, bias = _taps(weight_ptr, bias_ptr, column, real, WIDTH)
    first = tl.program_id(0) * length
    end = tl.minimum(first + length, tokens)
    x3, x2, x1, d3, d2, d1 = _three_rows(
        x_ptr, seq_idx_ptr, first - 3, tokens, x_stride, column, CHANNELS
    )
    g1 = tl.zeros((BLOCK_C,), tl.float32)
    g2, g3, dw0, dw1, dw2, dw3, dbias = g1, g1, g1, g1, g1, g1, g1
    for step in range(0, length + 4, 4):
        t = first + step
        a, b, c, da, db, dc = _three_rows(x_ptr, seq_idx_ptr, t, tokens, x_stride, column, CHANNELS)
        d, dd = _row(x_ptr, seq_idx_ptr, t + 3, tokens, x_stride, column, CHANNELS)
        ga, gb, gc, _, _, _ = _three_rows(
            dy_ptr, seq_idx_ptr, t, tokens, dy_stride, column, CHANNELS
        )
        gd, _ = _row(dy_ptr, seq_idx_ptr, t + 3, tokens, dy_stride, column, CHANNELS)
        if SILU:
            ga *= _slope(_filter(a, x1, x2, x3, da, d1, d2, d3, w0, w1, w2, w3, WIDTH) + bias)
            gb *= _slope(_filter(b, a, x1, x2, db, da, d1, d2, w0, w1, w2, w3, WIDTH) + bias)
            gc *= _slope(_filter(c, b, a, x1, dc, db, da, d1, w0, w1, w2, w3, WIDTH) + bias)
            gd *= _slope(_filter(d, c, b, a, dd, dc, db, da, w0, w1, w2, w3, WIDTH) + bias)
        dx3 = _filter(g3, g2, g1, ga, d3, d2, d1, da, w0, w1, w2, w3, WIDTH)
        dx2 = _filter(g2, g1, ga, gb, d2, d1, da, db, w0, w1, w2, w3, WIDTH)
        dx1 = _filter(g1, ga, gb, gc, d1, da, db, dc, w0, w1, w2, w3, WIDTH)
        dxa = _filter(ga, gb, gc, gd, da, db, dc, dd, w0, w1, w2, w3, WIDTH)
        _store_four(dx_ptr, t - 3, dx3, dx2, dx1, dxa, first, end, dx_stride, column, CHANNELS)
        g3, g2, g1 = gb, gc, gd
        # Rows from end on count in the sums of the next program.
        ga = tl.where(t < end, ga, 0.0)
        gb = tl.where(t + 1 < end, gb, 0.0)
        gc = tl.where(t + 2 < end, gc, 0.0)
        gd = tl.where(t + 3 < end, gd, 0.0)
        dw0 += ga * a + gb * b + gc * c + gd * d
        if WIDTH > 1:
            dw1 += _along(ga, gb, gc, gd, x1, a, b, c, da == d1, db == da, dc == db, dd == dc)
        if WIDTH > 2:
            dw2 += _along(ga, gb, gc, gd, x2, x1, a, b, da == d2, db == d1, dc == da, dd == db)
        if WIDTH > 3:
            dw3 += _along(ga, gb, gc, gd, x3, x2, x1, a, da == d3, db == d2, dc == d1, dd == da)
        dbias += ga + gb + gc + gd
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


@triton.jit
def _filter(v0, v1, v2, v3, d0, d1, d2, d3, w0, w1, w2, w3, WIDTH: tl.constexpr):
    """Return the sum of w_k v_k over the rows k < WIDTH whose document d_k is that of row 0."""
    total = w0 * v0
    if WIDTH > 1:
        total += w1 * tl.where(d1 == d0, v1, 0.0)
    if WIDTH > 2:
        total += w2 * tl.where(d2 == d0, v2, 0.0)
    if WIDTH > 3:
        total += w3 * tl.where(d3 == d0, v3, 0.0)
    return total


@triton.jit
def _along(ga, gb, gc, gd, va, vb, vc, vd, same_a, same_b, same_c, same_d):
    """Return the sum of g v over the rows of a step whose v is of the same document."""
    return (
        ga * tl.where(same_a, va, 0.0)
        + gb * tl.where(same_b, vb, 0.0)
        + gc * tl.where(same_c, vc, 0.0)
        + gd * tl.where(same_d, vd, 0.0)
    )


@triton.jit
def _slope(u):
    """Return the derivative of SiLU."""
    s = tl.sigmoid(u)
    return s + u * s * (1.0 - s)


@triton.jit
def _row(ptr, seq_idx_ptr, t, tokens, stride, column, CHANNELS: tl.constexpr):
    """Return row t in fp32 and its document; zeros and -1 outside the pack."""
    inside = (t >= 0) & (t < tokens)
    channels = tl.where(inside, CHANNELS, 0)
    row = tl.load(ptr + t.to(tl.int64) * stride + column, mask=column < channels, other=0.0)
    return row.to(tl.float32), tl.load(seq_idx_ptr + t, mask=inside, other=-1)


@triton.jit
def _three_rows(ptr, seq_idx_ptr, t, tokens, stride, column, CHANNELS: tl.constexpr):
    """Return the rows t, t + 1 and t + 2 in fp32, and their documents."""
    a, da = _row(ptr, seq_idx_ptr, t, tokens, stride, column, CHANNELS)
    b, db = _row(ptr, seq_idx_ptr, t + 1, tokens, stride, column, CHANNELS)
    c, dc = _row(ptr, seq_idx_ptr, t + 2, tokens, stride, column, CHANNELS)
    return a, b, c, da, db, dc


@triton.jit
def _store(ptr, t, value, first, end, stride, column, CHANNELS: tl.constexpr):
    """Store row t if it is one of the rows from ``first`` to before ``end``."""
    channels = tl.where((t >= first) & (t < end), CHANNELS, 0)
    row = ptr + t.to(tl.int64) * stride + column
    tl.store(row, value.to(ptr.dtype.element_ty), mask=column < channels)


@triton.jit
def _store_four(ptr, t, a, b, c, d, first, end, stride, column, CHANNELS: tl.constexpr):
    """Store the rows t to t + 3 that are among those from ``first`` to before ``end``."""
    _store(ptr, t, a, first, end, stride, column, CHANNELS)
    _store(ptr, t + 1, b, first, end, stride, column, CHANNELS)
    _store(ptr, t + 2, c, first, end, stride, column, CHANNELS)
    _store(ptr, t + 3, d, first, end, stride, column, CHANNELS)


@triton.jit
def _taps(weight_ptr, bias_ptr, column, real, WIDTH: tl.constexpr):
    """Return the weights of the rows t, t - 1, t - 2, t - 3 and the bias, in fp32."""
    last = weight_ptr + column * WIDTH + WIDTH - 1
    w0 = tl.load(last, mask=real, other=0.0).to(tl.float32)
    zero = tl.zeros_like(w0)
    w1, w2, w3, bias = zero, zero, zero, zero
    if WIDTH > 1:
        w1 = tl.load(last - 1, mask=real, other=0.0).to(tl.float32)
    if WIDTH > 2:
        w2 = tl.load(last - 2, mask=real, other=0.0).to(tl.float32)
    if WIDTH > 3:
        w3 = tl.load(last - 3, mask=real, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias
