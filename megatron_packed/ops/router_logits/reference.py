# mypy: disable-error-code="no-untyped-call"
"""Logits of a router in plain PyTorch: x is converted to the dtype of the weight.

The converted copy of x is not saved. Backward converts x again, which gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def run(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    logits_TE: Tensor = _RouterLogits.apply(x_TD, weight_ED)
    return logits_TE


class _RouterLogits(torch.autograd.Function):
    """Compute the logits in forward; dx and dW, or an addition to ``main_grad``, in backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.main_grad = getattr(weight_ED, "main_grad", None)
        return F.linear(x_TD.to(weight_ED.dtype), weight_ED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = (dlogits_TE @ weight_ED).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            dweight_ED = dlogits_TE.t() @ x_TD.to(weight_ED.dtype)
            if ctx.main_grad is not None:
                ctx.main_grad.add_(dweight_ED)
                dweight_ED = None
        return dx_TD, dweight_ED
