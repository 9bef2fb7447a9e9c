"""Random tensors that are the same in each run."""

from typing import Any

import torch
from torch import Tensor


def normal(*shape: Any, seed: int = 0) -> Tensor:
    """Return normally distributed float32 values on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
