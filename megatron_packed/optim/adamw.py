"""AdamW over flat slices: what an implementation receives, and which ones there are.

The update of a parameter p with gradient g at step t, in float32 (decoupled weight decay, as in
torch and Megatron)::

    g <- g / grad_divisor
    m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
    p <- p - lr weight_decay p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

[Note: predicated step]
``skip`` is a device flag. When it is 1, p, m, v and t keep every bit: the host learns of a
non-finite gradient one step late and finds clean weights. Learning rate, step and flag are device
tensors, so one captured graph serves every step. An implementation that cannot be told so on the
device is refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

MAX_SLICE_ELEMENTS = 2**30
"""Kernels of TransformerEngine and apex count a tensor's elements in 32 bits; longer slices are
passed in pieces.
"""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the choice of an implementation depends on."""

    device_type: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Float32 1-D tensors of equal lengths, list by list, that share one weight decay."""

    weight_decay: float
    params: Sequence[Tensor]
    """Masters: updated in place."""
    grads: Sequence[Tensor]
    """Read; may be overwritten with the divided gradients."""
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """Numbers of one step. The tensors are 0-d float32 on the device of the slices."""

    lr: Tensor
    step: Tensor
    """Number of this step, from 1; already advanced unless ``skip``. Exact up to 2**24 steps."""
    skip: Tensor
    """1.0: change nothing; 0.0: update."""
    grad_divisor: Tensor | None
    """None when gradients are not clipped."""
    beta1: float
    beta2: float
    eps: float


OP = Op(
    "adamw",
    (
        Backend("torch", "megatron_packed.optim.adamw_torch"),
        Backend("transformer_engine", "megatron_packed.optim.adamw_transformer_engine"),
        Backend("apex", "megatron_packed.optim.adamw_apex"),
        Backend("reference", "megatron_packed.optim.adamw_reference", automatic=False),
    ),
)
"""``run(slices: Sequence[Slices], control: Control) -> None``. ``torch`` serves every device, so
'auto' chooses it.
"""
