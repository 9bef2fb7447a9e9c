"""Choice of the products of a dense MLP, ``y = activation(x W1^T) W2^T``.

With a backend that joins, the kernel of the first product also computes the activation. In backward,
the kernel of ``dy W2`` also applies the derivative. Letters: T tokens, D channels, F inner channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, JoiningBackend, Op

OP = Op(
    "dense_mlp",
    (
        JoiningBackend(
            "quack",
            "megatron_packed.ops.dense_mlp.quack",
            on_meta=Backend("quack", "megatron_packed.ops.dense_mlp.on_meta"),
        ),
        Backend("torch", "megatron_packed.ops.dense_mlp.separate"),
    ),
)
WITH_CHOICE = {("squared_relu", "cuda")}
"""Kinds of activations and device types with several backends; all others are separate operations."""


class JoinedProducts(Protocol):
    """Functions of a backend that joins products and activation, with ``hidden = x W1^T``.

    ``activated`` has the same bits in both: those of the op ``activation`` of the rounded ``hidden``.
    """

    def hidden_and_activation(self, x_TD: Tensor, w1_FD: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(hidden_TF, activated_TF)``."""

    def gradient(self, dy_TD: Tensor, w2_DF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(dhidden_TF, activated_TF)``.

        ``dhidden`` is the product ``dy W2`` times the derivative of the activation at ``hidden``.
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
