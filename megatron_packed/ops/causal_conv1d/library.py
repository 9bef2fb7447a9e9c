"""Convolution by the channel-last kernels of the package causal-conv1d, which read ``seq_idx``.

This module calls the library's lower-level functions in its own autograd function. So strided column
slices need no copy, and the gradient of x is written into its columns of the buffer of
``ops.column_slices``. The kernel adds the gradients of weight and bias to their ``main_grad`` if they
have one.

Outputs and dx are bitwise reproducible. The gradients of weight and bias are atomic sums unless
``CAUSAL_CONV1D_DETERMINISTIC=1`` is set; the library reads this variable since 1.6.0.
"""

from __future__ import annotations

from typing import Any

import torch
from causal_conv1d.cpp_functions import _causal_conv1d_bwd_cpp, causal_conv1d_fwd_function
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.causal_conv1d.api import CausalConvInputs
from megatron_packed.ops.column_slices import GradientSlot, gradient_like, gradient_slot
from megatron_packed.ops.kernel_operands import main_grads_of

_VECTOR_BYTES = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def not_supported_reasons(inputs: CausalConvInputs) -> list[str]:
    """Return the reasons why the library's kernels do not support these inputs, if any."""
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(f"the kernel runs on CUDA devices, not on {inputs.device_type}")
    if inputs.dtype not in _DTYPES or inputs.weight_dtype not in _DTYPES:
        reasons.append(
            f"x ({inputs.dtype}) and weight ({inputs.weight_dtype}) must be bfloat16, float16 or float32"
        )
    if inputs.bias_dtype not in (None, inputs.weight_dtype):
        reasons.append(
            f"bias ({inputs.bias_dtype}) and weight ({inputs.weight_dtype}) must have the same dtype"
        )
    if not 2 <= inputs.width <= 4:
        reasons.append(f"the filter's width ({inputs.width}) must be 2, 3 or 4")
    if inputs.channels % 8:
        reasons.append(f"the number of channels ({inputs.channels}) is not divisible by 8")
    if inputs.tokens * max(inputs.row_stride, inputs.channels) > 2**31 - 1:
        reasons.append(
            f"{inputs.tokens} tokens with a stride of {max(inputs.row_stride, inputs.channels)} elements overflow "
            "the kernel's 32-bit offsets; use shorter packs"
        )
    return reasons


def run(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    seq_idx_1T: Tensor,
    *,
    activation: str | None,
) -> Tensor:
    """Run the op (see ``api.causal_conv1d``); copy x first if it is not aligned for 16-byte loads."""
    slot = gradient_slot(x_TC)
    if not _is_aligned(x_TC):
        x_TC, slot = _copy(x_TC), None
    y_TC: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x_TC, weight_CW, bias_C, seq_idx_1T, activation == "silu", slot
    )
    return y_TC


def _is_aligned(x_TC: Tensor) -> bool:
    row_bytes = x_TC.stride(0) * x_TC.element_size()
    return (
        x_TC.stride(1) == 1
        and x_TC.stride(0) % 8 == 0
        and row_bytes % _VECTOR_BYTES == 0
        and x_TC.data_ptr() % _VECTOR_BYTES == 0
    )


def _copy(x_TC: Tensor) -> Tensor:
    """Copy a tensor.

    ``contiguous()`` would not copy a single row, which is contiguous at any unaligned address.
    """
    return x_TC.clone(memory_format=torch.contiguous_format)


def _channels_last(x_TC: Tensor) -> Tensor:
    """View ``(T, C)`` as ``(1, C, T)`` with channel stride 1, the library's channel-last layout."""
    return x_TC.t()[None]


class _Convolution(torch.autograd.Function):
    """Convolution and SiLU in one kernel; backward is one kernel that recomputes the SiLU's input."""

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
        ctx.save_for_backward(x_TC, weight_CW, bias_C, seq_idx_1T)
        ctx.silu = silu
        ctx.slot = slot
        ctx.main_grads = main_grads_of(weight_CW, bias_C)
        y = causal_conv1d_fwd_function(
            _channels_last(x_TC), weight_CW, bias_C, seq_idx_1T, None, None, silu
        )
        y_TC: Tensor = y[0].t()
        return y_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW, bias_C, seq_idx_1T = ctx.saved_tensors
        if not _is_aligned(dy_TC):
            dy_TC = _copy(dy_TC)
        dx_TC = gradient_like(x_TC, ctx.slot)
        dweight_CW, dbias_C = map(_accumulator, (weight_CW, bias_C), ctx.main_grads)
        _causal_conv1d_bwd_cpp(
            x=_channels_last(x_TC),
            weight=weight_CW,
            bias=bias_C,
            dout=_channels_last(dy_TC),
            seq_idx=seq_idx_1T,
            initial_states=None,
            dfinal_states=None,
            dx=_channels_last(dx_TC),
            dweight=dweight_CW,
            dbias=dbias_C,
            dinitial_states=None,
            silu_activation=ctx.silu,
        )
        left = (
            None if gradient is None or main_grad is not None else gradient.to(parameter.dtype)
            for parameter, gradient, main_grad in zip(
                (weight_CW, bias_C), (dweight_CW, dbias_C), ctx.main_grads
            )
        )
        return dx_TC, *left, None, None, None


def _accumulator(parameter: Tensor | None, main_grad: Tensor | None) -> Tensor | None:
    """Return the fp32 tensor to which the library's kernel adds a parameter's gradient."""
    if parameter is None or main_grad is not None:
        return main_grad
    return torch.zeros_like(parameter, dtype=torch.float32)
