"""Product of rows in a low precision with a float32 weight, to float32 precision.

The op computes ``logits = x W^T``. Letters: T tokens, D channels, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "router_logits",
    (
        GPUBackend("triton", "megatron_packed.ops.router_logits.triton_kernels"),
        Backend("reference", "megatron_packed.ops.router_logits.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.router_logits.on_meta"),
)


_MOST_SUMS = 16
_TOKENS_PER_SUM = 512


@dataclass(frozen=True, kw_only=True)
class RouterLogitsInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    channels: int
    experts: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device_type: str


def router_logits(x_TD: Tensor, weight_ED: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute ``x W^T`` to the precision of the weight's dtype.

    Only x and W are saved for backward. If the weight has ``main_grad``, its gradient is added
    there, and autograd gets None.

    Args:
        x_TD: ``(T, D)`` in any floating dtype.
        weight_ED: ``(E, D)`` float32, or float64 in tests.
    Returns:
        ``(T, E)`` in the dtype of the weight.
    Raises:
        ValueError: the shapes do not fit together.
        NoBackendError: the requested backend does not support these inputs.
    """
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"router_logits: x has shape {list(x_TD.shape)} and the weight {list(weight_ED.shape)}; "
            "they must be (T, D) and (E, D)."
        )
    inputs = RouterLogitsInputs(
        channels=x_TD.shape[1],
        experts=weight_ED.shape[0],
        dtype=x_TD.dtype,
        weight_dtype=weight_ED.dtype,
        device_type=x_TD.device.type,
    )
    logits_TE: Tensor = OP.chosen[backend, inputs].loaded.run(x_TD, weight_ED)
    return logits_TE


def partial_sums(tokens: int) -> int:
    """Return the number of partial sums of the weight's gradient, each over a range of tokens.

    Each is a float32 tensor of the shape of the weight, which the kernels allocate in backward.
    """
    return min(_MOST_SUMS, max(1, -(-tokens // _TOKENS_PER_SUM)))
