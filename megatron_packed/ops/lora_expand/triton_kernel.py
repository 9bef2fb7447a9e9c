# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Second product of an adapter as a kernel that does little but write its result.

The inner dimension is so short that a tile has one step. Small tiles leave many programs on a
multiprocessor, whose stores overlap. Each row depends on itself only, and equal inputs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.lora_expand import linear
from megatron_packed.ops.lora_expand.api import LoraExpandInputs
from megatron_packed.ops.triton_loads import load, mask_of, tile_of
from megatron_packed.ops.triton_mode import device_reasons

_MOST_COLUMNS = 32
"""Most columns for which the kernel is faster than the product of PyTorch."""
_TOKENS, _OUTPUTS = 64, 128
"""Rows and columns of a program's tile, the fastest of eight sizes on an H200."""


def not_supported_reasons(inputs: LoraExpandInputs) -> list[str]:
    """Return the reasons why the kernel does not support these inputs; empty if it does."""
    reasons = device_reasons(inputs.device_type)
    if inputs.dtype != torch.bfloat16:
        reasons.append(f"the tensors must be bfloat16, not {inputs.dtype}")
    return reasons


def remark(inputs: LoraExpandInputs) -> str:
    """Return which product runs, as a part of a sentence; empty for the kernel."""
    return f", PyTorch's product for {inputs.columns} columns" * (inputs.columns > _MOST_COLUMNS)


def run(low_TP: Tensor, weight_OP: Tensor, bias_O: Tensor | None) -> Tensor:
    # With more columns the product of PyTorch is as fast: 48 took 20 us, and the kernel 21 us.
    product = linear.run if low_TP.shape[1] > _MOST_COLUMNS else expanded
    return product(low_TP, weight_OP, bias_O)


def expanded(low_TP: Tensor, weight_OP: Tensor, bias_O: Tensor | None) -> Tensor:
    """Run the kernel, for any number of columns."""
    (tokens, columns), outputs = low_TP.shape, weight_OP.shape[0]
    y_TO = low_TP.new_empty(tokens, outputs)
    programs = triton.cdiv(tokens, _TOKENS) * triton.cdiv(outputs, _OUTPUTS)
    if programs:
        _expand_kernel[(programs,)](
            low_TP,
            weight_OP,
            bias_O,
            y_TO,
            tokens,
            outputs,
            *weight_OP.stride(),
            COLUMNS=columns,
            BLOCK_P=max(triton.next_power_of_2(columns), 16),
            BLOCK_T=_TOKENS,
            BLOCK_O=_OUTPUTS,
            num_warps=4,
        )
    return y_TO


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    low_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    tokens,
    outputs,
    weight_stride,
    weight_column_stride,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Compute one tile; neighbouring programs have the same rows."""
    blocks = tl.cdiv(outputs, BLOCK_O)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = (tl.program_id(0) % blocks) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_P)
    low = load(low_ptr + tile_of(row, COLUMNS, column), mask_of(row < tokens, column < COLUMNS))
    weight_tile = output[None, :] * weight_stride + column[:, None] * weight_column_stride
    weight = load(weight_ptr + weight_tile, mask_of(column < COLUMNS, output < outputs))
    y = tl.dot(low, weight)
    if bias_ptr is not None:
        y += load(bias_ptr + output, output < outputs).to(tl.float32)[None, :]
    tl.store(y_ptr + tile_of(row, outputs, output), y, mask=mask_of(row < tokens, output < outputs))
