# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Gate, normalisation and weight in one Triton kernel each for forward and backward.

The kernels are memory-bound. Forward reads x and z and writes y. Backward reads x, z and dy and
writes dx and dz. z may be a column slice of a wider tensor. The arithmetic is fp32, and a row's
results depend only on that row.

The weight's gradient is summed over a fixed partition of the rows, then over the parts in order. So
it is bitwise reproducible. If the weight has ``main_grad``, the sum is added there. There is no
autotuning, so a warm-up only has to compile the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.gated_rms_norm.api import (
    GatedRMSNormInputs,
    rows_of_tile,
    tiles_of_program,
)
from megatron_packed.ops.kernel_operands import adjacent
from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, rows_at
from megatron_packed.ops.triton_mode import fp32_reasons

_LARGEST_GROUP = 16384
# Backward loads the next two tiles in advance. Larger tiles have no room in shared memory.
_LARGEST_PREFETCHED_TILE = 2048


def not_supported_reasons(inputs: GatedRMSNormInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = fp32_reasons(inputs.device_type, inputs.dtype)
    if inputs.group_size > _LARGEST_GROUP:
        reasons.append(
            f"group_size ({inputs.group_size}) is above {_LARGEST_GROUP}, the largest that fits in registers"
        )
    if inputs.split_group:
        reasons.append("the kernel does not sum over the ranks that share a group")
    if not inputs.unit_channel_stride:
        reasons.append("the channel stride of x and z must be 1")
    return reasons


def run(
    x_TD: Tensor,
    z_TD: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool = False,
) -> Tensor:
    """Run the op; see ``api.gated_rms_norm``."""
    y_TD: Tensor = _GatedNorm.apply(
        x_TD, z_TD, weight, eps, group_size, norm_before_gate, gradient_slot(z_TD)
    )
    return y_TD


class _GatedNorm(torch.autograd.Function):
    """Gate, normalisation and weight; saves 1/rms of each row and group for backward.

    Backward runs one kernel, and a second small kernel that sums the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        z_TD: Tensor,
        weight: Tensor,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        slot: GradientSlot | None,
    ) -> Tensor:
        (tokens, channels), groups = x_TD.shape, x_TD.shape[1] // group_size
        y_TD = torch.empty(tokens, channels, dtype=x_TD.dtype, device=x_TD.device)
        rstd_TG = torch.empty(tokens, groups, dtype=torch.float32, device=x_TD.device)
        block, rows = _tile(group_size)
        _forward_kernel[(triton.cdiv(tokens, rows), groups)](
            x_TD,
            z_TD,
            weight,
            y_TD,
            rstd_TG,
            tokens,
            x_TD.stride(0),
            z_TD.stride(0),
            channels,
            groups,
            eps,
            GROUP_SIZE=group_size,
            SHARED_WEIGHT=weight.shape[0] != channels,
            NORM_FIRST=norm_before_gate,
            BLOCK=block,
            ROWS=rows,
            num_warps=_warps(block * rows),
        )
        ctx.save_for_backward(x_TD, z_TD, weight, rstd_TG)
        ctx.group_size = group_size
        ctx.norm_before_gate = norm_before_gate
        ctx.slot = slot
        ctx.main_grad = getattr(weight, "main_grad", None)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, z_TD, weight, rstd_TG = ctx.saved_tensors
        dy_TD = adjacent(dy_TD)
        (tokens, channels), groups = x_TD.shape, rstd_TG.shape[1]
        dx_TD = torch.empty(tokens, channels, dtype=x_TD.dtype, device=x_TD.device)
        dz_TD = gradient_like(z_TD, ctx.slot)
        block, rows = _tile(ctx.group_size)
        tiles_per_program = tiles_of_program(tokens, groups, rows)
        programs = triton.cdiv(tokens, rows * tiles_per_program)
        parts_XD = torch.empty(programs, channels, dtype=torch.float32, device=x_TD.device)
        _backward_kernel[(programs, groups)](
            x_TD,
            z_TD,
            weight,
            rstd_TG,
            dy_TD,
            dx_TD,
            dz_TD,
            parts_XD,
            tokens,
            tiles_per_program,
            x_TD.stride(0),
            z_TD.stride(0),
            dy_TD.stride(0),
            dz_TD.stride(0),
            channels,
            groups,
            GROUP_SIZE=ctx.group_size,
            SHARED_WEIGHT=weight.shape[0] != channels,
            NORM_FIRST=ctx.norm_before_gate,
            BLOCK=block,
            ROWS=rows,
            STAGES=3 if block * rows <= _LARGEST_PREFETCHED_TILE else 1,
            num_warps=_warps(2 * block * rows),
        )
        dweight = None
        if ctx.needs_input_grad[2]:
            # The groups' parts of a shared weight's gradient are further rows of partial sums.
            parts = parts_XD.view(-1, weight.shape[0])
            dweight = add_partial_sums(parts, weight, ctx.main_grad)
        return dx_TD, dz_TD, dweight, None, None, None, None


def _tile(group_size: int) -> tuple[int, int]:
    """Return the channels (a power of two) and rows of one tile."""
    block = triton.next_power_of_2(group_size)
    return block, rows_of_tile(block)


def _warps(elements: int) -> int:
    return min(max(elements // 512, 1), 16)


@triton.jit
def _forward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    tokens,
    x_stride,
    z_stride,
    channels,
    groups,
    eps,
    GROUP_SIZE: tl.constexpr,
    SHARED_WEIGHT: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute ROWS rows of one group; program (i, g) starts at row i * ROWS of group g."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    channel = group * GROUP_SIZE + lane
    mask = mask_of(row < tokens, lane < GROUP_SIZE)
    x = _load(x_ptr, row, x_stride, channel, mask)
    z = _load(z_ptr, row, z_stride, channel, mask)
    weight_lane = lane if SHARED_WEIGHT else channel
    weight = load_fp32(weight_ptr + weight_lane, lane < GROUP_SIZE)
    if NORM_FIRST:
        v = x
    else:
        v = x * z * tl.sigmoid(z)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / GROUP_SIZE + eps)
    y = v * rstd[:, None] * weight[None, :]
    if NORM_FIRST:
        y = y * (z * tl.sigmoid(z))
    tl.store(rows_at(y_ptr, row, channels, channel), y, mask=mask)
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < tokens)


@triton.jit
def _load(ptr, row, stride, channel, mask):
    """Load the channels of some rows as fp32; zeros where the mask is False."""
    return load_fp32(rows_at(ptr, row, stride, channel), mask)


@triton.jit
def _gradients(x, z, dy, weight, rstd, GROUP_SIZE: tl.constexpr, NORM_FIRST: tl.constexpr):
    """Return dx, dz and each row's part of the weight's gradient for a tile of one group."""
    sigmoid = tl.sigmoid(z)
    silu = z * sigmoid
    # d_outer is the gradient of the normalised value times the weight.
    if NORM_FIRST:
        normed = x * rstd[:, None]
        d_outer = dy * silu
    else:
        normed = x * silu * rstd[:, None]
        d_outer = dy
    d_normed = d_outer * weight[None, :]
    mean = tl.sum(d_normed * normed, axis=1) / GROUP_SIZE
    d_v = (d_normed - normed * mean[:, None]) * rstd[:, None]
    if NORM_FIRST:
        dx = d_v
        d_silu = dy * weight[None, :] * normed
    else:
        dx = d_v * silu
        d_silu = d_v * x
    dz = d_silu * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return dx, dz, d_outer * normed


@triton.jit
def _backward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dz_ptr,
    parts_ptr,
    tokens,
    tiles_per_program,
    x_stride,
    z_stride,
    dy_stride,
    dz_stride,
    channels,
    groups,
    GROUP_SIZE: tl.constexpr,
    SHARED_WEIGHT: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx and dz of several tiles of one group, and their part of the weight's gradient.

    Program (i, g) handles ``tiles_per_program`` consecutive tiles of group g.
    """
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    channel = group * GROUP_SIZE + lane
    weight_lane = lane if SHARED_WEIGHT else channel
    weight = load_fp32(weight_ptr + weight_lane, lane < GROUP_SIZE)
    d_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(0, tiles_per_program, num_stages=STAGES):
        row = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        mask = mask_of(row < tokens, lane < GROUP_SIZE)
        x = _load(x_ptr, row, x_stride, channel, mask)
        z = _load(z_ptr, row, z_stride, channel, mask)
        dy = _load(dy_ptr, row, dy_stride, channel, mask)
        rstd = load(rstd_ptr + row * groups + group, row < tokens)
        dx, dz, d_weight_rows = _gradients(x, z, dy, weight, rstd, GROUP_SIZE, NORM_FIRST)
        tl.store(rows_at(dx_ptr, row, channels, channel), dx, mask=mask)
        tl.store(rows_at(dz_ptr, row, dz_stride, channel), dz, mask=mask)
        d_weight += d_weight_rows
    part = parts_ptr + program * channels + channel
    tl.store(part, tl.sum(d_weight, axis=0), mask=lane < GROUP_SIZE)
