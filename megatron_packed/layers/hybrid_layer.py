"""Layers of the hybrid model: one norm, one mixer, one residual addition each.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MOE
from megatron_packed.config.layer_pattern import MLP as DENSE
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Attention, Rotary
from megatron_packed.layers.build import Build
from megatron_packed.layers.gated_delta_net import GatedDeltaNet
from megatron_packed.layers.joined import joined_residual
from megatron_packed.layers.mamba_mixer import MambaMixer
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.moe.layer import MoE, MoEOutput, MoEReport
from megatron_packed.layers.norm import Norm
from megatron_packed.ops.backend_dispatch import planned_type
from megatron_packed.ops.residual_projection.api import WITH_CHOICE
from megatron_packed.packed.params import PackedSeqParams


class HybridLayer(nn.Module):
    """Layer ``h + m * dropout(mixer(norm(h)))``, for every symbol of the pattern except ``E``.

    Args:
        norm: norm before the mixer; it also returns the hidden state for the residual connection.
        mixer: module called with the normalised hidden state and the metadata of the pack.
        dropout: dropout probability.
        multiplier: m, factor on the mixer's output; None adds the output unchanged.
        norms_output: the layer is ``h + m * dropout(norm(mixer(h)))`` instead.
        backend: backend of the op ``residual_projection``.
    """

    def __init__(
        self,
        norm: Norm,
        mixer: nn.Module,
        dropout: float,
        multiplier: float | None = None,
        *,
        norms_output: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer
        self.dropout = nn.Dropout(dropout)
        self.multiplier = multiplier
        self.norms_output = norms_output
        self.backend = backend

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor | MoEOutput:
        x_TD = residual_TD = hidden_TD
        if not self.norms_output:
            x_TD, residual_TD = self.norm.with_residual(hidden_TD)
        if planned_type(hidden_TD.device.type) in WITH_CHOICE:
            joined = joined_residual(self.mixer, residual_TD, self.backend, self.reason_apart)
            if joined is not None:
                sum_TD: Tensor = self.mixer(x_TD, packed, joined)
                return sum_TD
        return self.add(residual_TD, self.mixer(x_TD, packed))

    @property
    def reason_apart(self) -> str:
        """Reason why the mixer cannot add the residual; empty if it may."""
        if self.dropout.p:
            return "the mixer's output has dropout"
        if self.multiplier is not None:
            return "the mixer's output is multiplied before the addition"
        return "the mixer's output is normalised before the addition" if self.norms_output else ""

    def add(self, residual_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Add the mixer's output to the residual stream."""
        if self.norms_output:
            y_TD = self.norm(y_TD)
        y_TD = self.dropout(y_TD)
        if self.multiplier is None:
            return residual_TD + y_TD
        # One kernel multiplies and adds, and rounds once.
        return torch.add(residual_TD, y_TD, alpha=self.multiplier)


class HybridMoELayer(HybridLayer):
    """`HybridLayer` for the symbol ``E`` (MoE), which also returns the statistics of the MoE."""

    mixer: MoE

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        x_TD = residual_TD = hidden_TD
        if not self.norms_output:
            x_TD, residual_TD = self.norm.with_residual(hidden_TD)
        output: MoEOutput = self.mixer(x_TD, packed)
        return output._replace(hidden_TD=self.add(residual_TD, output.hidden_TD))


class HybridLayers(nn.ModuleList):
    """Sequence of layers."""

    def __iter__(self) -> Iterator[HybridLayer]:
        return cast("Iterator[HybridLayer]", super().__iter__())

    def forward(
        self, hidden_TD: Tensor, packed: PackedSeqParams, numbers: Iterable[int] | None = None
    ) -> tuple[Tensor, list[MoEReport]]:
        """Return the hidden state after the layers, and the report of every MoE layer.

        Args:
            hidden_TD: hidden state before the first layer.
            packed: metadata of the pack.
            numbers: numbers of the layers to run; by default all.
        """
        reports = []
        for layer in self if numbers is None else [self[number] for number in numbers]:
            result = layer(hidden_TD, packed)
            if isinstance(result, MoEOutput):
                reports.append(result.report)
                hidden_TD = result.hidden_TD
            else:
                hidden_TD = result
        return hidden_TD, reports


def build_norm(config: ModelConfig, build: Build) -> Norm:
    """Build a norm over the hidden size, for use in a layer or after the last layer."""
    return build.parts.norm(
        config.hidden_size,
        kind=config.normalization,
        eps=config.norm_epsilon,
        device=build.device,
        dtype=build.dtype,
        zero_centered=config.apply_layernorm_1p,
        backend=build.backends.rms_norm,
        tp=build.tp,
    )


def build_layers(config: ModelConfig, build: Build, rotary: Rotary | None = None) -> HybridLayers:
    """Build all layers of the pattern: the main model, then each depth of multi-token prediction.

    The arguments are those of `build_layer`.
    """
    return HybridLayers(
        build_layer(symbol, config, build, number, config.depth_of_layer(number), rotary)
        for number, symbol in enumerate(config.layer_types)
    )


def build_layer(
    symbol: str,
    config: ModelConfig,
    build: Build,
    number: int = 0,
    depth: int = 0,
    rotary: Rotary | None = None,
) -> HybridLayer:
    """Build the layer for one symbol of the layer pattern.

    Args:
        symbol: ``M`` Mamba, ``G`` gated delta net, ``*`` attention, ``-`` MLP or ``E`` MoE.
        config: sizes of the model.
        build: arguments that all layers share.
        number: number of the layer in the pattern, from 0.
        depth: depth of multi-token prediction, 0 in the main model.
        rotary: tables of the rotary embedding, shared by all attention layers, or None.
    """
    norm = build_norm(config, build)
    layer_class = HybridLayer
    mixer: nn.Module
    if symbol == MAMBA:
        mixer = MambaMixer(config, build)
    elif symbol == GATED_DELTA_NET:
        mixer = GatedDeltaNet(config, build)
    elif symbol == ATTENTION:
        mixer = Attention(config, build, number=number, rotary=rotary)
    elif symbol == MOE:
        layer_class = HybridMoELayer
        mixer = MoE(config, build, depth=depth)
    else:
        assert symbol == DENSE, symbol
        mixer = MLP(
            config.hidden_size,
            config.ffn_hidden_size,
            kind=config.activation,
            bias=config.add_bias_linear,
            backends=build.backends,
            tp=build.tp,
            device=build.device,
            dtype=build.dtype,
        )
    return layer_class(
        norm,
        mixer,
        config.hidden_dropout,
        config.residual_multiplier,
        norms_output=config.norms_output(number),
        backend=build.backends.residual_projection,
    )
