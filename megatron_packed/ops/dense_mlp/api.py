"""Choice of the backward pass of a dense MLP, ``y = activation(x W1^T) W2^T``.

With a backend that joins, one kernel computes the gradient ``dy W2`` and, on its result, the
derivative of the activation. Letters: T tokens, D channels, F inner channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

OP = Op(
    "dense_mlp",
    (
        Backend("quack", "megatron_packed.ops.dense_mlp.quack"),
        Backend("torch", "megatron_packed.ops.dense_mlp.separate"),
    ),
)
WITH_CHOICE = {("squared_relu", "cuda")}
"""Kinds of activations and device types with several backends; all others are separate operations."""
JoinedGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(dy_TD, w2_DF, hidden_TF) -> (dhidden_TF, activated_TF)``, with ``hidden = x W1^T``.

``dhidden`` is the product ``dy W2`` times the derivative of the activation at ``hidden``.
``activated`` is the activation of ``hidden``, with the bits of the op ``activation``.
"""


@dataclass(frozen=True, kw_only=True)
class DenseMLPInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    channels: int
    inner: int
    kind: str
    """Kind of the activation, of the op ``activation``."""
    dtype: torch.dtype
    """dtype of rows and weights."""
    device_type: str
    apart: str = ""
    """Reason why products and activation must be separate calls; empty if they may be joined."""
