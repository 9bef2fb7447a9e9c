"""Normalisation over the hidden dimension. Letters: T tokens, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.layers.parameters import new_parameter, no_weight_decay
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.ops.rms_norm.api import layer_norm, rms_norm, rms_norm_with_residual


class Norm(nn.Module):
    """RMSNorm or LayerNorm with a learned scale; LayerNorm also has a learned shift.

    Mean and variance are computed in float32.

    Args:
        hidden_size: D.
        kind: ``RMSNorm`` or ``LayerNorm``.
        eps: value added to the variance (LayerNorm) or to the mean square (RMSNorm).
        device: device of the parameters.
        dtype: dtype of the parameters.
        zero_centered: the scale is stored minus one.
        backend: backend of the op ``rms_norm``.
        tp: tensor parallelism; with sequence parallelism each rank normalises its own rows.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        kind: str,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
        zero_centered: bool = False,
        backend: str = "auto",
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        assert kind in ("RMSNorm", "LayerNorm"), kind
        self.eps = eps
        self.zero_centered = zero_centered
        self.backend = backend
        self.weight = no_weight_decay(new_parameter(hidden_size, device=device, dtype=dtype))
        tp.use_on_rows(self.weight)
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            self.bias = no_weight_decay(new_parameter(hidden_size, device=device, dtype=dtype))
            tp.use_on_rows(self.bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(
                x_TD,
                self.weight,
                self.eps,
                zero_centered=self.zero_centered,
                backend=self.backend,
            )
        return layer_norm(x_TD, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)

    def with_residual(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised x, and x for the residual connection.

        If both results come from one call, the backward of RMSNorm adds their gradients in the same
        kernel.
        """
        if self.bias is None:
            return rms_norm_with_residual(
                x_TD,
                self.weight,
                self.eps,
                zero_centered=self.zero_centered,
                backend=self.backend,
            )
        return self(x_TD), x_TD
