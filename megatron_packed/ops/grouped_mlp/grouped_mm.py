# mypy: disable-error-code="no-untyped-call"
"""MLPs of the experts by PyTorch's grouped matrix product, which reads the offsets on the device.

A layer needs six products: two in forward, and for each of these one for the gradient of the input
and one for the gradient of the weight. The grouped product does not write rows after the last
offset, and may leave the gradient of an unused expert unwritten. Both are set to zero wherever later
code reads them. If a weight has ``main_grad`` (fp32), a kernel of this package computes the gradient
and adds it there; see `weight_gradient`.

The tiling of the product depends on the row counts of the experts. So rows with equal content may
differ in the last bits between calls with different row counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_packed.ops.activation.api import Kind, activation
from megatron_packed.ops.grouped_mlp.unwritten_rows import zero_rows_after_, zero_unused_experts_
from megatron_packed.ops.grouped_mlp.weight_gradient import add_weight_gradient, can_add
from megatron_packed.torch_private import grouped_mm as _product

if TYPE_CHECKING:
    from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs

_ALIGNMENT = 8
"""Required divisor of row lengths: each row must start at a multiple of 16 bytes (8 bfloat16)."""


def not_supported_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why the grouped product does not support these inputs; empty if it does."""
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(
            f"the grouped product runs on CUDA devices, and would sync with the host on {inputs.device_type}"
        )
    elif torch.cuda.get_device_capability() < (8, 0):
        reasons.append("the kernel needs a GPU of compute capability 8.0 or later")
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
    """Compute the first product, ``(R, D)`` -> ``(R, F)``.

    Rows from the last offset on are undefined in the output and zero in the gradient of x.
    """
    main_grad = getattr(w1_EFD, "main_grad", None)
    hidden_RF: Tensor = _GroupedLinear.apply(x_RD, w1_EFD, main_grad, offsets_E, False, True)
    return hidden_RF


def activate(x_RF: Tensor, kind: Kind) -> Tensor:
    """Apply the activation function; see ``ops.activation``."""
    return activation(x_RF, kind)


def fc2(x_RF: Tensor, w2_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the second product, ``(R, F)`` -> ``(R, D)``.

    Rows from the last offset on are zero in the output and undefined in the gradient of x.
    """
    main_grad = getattr(w2_EDF, "main_grad", None)
    y_RD: Tensor = _GroupedLinear.apply(x_RF, w2_EDF, main_grad, offsets_E, True, False)
    return y_RD


class _GroupedLinear(torch.autograd.Function):
    """Product ``y = x W_e^T`` for each expert; backward ``dx = dy W_e`` and ``dW_e = dy_e^T x_e``.

    dW_e is added to ``main_grad`` if there is one. Rows after the last offset are not read.
    ``clear_y`` and ``clear_dx`` set these rows to zero in y and dx; otherwise they are unwritten.
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
            main_grad = ctx.main_grad
            if main_grad is not None and can_add(main_grad, dy_RO, x_RI):
                add_weight_gradient(main_grad, dy_RO, x_RI, offsets_E)
                return dx_RI, None, None, None, None, None
            dweight_EOI = zero_unused_experts_(_product(dy_RO.t(), x_RI, offs=offsets_E), offsets_E)
            if main_grad is not None:
                main_grad.add_(dweight_EOI)
                dweight_EOI = None
        return dx_RI, dweight_EOI, None, None, None, None
