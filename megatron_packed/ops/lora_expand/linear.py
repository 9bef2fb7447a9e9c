"""Second product of an adapter as a linear layer of PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def run(low_TP: Tensor, weight_OP: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(low_TP, weight_OP, bias_O)
