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
        bias_O: ``(O,)`` in the same dtype, contiguous.
    Returns:
        ``(T, O)`` contiguous, in the same dtype.
    Raises:
        ValueError: shapes, dtypes or strides do not fit.
        NoBackendError: the requested backend does not support these inputs.
    """
    outputs, bias = weight_OP.shape[0], () if bias_O is None else (bias_O,)
    if weight_OP.shape != (outputs, low_TP.shape[1]) or any(x.shape != (outputs,) for x in bias):
        raise ValueError(
            f"lora_expand: shapes {[list(x.shape) for x in (low_TP, weight_OP, *bias)]} must be (T, P), (O, P), (O,)."
        )
    if any(not x.is_contiguous() for x in (low_TP, *bias)):
        raise ValueError("lora_expand: the first factor and the bias must be contiguous.")
    if any(x.dtype != low_TP.dtype for x in (weight_OP, *bias)):
        raise ValueError(
            f"lora_expand: dtypes {[x.dtype for x in (low_TP, weight_OP, *bias)]} must be the same."
        )
    inputs = LoraExpandInputs(
        columns=low_TP.shape[1], dtype=low_TP.dtype, device_type=low_TP.device.type
    )
    y_TO: Tensor = OP.chosen[backend, inputs].loaded.run(low_TP, weight_OP, bias_O)
    return y_TO
