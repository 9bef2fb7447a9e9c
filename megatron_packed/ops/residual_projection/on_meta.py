"""Product that adds a residual, on the meta device: its shape alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.ops.quack_tiles import alignment_reasons
from megatron_packed.ops.residual_projection.api import ResidualProjectionInputs


def not_supported_reasons(inputs: ResidualProjectionInputs) -> list[str]:
    """Return the reasons why a joined product supports these inputs on no GPU; empty if it may."""
    reasons = []
    if inputs.dtype != torch.bfloat16:
        reasons.append(f"rows and weights must be bfloat16, not {inputs.dtype}")
    reasons += alignment_reasons(input_width=inputs.inner, output_width=inputs.channels)
    return reasons + ([inputs.apart] if inputs.apart else [])


def added_product(residual_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return a tensor of the shape of ``residual + x W^T``."""
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0])
