# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Activations by one elementwise Triton kernel in forward and one in backward.

Each kernel reads and writes each element once and computes in fp32. Backward recomputes from the
saved input. There are no atomics, and the grid depends only on shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.activation.api import KINDS, ActivationInputs, Kind
from megatron_packed.ops.kernel_operands import adjacent, rows_of
from megatron_packed.ops.triton_loads import load_fp32, mask_of
from megatron_packed.ops.triton_mode import fp32_reasons

_BLOCK = 2048
"""Elements of one row that one program handles: 16 per thread."""


_MOST_GROUPS = 32
"""Most groups of a gate that one program handles. More would not fit in registers."""


def not_supported_reasons(inputs: ActivationInputs) -> list[str]:
    return fp32_reasons(inputs.device_type, inputs.dtype)


def run(x_TF: Tensor, kind: Kind) -> Tensor:
    y_TF: Tensor = _Activation.apply(x_TF, KINDS.index(kind))
    return y_TF


def run_gate(x_TKF: Tensor, gate_TKF: Tensor) -> Tensor:
    y_TKF: Tensor = _SigmoidGate.apply(x_TKF, gate_TKF)
    return y_TKF


class _Activation(torch.autograd.Function):
    """Compute y from x in forward, and dx from x and dy in backward."""

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, kind: int) -> Tensor:
        x = rows_of(x_TF)
        rows, features = x.shape[0], x.shape[1] // _parts(kind)
        y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
        if y.numel():
            _forward_kernel[_grid(rows, features)](
                x,
                y,
                features,
                x.stride(0),
                SPLIT=triton.cdiv(features, _BLOCK),
                KIND=kind,
                BLOCK=_BLOCK,
                num_warps=4,
            )
        ctx.save_for_backward(x)
        ctx.kind = kind
        ctx.shape = x_TF.shape
        return y.view(*x_TF.shape[:-1], features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dy, dx = rows_of(dy_TF), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, features = dy.shape
        if dy.numel():
            _backward_kernel[_grid(rows, features)](
                x,
                dy,
                dx,
                features,
                x.stride(0),
                dy.stride(0),
                SPLIT=triton.cdiv(features, _BLOCK),
                KIND=ctx.kind,
                BLOCK=_BLOCK,
                num_warps=4,
            )
        return dx.view(ctx.shape), None


class _SigmoidGate(torch.autograd.Function):
    """Compute y from x and its gate in forward, and the gradients of both in backward."""

    @staticmethod
    def forward(ctx: Any, x_TKF: Tensor, gate_TKF: Tensor) -> Tensor:
        x_TKF = x_TKF.contiguous()
        gate_TKF = adjacent(gate_TKF)
        y_TKF = torch.empty_like(x_TKF)
        if y_TKF.numel():
            grid, sizes = _gate_launch(x_TKF, gate_TKF)
            _gate_kernel[grid](x_TKF, gate_TKF, y_TKF, **sizes)
        ctx.save_for_backward(x_TKF, gate_TKF)
        return y_TKF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TKF: Tensor) -> tuple[Tensor, Tensor]:
        x_TKF, gate_TKF = ctx.saved_tensors
        dy_TKF = dy_TKF.contiguous()
        dx_TKF, dgate_TKF = torch.empty_like(x_TKF), torch.empty_like(x_TKF)
        if dy_TKF.numel():
            grid, sizes = _gate_launch(x_TKF, gate_TKF)
            _gate_backward_kernel[grid](x_TKF, gate_TKF, dy_TKF, dx_TKF, dgate_TKF, **sizes)
        return dx_TKF, dgate_TKF


def _parts(kind: int) -> int:
    return 2 if KINDS[kind] == "swiglu" else 1


def _grid(rows: int, features: int) -> tuple[int]:
    return (rows * triton.cdiv(features, _BLOCK),)


def _gate_launch(x_TKF: Tensor, gate_TKF: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid (blocks of groups, blocks of features) and the sizes for the gate's kernels.

    A narrow group fills only a part of a block, so a program handles several groups.
    """
    tokens, groups, features = x_TKF.shape
    block = min(_BLOCK, triton.next_power_of_2(features))
    rows = min(_MOST_GROUPS, _BLOCK // block)
    return (triton.cdiv(tokens * groups, rows), triton.cdiv(features, block)), {
        "rows": tokens * groups,
        "groups": groups,
        "gate_token_stride": gate_TKF.stride(0),
        "gate_group_stride": gate_TKF.stride(1),
        "FEATURES": features,
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": 4,
    }


@triton.jit
def _normal(x):
    """Return the standard normal distribution function of x, and exp(-x^2 / 2).

    The tail beyond |x| is exp(-x^2 / 2) times a polynomial in t, fitted with a relative error of
    2e-7. This takes half the instructions of ``tl.erf``, and keeps the precision of small results.
    """
    root = tl.rsqrt(1.0 + 0.30759144981614817 * tl.abs(x))
    t = root * root
    tail = 0.0363053897 * t - 0.147218899
    tail = tail * t + 0.169783365
    tail = tail * t - 0.0257671234
    tail = tail * t + 0.115182566
    tail = tail * t + 0.105748738
    tail = tail * t + 0.123279912
    tail = tail * t + 0.122686115
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail *= t * bell
    return tl.where(x > 0, 1.0 - tail, tail), bell


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, features, x_stride, SPLIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of one row.

    Program i handles block i % SPLIT of row i // SPLIT. KIND is an index into ``api.KINDS``.
    """
    program = tl.program_id(0)
    row = (program // SPLIT).to(tl.int64)
    column = (program % SPLIT) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    x = load_fp32(x_ptr + row * x_stride + column, mask)
    if KIND == 0:
        y = x * _normal(x)[0]
    elif KIND == 1:
        positive = tl.where(x > 0, x, 0.0)
        y = positive * positive
    else:
        up = load_fp32(x_ptr + row * x_stride + features + column, mask)
        y = x / (1.0 + tl.exp(-x)) * up
    tl.store(y_ptr + row * features + column, y, mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    features,
    x_stride,
    dy_stride,
    SPLIT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx = dy * f'(x) for one block; for swiglu the gradients of gate and up."""
    program = tl.program_id(0)
    row = (program // SPLIT).to(tl.int64)
    column = (program % SPLIT) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    x = load_fp32(x_ptr + row * x_stride + column, mask)
    dy = load_fp32(dy_ptr + row * dy_stride + column, mask)
    if KIND == 2:
        up = load_fp32(x_ptr + row * x_stride + features + column, mask)
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        dx_row = dx_ptr + row * (2 * features)
        dup = dy * x * sigmoid
        tl.store(dx_row + features + column, dup, mask=mask)
        dx = dy * up * sigmoid * (1.0 + x * (1.0 - sigmoid))
    else:
        dx_row = dx_ptr + row * features
        if KIND == 0:
            distribution, bell = _normal(x)
            dx = dy * (distribution + x * bell * 0.3989422804014327)
        else:
            dx = dy * 2.0 * tl.where(x > 0, x, 0.0)
    tl.store(dx_row + column, dx, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    x_ptr,
    gate_ptr,
    y_ptr,
    rows,
    groups,
    gate_token_stride,
    gate_group_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y = x * sigmoid(gate) for a block of features of ROWS groups.

    Row r is group r % groups of token r // groups.
    """
    place, gate_place, mask = _gate_places(
        rows, groups, gate_token_stride, gate_group_stride, FEATURES, ROWS, BLOCK
    )
    gate = load_fp32(gate_ptr + gate_place, mask)
    x = load_fp32(x_ptr + place, mask)
    y = x / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + place, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gate_backward_kernel(
    x_ptr,
    gate_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    rows,
    groups,
    gate_token_stride,
    gate_group_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx = dy * s and dgate = dy * x * s * (1 - s), with s = sigmoid(gate)."""
    place, gate_place, mask = _gate_places(
        rows, groups, gate_token_stride, gate_group_stride, FEATURES, ROWS, BLOCK
    )
    gate = load_fp32(gate_ptr + gate_place, mask)
    x = load_fp32(x_ptr + place, mask)
    dy = load_fp32(dy_ptr + place, mask)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dx, dgate = dy * sigmoid, dy * x * sigmoid * (1.0 - sigmoid)
    tl.store(dx_ptr + place, dx, mask=mask)
    tl.store(dgate_ptr + place, dgate, mask=mask)


@triton.jit
def _gate_places(
    rows,
    groups,
    gate_token_stride,
    gate_group_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the offsets of this program's elements in x and in the gate, and their mask."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = row.to(tl.int64) * FEATURES
    # A division of 64-bit integers would take many instructions.
    token, group = (row // groups).to(tl.int64), row % groups
    gate_start = token * gate_token_stride + group * gate_group_stride
    mask = mask_of(row < rows, column < FEATURES)
    return start[:, None] + column[None, :], gate_start[:, None] + column[None, :], mask
