"""Decoding of one layer. Letters: T tokens of a pack, B documents, D hidden size."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.layers.decoding.state import MixerState, NextTokens
from megatron_packed.layers.hybrid_layer import HybridLayer
from megatron_packed.packed.params import PackedSeqParams


class DecodedLayer:
    """A layer with the state of its mixer.

    Args:
        layer: the layer, in evaluation mode.
        state: new state of the layer's mixer.
    """

    def __init__(self, layer: HybridLayer, state: MixerState) -> None:
        self.layer = layer
        self.state = state

    def prefill(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        x_TD, residual_TD = self.layer.enter(hidden_TD)
        return self.layer.add(residual_TD, self.state.prefill(x_TD, packed))

    def step(self, hidden_BD: Tensor, tokens: NextTokens) -> Tensor:
        x_BD, residual_BD = self.layer.enter(hidden_BD)
        return self.layer.add(residual_BD, self.state.step(x_BD, tokens))
