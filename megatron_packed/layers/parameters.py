"""Marks that parameters carry for the optimizer and the checkpoint, and how they are created."""

from __future__ import annotations

import torch
from torch import nn


def new_parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter; `models.init` fills every one by its name."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that the optimizer must not decay: norms, biases, and Mamba's A_log, D and
    dt_bias.
    """
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def keep_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays float32 in a bfloat16 model: Mamba's A_log, D and dt_bias, and
    the router.
    """
    assert parameter.dtype == torch.float32, (
        "a parameter that stays in float32 is created in float32"
    )
    parameter.keep_fp32 = True  # type: ignore[attr-defined]
    return parameter
