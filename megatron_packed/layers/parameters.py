"""Attributes that mark parameters for optimizer and precision rules."""

from __future__ import annotations

import torch
from torch import nn


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as excluded from weight decay, and return it.

    Parameters without weight decay are norms, biases, and A_log, D and dt_bias of Mamba.
    """
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def keep_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays in float32 in a bfloat16 model, and return it.

    Parameters that stay in float32 are A_log, D and dt_bias of Mamba, and the router's weight.
    """
    assert parameter.dtype == torch.float32, (
        "a parameter that stays in float32 must be created in float32"
    )
    parameter.keep_fp32 = True  # type: ignore[attr-defined]
    return parameter
