"""Inputs that the grouped products of GPUs support; the module imports no kernels, so a plan can ask it."""

from __future__ import annotations

import torch

from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs
from megatron_packed.ops.quack_tiles import alignment_reasons


def shape_and_dtype_reasons(inputs: GroupedMLPInputs) -> list[str]:
    """Return the reasons why no product of this kind supports these inputs; empty if it may."""
    reasons = []
    if inputs.dtype != torch.bfloat16 or inputs.weight_dtype != torch.bfloat16:
        reasons.append(
            f"rows ({inputs.dtype}) and weights ({inputs.weight_dtype}) must be bfloat16"
        )
    return reasons + alignment_reasons(
        channels=inputs.channels, hidden_size=inputs.hidden_out, rows_of_w1=inputs.hidden_in
    )
