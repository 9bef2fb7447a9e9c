"""Layers of the hybrid model: one norm, one mixer, one residual addition each.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.build import Build
from megatron_packed.layers.joined import joined_residual
from megatron_packed.layers.moe.layer import MoE, MoEOutput, MoEReport
from megatron_packed.layers.norm import Norm, norm_of
from megatron_packed.packed.params import PackedSeqParams


class HybridLayer(nn.Module):
    """Layer ``h + m * dropout(mixer(norm(h)))``.

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
        x_TD, residual_TD = self.enter(hidden_TD)
        return self.add(residual_TD, self.mixer(x_TD, packed))

    def enter(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixer's input, and the hidden state for the residual connection."""
        return (hidden_TD, hidden_TD) if self.norms_output else self.norm.with_residual(hidden_TD)

    def add(self, residual_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Add the mixer's output to the residual stream.

        Raises:
            ValueError: the output has another shape, which the addition would broadcast.
        """
        if y_TD.shape != residual_TD.shape:
            raise ValueError(
                f"{type(self.mixer).__name__} returned {tuple(y_TD.shape)} for a hidden state of "
                f"{tuple(residual_TD.shape)}; a mixer returns a tensor of the shape of its input."
            )
        if self.norms_output:
            y_TD = self.norm(y_TD)
        y_TD = self.dropout(y_TD)
        if self.multiplier is None:
            return residual_TD + y_TD
        # One kernel multiplies and adds, and rounds once.
        return torch.add(residual_TD, y_TD, alpha=self.multiplier)


class ProjectedLayer(HybridLayer):
    """`HybridLayer` whose mixer ends in a projection, which may add the residual in its product.

    The mixer's ``forward`` is marked by `layers.joined.adds_residual`.
    """

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        x_TD, residual_TD = self.enter(hidden_TD)
        joined = joined_residual(self, self.mixer, residual_TD)
        if joined is None:
            return self.add(residual_TD, self.mixer(x_TD, packed))
        sum_TD: Tensor = self.mixer(x_TD, packed, joined)
        return sum_TD

    @property
    def reason_apart(self) -> str:
        """Reason why the mixer cannot add the residual; empty if it may."""
        if self.dropout.p:
            return "the mixer's output has dropout"
        if self.multiplier is not None:
            return "the mixer's output is multiplied before the addition"
        return "the mixer's output is normalised before the addition" if self.norms_output else ""


class HybridMoELayer(HybridLayer):
    """`HybridLayer` with a mixture of experts, which also returns the statistics of the experts."""

    mixer: MoE

    def forward(self, hidden_TD: Tensor, packed: PackedSeqParams) -> MoEOutput:
        x_TD, residual_TD = self.enter(hidden_TD)
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
    return norm_of(build.parts.norm, config.hidden_size, config, build)
