"""Random tensors that are the same in each run."""

from typing import Any

import torch
from torch import Tensor, nn


def normal(*shape: Any, seed: int = 0) -> Tensor:
    """Return normally distributed float32 values on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(
    module: nn.Module, seed: int = 0, *, scale: float = 1.0, precision: torch.dtype = torch.float32
) -> Any:
    """Return a module whose parameters are normally distributed.

    Args:
        precision: dtype to which the values are rounded, whatever the module's own one is.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                (scale * torch.randn(parameter.shape, generator=generator)).to(precision)
            )
    return module
