"""RMS normalisation by torch's fused kernels.

On a GPU this is the only fused backend for rows with more than 16,384 features. For shorter rows the
Triton kernel of this package fuses more operations (see README).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_packed.ops.rms_norm.api import RMSNormInputs


def not_supported_reasons(inputs: RMSNormInputs) -> list[str]:
    reasons = []
    if inputs.device_type != "cuda":
        reasons.append(
            f"torch has a fused rms_norm only on CUDA devices, not on {inputs.device_type!r}"
        )
    if inputs.dtype != inputs.weight_dtype:
        reasons.append(
            f"torch's fused rms_norm does not support rows of {inputs.dtype} with a weight of {inputs.weight_dtype}"
        )
    if inputs.zero_centered:
        reasons.append("torch's fused rms_norm does not add one to the weight in fp32")
    return reasons


def run(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    assert not zero_centered, "not_supported_reasons refuses these inputs"
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
