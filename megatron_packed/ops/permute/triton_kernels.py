# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels that gather between tokens and rows, with one program per row or token.

No tensor of size (T, K, D) is allocated. Each result is written exactly once and sums run over k in
order, so all results are bitwise reproducible. The arithmetic is fp32. Rows without a token are
written as zeros by `permute`, and `unpermute` does not read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.permute.api import PermuteInputs
from megatron_packed.ops.triton_loads import load_fp32
from megatron_packed.ops.triton_mode import fp32_reasons

_CHANNELS_PER_STEP = 2048
_COPYING_PROGRAMS, _WORDS_PER_STEP = 32, 2048
"""Programs of a copy of used rows, and words that a program copies in a step."""


def not_supported_reasons(inputs: PermuteInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    return fp32_reasons(inputs.device_type, inputs.dtype)


def rows_of_tokens(x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
    """Return ``x[token_R]``, zero where the token is -1; see ``api.permute``."""
    rows_RD: Tensor = _TritonGather.apply(x_TD, token_R, row_TK)
    return rows_RD


def tokens_of_rows(
    y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, route_R: Tensor, row_TK: Tensor
) -> Tensor:
    """Return the weighted sum of each token's rows; see ``api.unpermute``."""
    y_TD: Tensor = _TritonCombine.apply(y_RD, weights_TK, token_R, route_R, row_TK)
    return y_TD


class _TritonGather(torch.autograd.Function):
    """Copy tokens to rows; backward sums the gradients of each token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        x_RD = x_TD.new_empty(token_R.shape[0], x_TD.shape[1])
        _launch_rows(x_TD.contiguous(), token_R, x_RD)
        return x_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _sum_rows(dx_RD, None, row_TK), None, None


class _TritonCombine(torch.autograd.Function):
    """Weighted sum of each token's rows.

    Backward computes the gradient of the rows, and of each weight as a dot product, in one kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_TK: Tensor, token_R: Tensor, route_R: Tensor, row_TK: Tensor
    ) -> Tensor:
        y_RD, weights_TK = y_RD.contiguous(), weights_TK.contiguous()
        ctx.save_for_backward(y_RD, weights_TK, token_R, route_R)
        return _sum_rows(y_RD, weights_TK, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_RD, weights_TK, token_R, route_R = ctx.saved_tensors
        # A route without a row is not written, so the gradients of the weights start as zeros.
        dy_RD, dweights_TK = (torch.empty_like(y_RD), torch.zeros_like(weights_TK))
        _launch_rows(dy_TD.contiguous(), token_R, dy_RD, (route_R, weights_TK, y_RD, dweights_TK))
        return dy_RD, dweights_TK, None, None, None


def copy_used(
    target: Tensor, source: Tensor, rows_e: Tensor, rank: int, row_bytes: int, start: int
) -> None:
    """Copy the bytes of used rows on few SMs; see ``used_rows.UsedRows.copy``."""
    sizes = (target.numel(), row_bytes, start, target.storage_offset(), source.storage_offset())
    word = 8 if all(size % 8 == 0 for size in sizes) else 1
    if word == 8:
        target, source = target.view(torch.int64), source.view(torch.int64)
    _copy_used_kernel[(_COPYING_PROGRAMS,)](
        target,
        source,
        rows_e[rank:],
        row_bytes // word,
        start // word,
        target.numel(),
        BLOCK=_WORDS_PER_STEP,
        PROGRAMS=_COPYING_PROGRAMS,
    )


def _launch_rows(
    x_TD: Tensor,
    token_R: Tensor,
    out_RD: Tensor,
    weighted: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Fill ``out_RD`` from tokens.

    With ``weighted`` (routes, weights, y, dweights) scale by the weights, and fill dweights.
    """
    route_R, weights_TK, y_RD, dweights_TK = weighted or (token_R, out_RD, out_RD, out_RD)
    if out_RD.shape[0]:
        _rows_kernel[(out_RD.shape[0],)](
            x_TD,
            token_R,
            out_RD,
            route_R,
            weights_TK,
            y_RD,
            dweights_TK,
            CHANNELS=x_TD.shape[1],
            BLOCK=_block(x_TD.shape[1]),
            WEIGHTED=weighted is not None,
        )


def _sum_rows(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    (tokens, routes), channels = row_TK.shape, y_RD.shape[1]
    y_TD = y_RD.new_empty(tokens, channels)
    if tokens:
        _tokens_kernel[(tokens, triton.cdiv(channels, _block(channels)))](
            y_RD.contiguous(),
            weights_TK,
            row_TK,
            y_TD,
            CHANNELS=channels,
            ROUTES=routes,
            BLOCK=_block(channels),
            WEIGHTED=weights_TK is not None,
        )
    return y_TD


def _block(channels: int) -> int:
    return min(int(triton.next_power_of_2(channels)), _CHANNELS_PER_STEP)


@triton.jit
def _copy_used_kernel(
    target_ptr,
    source_ptr,
    rows_ptr,
    row_words,
    start,
    words,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Copy words of a part up to its last used row; program p copies blocks p, p + PROGRAMS, ..."""
    used = tl.minimum(tl.load(rows_ptr).to(tl.int64) * row_words - start, words)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < used:
        place = begin + tl.arange(0, BLOCK)
        mask = place < used
        tl.store(target_ptr + place, tl.load(source_ptr + place, mask=mask), mask=mask)
        begin += PROGRAMS * BLOCK


@triton.jit
def _rows_kernel(
    x_ptr,
    token_ptr,
    out_ptr,
    route_ptr,
    weight_ptr,
    y_ptr,
    d_weight_ptr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Copy a token to one row; program r handles row r.

    With WEIGHTED, scale the copy by the route's weight. Also store the dot product of the token and
    the row of y as the gradient of the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int64)
    readable = tl.where(token >= 0, CHANNELS, 0)
    if WEIGHTED:
        route = tl.load(route_ptr + row).to(tl.int64)
        weight = load_fp32(weight_ptr + route, route >= 0)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        mask = channel < readable
        x = load_fp32(x_ptr + token * CHANNELS + channel, mask)
        if WEIGHTED:
            dot += x * load_fp32(y_ptr + row * CHANNELS + channel, mask)
            x = tl.where(mask, x * weight, 0.0)
        tl.store(out_ptr + row * CHANNELS + channel, x, mask=channel < CHANNELS)
    if WEIGHTED:
        tl.store(d_weight_ptr + route, tl.sum(dot, axis=0), mask=route >= 0)


@triton.jit
def _tokens_kernel(
    y_ptr,
    weight_ptr,
    row_ptr,
    out_ptr,
    CHANNELS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Sum the K rows of a token in order; program (t, j) handles block j of channels of token t."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(ROUTES):
        row = tl.load(row_ptr + token * ROUTES + k).to(tl.int64)
        mask = channel < tl.where(row >= 0, CHANNELS, 0)
        y = load_fp32(y_ptr + row * CHANNELS + channel, mask)
        if WEIGHTED:
            y = y * tl.load(weight_ptr + token * ROUTES + k).to(tl.float32)
        total += y
    tl.store(out_ptr + token * CHANNELS + channel, total, mask=channel < CHANNELS)
