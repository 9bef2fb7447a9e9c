# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel that rotates queries and keys in one launch, in forward and in backward.

The kernel is memory-bound. It reads and writes each element once, 16 bytes per thread, with any
strides of the inputs. A program loads the cos and sin rows of its tokens into registers and uses them
for a group of heads.

The arithmetic is fp32, with separate roundings of multiplication and addition (no fused
multiply-add). So the results equal those of the reference bit for bit. There are no atomics, no
autotuning and no host sync. The grid depends only on shapes, so the launch can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.rope.api import RopeInputs
from megatron_packed.ops.triton_loads import load, load_fp32, mask_of, tile_of
from megatron_packed.ops.triton_mode import fp32_reasons

_HEADS_PER_PROGRAM = 4
"""Heads that share one load of cos and sin. More heads would leave too few programs for a short
pack."""

_PAIRS_PER_PROGRAM = 1024
"""Rotated pairs of one head in one program (tokens x R): 8 per thread, a 16-byte access in bf16."""


def not_supported_reasons(inputs: RopeInputs) -> list[str]:
    return fp32_reasons(inputs.device_type, inputs.dtype)


def run(
    q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor, cos_PR: Tensor, sin_PR: Tensor
) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = _Rope.apply(
        q_TNH, k_TKH, position_ids_T, cos_PR.contiguous(), sin_PR.contiguous()
    )
    return rotated


class _Rope(torch.autograd.Function):
    """Rotation by the position's angle; backward rotates the gradients by the negated angle."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        position_ids_T: Tensor,
        cos_PR: Tensor,
        sin_PR: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(position_ids_T, cos_PR, sin_PR)
        return _launch(q_TNH, k_TKH, position_ids_T, cos_PR, sin_PR, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_TNH: Tensor, dk_TKH: Tensor) -> tuple[Tensor | None, ...]:
        return (*_launch(dq_TNH, dk_TKH, *ctx.saved_tensors, backward=True), None, None, None)


def _launch(
    q_TNH: Tensor,
    k_TKH: Tensor,
    position_ids_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    tokens, q_heads, head_dim = q_TNH.shape
    k_heads = k_TKH.shape[1]
    positions, pairs = cos_PR.shape
    q_out = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k_TKH, memory_format=torch.contiguous_format)
    if tokens == 0:
        return q_out, k_out
    block_r = triton.next_power_of_2(pairs)
    block_t = max(1, _PAIRS_PER_PROGRAM // block_r)
    passed = head_dim - 2 * pairs
    q_groups, k_groups = (
        triton.cdiv(q_heads, _HEADS_PER_PROGRAM),
        triton.cdiv(k_heads, _HEADS_PER_PROGRAM),
    )
    _rotate_kernel[(triton.cdiv(tokens, block_t), q_groups + k_groups)](
        q_TNH,
        k_TKH,
        q_out,
        k_out,
        position_ids_T,
        cos_PR,
        sin_PR,
        tokens,
        positions,
        q_groups,
        q_heads,
        k_heads,
        *q_TNH.stride(),
        *k_TKH.stride(),
        position_ids_T.stride(0),
        HEAD_DIM=head_dim,
        PAIRS=pairs,
        BACKWARD=backward,
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_PASSED=triton.next_power_of_2(passed) if passed else 0,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return q_out, k_out


@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    positions,
    q_groups,
    q_heads,
    k_heads,
    q_stride_t,
    q_stride_n,
    q_stride_h,
    k_stride_t,
    k_stride_n,
    k_stride_h,
    position_stride,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
):
    """Rotate one group of heads for a block of tokens.

    Program (i, j) handles the tokens from i * BLOCK_T and group j, with the groups of queries first.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    position = load(position_ptr + token * position_stride, live).to(tl.int64)
    inside = (position >= 0) & (position < positions)
    pair = tl.arange(0, BLOCK_R)
    row = tile_of(tl.where(inside, position, 0), PAIRS, pair)
    mask = mask_of(live, pair < PAIRS)
    cos = tl.where(inside[:, None], load(cos_ptr + row, mask), float("nan"))
    sin = tl.where(inside[:, None], load(sin_ptr + row, mask), float("nan"))
    if BACKWARD:
        sin = -sin
    group = tl.program_id(1)
    if group < q_groups:
        _rotate_heads(
            q_ptr,
            q_out_ptr,
            cos,
            sin,
            token,
            live,
            pair,
            mask,
            group * HEADS,
            q_heads,
            q_stride_t,
            q_stride_n,
            q_stride_h,
            HEAD_DIM,
            PAIRS,
            HEADS,
            BLOCK_PASSED,
        )
    else:
        _rotate_heads(
            k_ptr,
            k_out_ptr,
            cos,
            sin,
            token,
            live,
            pair,
            mask,
            (group - q_groups) * HEADS,
            k_heads,
            k_stride_t,
            k_stride_n,
            k_stride_h,
            HEAD_DIM,
            PAIRS,
            HEADS,
            BLOCK_PASSED,
        )


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    cos,
    sin,
    token,
    live,
    pair,
    mask,
    first_head,
    heads,
    stride_t,
    stride_n,
    stride_h,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
):
    """Rotate HEADS heads of a tensor with any strides into a contiguous (T, heads, HEAD_DIM)."""
    for i in tl.static_range(HEADS):
        head = first_head + i
        if head < heads:
            source = x_ptr + (token * stride_t + head * stride_n)[:, None]
            target = out_ptr + ((token * heads + head) * HEAD_DIM)[:, None]
            first = load_fp32(source + pair[None, :] * stride_h, mask)
            second = load_fp32(source + (pair + PAIRS)[None, :] * stride_h, mask)
            turned = (first * cos - second * sin).to(out_ptr.dtype.element_ty)
            tl.store(target + pair[None, :], turned, mask=mask)
            turned = (second * cos + first * sin).to(out_ptr.dtype.element_ty)
            tl.store(target + (pair + PAIRS)[None, :], turned, mask=mask)
            if BLOCK_PASSED > 0:
                passed = 2 * PAIRS + tl.arange(0, BLOCK_PASSED)
                kept = mask_of(live, passed < HEAD_DIM)
                x = load(source + passed[None, :] * stride_h, kept)
                tl.store(target + passed[None, :], x, mask=kept)
