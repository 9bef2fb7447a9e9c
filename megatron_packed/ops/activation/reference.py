"""Activations in plain PyTorch, for CPUs and as the reference in tests of the kernels.

The arithmetic is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.ops.activation.api import Kind


def run(x_TF: Tensor, kind: Kind) -> Tensor:
    x = x_TF.to(torch.promote_types(x_TF.dtype, torch.float32))
    if kind == "gelu":
        y = F.gelu(x)
    elif kind == "squared_relu":
        y = F.relu(x).square()
    else:
        gate, up = x.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(x_TF.dtype)


def run_gate(x_TKF: Tensor, gate_TKF: Tensor) -> Tensor:
    math = torch.promote_types(x_TKF.dtype, torch.float32)
    return (x_TKF.to(math) * torch.sigmoid(gate_TKF.to(math))).to(x_TKF.dtype)
