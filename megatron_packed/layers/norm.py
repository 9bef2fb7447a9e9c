"""Normalisation over the hidden dimension. Letters: T tokens, D hidden size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.parameters import no_weight_decay
from megatron_packed.ops.rms_norm.api import rms_norm, rms_norm_with_residual

if TYPE_CHECKING:
    from megatron_packed.layers.build import Build


def layer_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """Run PyTorch's fused layer normalisation.

    The statistics are fp32 and the result has the dtype of x. The weight may have any dtype. With
    ``zero_centered`` the weight is stored minus one, and the rows are converted to fp32 first:
    ``1 + weight`` would lose bits in a narrower dtype.
    """
    if zero_centered:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        scale = 1 + weight_D.to(wide)
        return layer_norm(x_TD.to(wide), scale, bias_D, eps).to(x_TD.dtype)
    bias = None if bias_D is None else bias_D.to(x_TD.dtype)
    return F.layer_norm(x_TD, weight_D.shape, weight_D.to(x_TD.dtype), bias, eps)


class Norm(nn.Module):
    """RMSNorm or LayerNorm with a learned scale; LayerNorm also has a learned shift.

    Mean and variance are computed in float32.

    Args:
        hidden_size: D.
        kind: ``RMSNorm`` or ``LayerNorm``.
        eps: value added to the variance (LayerNorm) or to the mean square (RMSNorm).
        zero_centered: the scale is stored minus one.
        build: arguments that all layers share; with sequence parallelism each rank normalises its
            own rows.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        kind: str,
        eps: float,
        zero_centered: bool = False,
        build: Build,
    ) -> None:
        super().__init__()
        assert kind in ("RMSNorm", "LayerNorm"), kind
        self.eps = eps
        self.zero_centered = zero_centered
        self.backend = build.backends.rms_norm
        self.weight = no_weight_decay(build.new_parameter(hidden_size))
        build.tp.use_on_rows(self.weight)
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            self.bias = no_weight_decay(build.new_parameter(hidden_size))
            build.tp.use_on_rows(self.bias)

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


def norm_of(kind: type[Norm], width: int, config: ModelConfig, build: Build) -> Norm:
    """Build a norm over ``width`` channels with the options of a model.

    Args:
        kind: the local class, or that of ``build.parts``.
    """
    return kind(
        width,
        kind=config.normalization,
        eps=config.norm_epsilon,
        zero_centered=config.apply_layernorm_1p,
        build=build,
    )
