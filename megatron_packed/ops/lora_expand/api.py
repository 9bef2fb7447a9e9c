"""Second product of a low-rank adapter (LoRA): a few columns times a wide matrix.

The op computes ``y = low W^T + b``. Letters: T tokens, P columns of ``low``, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "lora_expand",
    (
        GPUBackend("triton", "megatron_packed.ops.lora_expand.triton_kernel"),
        Backend("torch", "megatron_packed.ops.lora_expand.linear"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class LoraExpandInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    columns: int
    """P."""
    dtype: torch.dtype
    """dtype of all tensors."""
    device_type: str


def lora_expand(
    low_TP: Tensor, weight_OP: Tensor, bias_O: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """Compute ``low W^T + b``, in kernels without a gradient.

    Args:
        low_TP: ``(T, P)``, contiguous.
        weight_OP: ``(O, P)`` in the same dtype, with any strides.
        bias_O: ``(O,)`` in the same dtype.
    Returns:
        ``(T, O)`` contiguous, in the same dtype.
    Raises:
        NoBackendError: the requested backend does not support these inputs.
    """
    inputs = LoraExpandInputs(
        columns=low_TP.shape[1], dtype=low_TP.dtype, device_type=low_TP.device.type
    )
    y_TO: Tensor = OP.chosen[backend, inputs].loaded.run(low_TP, weight_OP, bias_O)
    return y_TO
