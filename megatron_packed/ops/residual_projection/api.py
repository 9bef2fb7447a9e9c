"""Choice of the kernel of ``y = residual + x W^T``, the end of a layer.

With a backend that joins, the product adds the residual before it stores its result. Letters: T
tokens, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, JoiningBackend, Op

OP = Op(
    "residual_projection",
    (
        JoiningBackend(
            "quack",
            "megatron_packed.ops.residual_projection.quack",
            on_meta=Backend("quack", "megatron_packed.ops.residual_projection.on_meta"),
        ),
        Backend("torch", "megatron_packed.ops.residual_projection.separate"),
    ),
)
WITH_CHOICE = {"cuda"}
"""Types of devices with several backends; on all others product and addition are separate."""
AddedProduct = Callable[[Any, Tensor, Tensor], Tensor]
"""``(residual_TO, x_TI, weight_OI) -> y_TO``; the sum is rounded once."""


@dataclass(frozen=True, kw_only=True)
class ResidualProjectionInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    inner: int
    """I."""
    channels: int
    """O."""
    dtype: torch.dtype
    """dtype of residual, rows and weight."""
    device_type: str
    apart: str = ""
    """Reason why product and addition must be separate calls; empty if they may be joined."""
