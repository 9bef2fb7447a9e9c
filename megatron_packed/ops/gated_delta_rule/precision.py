"""Dtype of the products in the Triton kernels of the gated delta rule."""

from __future__ import annotations

import torch

from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs


def tile_dtype(dtype: torch.dtype, allow_neg_eigval: bool) -> torch.dtype:
    """Return the dtype in which the kernels multiply inputs of a dtype.

    With beta near 2, weak decay and keys that repeat, a token writes the state of the token before it
    with the other sign. The large terms cancel, but their roundings do not: in bf16 they outgrow the
    result within a few chunks.
    """
    return torch.float32 if allow_neg_eigval else dtype


def remark(inputs: GatedDeltaRuleInputs) -> str:
    """Return how the kernels multiply, if not in the dtype of the inputs; else an empty text."""
    if tile_dtype(inputs.dtype, inputs.allow_neg_eigval) == inputs.dtype:
        return ""
    return (
        ", which multiplies in fp32, because products in bf16 are wrong for repeated keys with a doubled "
        "beta"
    )
