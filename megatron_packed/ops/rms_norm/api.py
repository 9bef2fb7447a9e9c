"""Root-mean-square and layer normalisation over the last dimension.

Shapes: T token slots, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "rms_norm",
    (
        GPUBackend("triton", "megatron_packed.ops.rms_norm.triton_kernel"),
        Backend("torch", "megatron_packed.ops.rms_norm.torch_fused", gpu_only=True),
        Backend("reference", "megatron_packed.ops.rms_norm.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.rms_norm.on_meta"),
)


@dataclass(frozen=True, kw_only=True)
class RMSNormInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    features: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device_type: str
    zero_centered: bool = False


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` per row.

    The arithmetic is fp32, with one rounding to the dtype of x. Each row, and its input gradient,
    depends only on itself, bit for bit. The weight's gradient is a sum over rows in a fixed order,
    so it has the same bits in each run.

    Args:
        x_TD: any leading dimensions.
        weight_D: ``(D,)`` in any floating dtype.
        zero_centered: the weight is stored minus one, so the factor is ``1 + weight``.
    Raises:
        ValueError: the weight's shape does not fit x.
    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    _check(x_TD, weight_D)
    module = OP.chosen[backend, _inputs(x_TD, weight_D, zero_centered)].loaded
    y_TD: Tensor = module.run(x_TD, weight_D, eps, zero_centered)
    return y_TD


def rms_norm_with_residual(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(x)``, and x for the residual connection.

    A pre-norm layer ``x + f(norm(x))`` uses x twice, and autograd would add the two gradients in a
    separate pass over memory. If the layer uses the x that this function returns, the backward
    kernel adds the residual's gradient to the gradient of the norm, and rounds the sum once.

    Returns:
        ``(normed, x)``.
    Raises:
        ValueError: the weight's shape does not fit x.
    """
    _check(x_TD, weight_D)
    module = OP.chosen[backend, _inputs(x_TD, weight_D, zero_centered)].loaded
    run_both = getattr(module, "run_with_residual", None)
    if run_both is None:
        return module.run(x_TD, weight_D, eps, zero_centered), x_TD
    outputs: tuple[Tensor, Tensor] = run_both(x_TD, weight_D, eps, zero_centered)
    return outputs


def _inputs(x_TD: Tensor, weight_D: Tensor, zero_centered: bool) -> RMSNormInputs:
    return RMSNormInputs(
        features=x_TD.shape[-1],
        dtype=x_TD.dtype,
        weight_dtype=weight_D.dtype,
        device_type=x_TD.device.type,
        zero_centered=zero_centered,
    )


def _check(x_TD: Tensor, weight_D: Tensor) -> None:
    if weight_D.shape != x_TD.shape[-1:]:
        raise ValueError(
            f"the weight has shape {tuple(weight_D.shape)}; it must have the last dimension of x {tuple(x_TD.shape)}."
        )
