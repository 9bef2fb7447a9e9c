"""RMS normalisation in plain PyTorch, for CPUs and as the reference in tests of the kernels.

The arithmetic is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor


def run(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scale_D = weight_D.to(x.dtype)
    return (normed * (1 + scale_D if zero_centered else scale_D)).to(x_TD.dtype)
