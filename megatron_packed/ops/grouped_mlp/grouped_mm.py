# mypy: disable-error-code="no-untyped-call"
"""The experts' products by PyTorch's grouped matrix product, with the offsets read on the device.

Six products per layer: two forward, and for each of them one for the input's and one for the
weight's gradient. The grouped product writes no row after the last offset and may leave the
gradient of an unused expert unwritten; both are set to zero where anyone could see them. A weight's
gradient is added to its ``main_grad`` (fp32) if it has one.

Rows of equal content get equal bits only as far as the product's tiling, which follows the row
counts, allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_, zero_unused_experts_
from megatron_packed.torch_private import grouped_mm as _product

if TYPE_CHECKING:
    from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs

_ALIGNMENT = 8
"""Elements of bfloat16 in the 16 bytes that every row of every operand must start at a multiple of.
"""


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why the grouped product cannot serve these inputs; empty when it can."""
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(
            f"its grouped product is a CUDA kernel and syncs with the host on {inputs.device_type}"
        )
    elif torch.cuda.get_device_capability() < (8, 0):
        reasons.append("it needs a GPU of compute capability 8.0 or later")
    if inputs.dtype != torch.bfloat16 or inputs.weight_dtype != torch.bfloat16:
        reasons.append(
            f"rows ({inputs.dtype}) and weights ({inputs.weight_dtype}) must be bfloat16"
        )
    sizes = {
        "channels": inputs.channels,
        "hidden size": inputs.hidden_out,
        "rows of w1": inputs.hidden_in,
    }
    reasons.extend(
        f"{name} ({size}) is not divisible by {_ALIGNMENT}"
        for name, size in sizes.items()
        if size % _ALIGNMENT
    )
    return reasons


def fc1(x_RD: Tensor, w1_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """``(R, D)`` -> ``(R, F)``; rows from the last offset on hold anything, their gradient is 0."""
    main_grad = getattr(w1_EFD, "main_grad", None)
    hidden_RF: Tensor = _GroupedLinear.apply(x_RD, w1_EFD, main_grad, offsets_E, False, True)
    return hidden_RF


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """See ``ops.activation``."""
    return activation(x_RF, kind)


def fc2(x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """``(R, F)`` -> ``(R, D)``; zeros from the last offset on, where the gradient holds anything."""
    main_grad = getattr(w2_EDF, "main_grad", None)
    y_RD: Tensor = _GroupedLinear.apply(x_RF, w2_EDF, main_grad, offsets_E, True, False)
    return y_RD


class _GroupedLinear(torch.autograd.Function):
    """``y = x W_e^T`` per expert. Backward: ``dx = dy W_e``, and ``dW_e = dy_e^T x_e``, added to
    ``main_grad``.

    Rows after the last offset are not read. They are cleared in y (``clear_y``) and dx
    (``clear_dx``) where asked, and unwritten elsewhere.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        main_grad: Tensor | None,
        offsets_E: Tensor,
        clear_y: bool,
        clear_dx: bool,
    ) -> Tensor:
        x_RI = x_RI.contiguous()
        ctx.save_for_backward(x_RI, weight_EOI, offsets_E)
        ctx.main_grad = main_grad
        ctx.clear_dx = clear_dx
        y_RO = _product(x_RI, weight_EOI.transpose(1, 2), offs=offsets_E)
        return zero_rows_after_(y_RO, offsets_E) if clear_y else y_RO

    @staticmethod
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, offsets_E = ctx.saved_tensors
        dy_RO = dy_RO.contiguous()
        dx_RI = dweight_EOI = None
        if ctx.needs_input_grad[0]:
            dx_RI = _product(dy_RO, weight_EOI, offs=offsets_E)
            dx_RI = zero_rows_after_(dx_RI, offsets_E) if ctx.clear_dx else dx_RI
        if ctx.needs_input_grad[1]:
            dweight_EOI = zero_unused_experts_(_product(dy_RO.t(), x_RI, offs=offsets_E), offsets_E)
            if ctx.main_grad is not None:
                ctx.main_grad.add_(dweight_EOI)
                dweight_EOI = None
        return dx_RI, dweight_EOI, None, None, None, None
