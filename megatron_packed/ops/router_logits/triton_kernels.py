# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Logits of a router on tensor cores, to float32 precision.

Tensor cores multiply bf16 exactly and add in fp32. A float32 number is the sum of three bf16 numbers
of 8 bits each: ``w = high + middle + low``. So ``x W^T`` for x in bf16 is the sum of three exact
products, without TF32 and without the slow fp32 units. `_split_kernel` makes the three parts of the
weight, and in backward those of the logits' gradient. The gradient of x multiplies parts of both, and
omits the three products that are below 2^-24 of the result.

A tensor core truncates where it adds. So each kernel starts a new sum for every block of the inner
dimension, and adds the sums of the blocks in fp32 with rounding. The grids and the order of all sums
depend only on shapes, and there are no atomics. A row of logits depends only on its own row of x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.partial_sums import add_partial_sums
from megatron_packed.ops.router_logits.api import RouterLogitsInputs, partial_sums
from megatron_packed.ops.triton_loads import load, mask_of, rows_at
from megatron_packed.ops.triton_mode import device_reasons

_PARTS = 3
_TOKENS = 64
"""Rows of x in one tile."""
_MOST_EXPERTS = 64
"""Most experts in one tile."""
_SPLIT_BLOCK = 1024


def not_supported_reasons(inputs: RouterLogitsInputs) -> list[str]:
    """Return the reasons why the kernels do not support these inputs; empty if they do."""
    reasons = device_reasons(inputs.device_type)
    if inputs.dtype != torch.bfloat16 or inputs.weight_dtype != torch.float32:
        reasons.append(
            f"rows ({inputs.dtype}) must be bfloat16 and the weight ({inputs.weight_dtype}) float32"
        )
    return reasons


def run(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    logits_TE: Tensor = _SplitProducts.apply(x_TD, weight_ED)
    return logits_TE


class _SplitProducts(torch.autograd.Function):
    """Compute the logits in forward; dx and dW, or an addition to ``main_grad``, in backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
        weight_XED = split(weight_ED)
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.main_grad = getattr(weight_ED, "main_grad", None)
        return logits(x_TD, weight_XED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        dlogits_XTE = split(dlogits_TE.contiguous())
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = input_gradient(dlogits_XTE, split(weight_ED), x_TD.dtype)
        if ctx.needs_input_grad[1]:
            parts_SED = weight_gradients(dlogits_XTE, x_TD)
            dweight_ED = add_partial_sums(parts_SED, weight_ED, ctx.main_grad)
        return dx_TD, dweight_ED


def split(x: Tensor) -> Tensor:
    """Return three bf16 tensors ``(3, *x.shape)`` whose sum is x: high, middle and low part.

    Args:
        x: float32, contiguous.
    """
    parts = torch.empty(_PARTS, *x.shape, dtype=torch.bfloat16, device=x.device)
    _split_kernel[(triton.cdiv(x.numel(), _SPLIT_BLOCK),)](x, parts, x.numel(), BLOCK=_SPLIT_BLOCK)
    return parts


def logits(x_TD: Tensor, weight_XED: Tensor) -> Tensor:
    """Return ``(T, E)`` float32: the product of x with the sum of the weight's parts."""
    tokens, channels = x_TD.shape
    experts = weight_XED.shape[1]
    block = _experts_of_tile(experts)
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=x_TD.device)
    _logits_kernel[(triton.cdiv(experts, block), triton.cdiv(tokens, _TOKENS))](
        x_TD,
        weight_XED,
        logits_TE,
        tokens,
        CHANNELS=channels,
        EXPERTS=experts,
        BLOCK_T=_TOKENS,
        BLOCK_E=block,
        BLOCK_D=128 if block <= 32 else 64,
        num_warps=4,
        num_stages=4,
    )
    return logits_TE


def input_gradient(dlogits_XTE: Tensor, weight_XED: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(T, D)`` in ``dtype``: the product of the two sums of parts."""
    _, tokens, experts = dlogits_XTE.shape
    channels = weight_XED.shape[2]
    dx_TD = torch.empty(tokens, channels, dtype=dtype, device=dlogits_XTE.device)
    _input_gradient_kernel[(triton.cdiv(channels, 128), triton.cdiv(tokens, _TOKENS))](
        dlogits_XTE,
        weight_XED,
        dx_TD,
        tokens,
        CHANNELS=channels,
        EXPERTS=experts,
        BLOCK_T=_TOKENS,
        BLOCK_E=_experts_of_tile(experts),
        BLOCK_D=128,
        num_warps=4,
        num_stages=2,
    )
    return dx_TD


def weight_gradients(dlogits_XTE: Tensor, x_TD: Tensor) -> Tensor:
    """Return ``(S, E, D)`` float32 partial sums of the weight's gradient over S ranges of tokens."""
    tokens, channels = x_TD.shape
    experts = dlogits_XTE.shape[2]
    block = _experts_of_tile(experts)
    sums = partial_sums(tokens)
    parts_SED = torch.empty(sums, experts, channels, dtype=torch.float32, device=x_TD.device)
    _weight_gradient_kernel[(triton.cdiv(channels, 128), triton.cdiv(experts, block), sums)](
        dlogits_XTE,
        x_TD,
        parts_SED,
        tokens,
        triton.cdiv(triton.cdiv(tokens, sums), _TOKENS) * _TOKENS,
        CHANNELS=channels,
        EXPERTS=experts,
        BLOCK_T=_TOKENS,
        BLOCK_E=block,
        BLOCK_D=128,
        num_warps=4,
        num_stages=3,
    )
    return parts_SED


def _experts_of_tile(experts: int) -> int:
    return min(_MOST_EXPERTS, max(16, int(triton.next_power_of_2(experts))))


@triton.jit(do_not_specialize=["numel"])
def _split_kernel(x_ptr, parts_ptr, numel, BLOCK: tl.constexpr):
    """Write three bf16 parts of each number; each difference is exact in fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    rest = load(x_ptr + at, mask)
    for part in tl.static_range(3):
        rounded = rest.to(tl.bfloat16)
        tl.store(parts_ptr + part * numel.to(tl.int64) + at, rounded, mask=mask)
        rest -= rounded.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    tokens,
    CHANNELS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    PART: tl.constexpr = EXPERTS * CHANNELS
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(0, CHANNELS, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)
        here = channel < CHANNELS
        x = load(
            rows_at(x_ptr, token, CHANNELS, channel),
            mask_of(token < tokens, here),
        )
        at = weight_ptr + expert[None, :] * CHANNELS + channel[:, None]
        mask = mask_of(here, expert < EXPERTS)
        # The small parts come first, so that they are added to a small sum.
        block = tl.dot(x, load(at + 2 * PART, mask))
        block = tl.dot(x, load(at + PART, mask), block)
        block = tl.dot(x, load(at, mask), block)
        total += block
    tl.store(
        rows_at(logits_ptr, token, EXPERTS, expert),
        total,
        mask=mask_of(token < tokens, expert < EXPERTS),
    )


@triton.jit(do_not_specialize=["tokens"])
def _input_gradient_kernel(
    dlogits_ptr,
    weight_ptr,
    dx_ptr,
    tokens,
    CHANNELS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    PART: tl.constexpr = EXPERTS * CHANNELS
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tokens.to(tl.int64) * EXPERTS
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, EXPERTS, BLOCK_E):
        expert = start + tl.arange(0, BLOCK_E)
        here = expert < EXPERTS
        at = rows_at(dlogits_ptr, token, EXPERTS, expert)
        mask = mask_of(token < tokens, here)
        high = load(at, mask)
        middle = load(at + part, mask)
        low = load(at + 2 * part, mask)
        at_w = rows_at(weight_ptr, expert, CHANNELS, channel)
        mask_w = mask_of(here, channel < CHANNELS)
        high_w = load(at_w, mask_w)
        middle_w = load(at_w + PART, mask_w)
        low_w = load(at_w + 2 * PART, mask_w)
        block = tl.dot(low, high_w)
        block = tl.dot(high, low_w, block)
        block = tl.dot(middle, middle_w, block)
        block = tl.dot(middle, high_w, block)
        block = tl.dot(high, middle_w, block)
        block = tl.dot(high, high_w, block)
        total += block
    tl.store(
        rows_at(dx_ptr, token, CHANNELS, channel),
        total,
        mask=mask_of(token < tokens, channel < CHANNELS),
    )


@triton.jit(do_not_specialize=["tokens", "tokens_of_sum"])
def _weight_gradient_kernel(
    dlogits_ptr,
    x_ptr,
    parts_ptr,
    tokens,
    tokens_of_sum,
    CHANNELS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum ``x^T dlogits`` over the tokens of one range, for a tile of channels and experts."""
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tokens.to(tl.int64) * EXPERTS
    first = tl.program_id(2) * tokens_of_sum
    last = tl.minimum(first + tokens_of_sum, tokens)
    total = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for start in range(first, last, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T).to(tl.int64)
        here = token < tokens
        # The tile of x is loaded in the transposed order.
        x = load(
            x_ptr + token[None, :] * CHANNELS + channel[:, None],
            here[None, :] & (channel < CHANNELS)[:, None],
        )
        at = rows_at(dlogits_ptr, token, EXPERTS, expert)
        mask = mask_of(here, expert < EXPERTS)
        block = tl.dot(x, load(at + 2 * part, mask))
        block = tl.dot(x, load(at + part, mask), block)
        block = tl.dot(x, load(at, mask), block)
        total += block
    row = tl.program_id(2).to(tl.int64) * EXPERTS + expert
    tl.store(
        parts_ptr + row[None, :] * CHANNELS + channel[:, None],
        total,
        mask=(expert < EXPERTS)[None, :] & (channel < CHANNELS)[:, None],
    )
