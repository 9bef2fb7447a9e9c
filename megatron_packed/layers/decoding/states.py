"""Choice of the state for each kind of mixer, and the decoding of one layer.

Letters: T tokens of a pack, B documents, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.layers.attention import Attention
from megatron_packed.layers.decoding.attention_cache import AttentionCache
from megatron_packed.layers.decoding.gated_delta_state import GatedDeltaState
from megatron_packed.layers.decoding.mamba_state import MambaState
from megatron_packed.layers.decoding.state import MixerState, NextTokens
from megatron_packed.layers.gated_delta_net import GatedDeltaNet
from megatron_packed.layers.hybrid_layer import HybridLayer
from megatron_packed.layers.mamba_mixer import MambaMixer
from megatron_packed.layers.mlp import MLP
from megatron_packed.layers.moe.layer import MoE, MoEOutput
from megatron_packed.packed.params import PackedSeqParams


class NoState(MixerState):
    """Empty state of a mixer that processes each token independently: MLP and MoE."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        result = self.mixer(x_TD, packed)
        y_TD: Tensor = result.hidden_TD if isinstance(result, MoEOutput) else result
        return y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        tail = tokens.packed.total_tokens - len(x_BD)
        return self.prefill(F.pad(x_BD, (0, 0, 0, tail)), tokens.packed)[: len(x_BD)]

    def keep(self, rows_B: Tensor) -> None:
        pass


STATES: dict[type[nn.Module], Callable[[Any], MixerState]] = {
    Attention: AttentionCache,
    MambaMixer: MambaState,
    GatedDeltaNet: GatedDeltaState,
    MLP: NoState,
    MoE: NoState,
}
"""Class of a mixer -> function that creates its state."""


class DecodedLayer:
    """A layer with the state of its mixer.

    Args:
        layer: the layer, in evaluation mode.
    Raises:
        TypeError: `STATES` has no entry for the mixer's class.
    """

    def __init__(self, layer: HybridLayer) -> None:
        self.layer = layer
        create = STATES.get(type(layer.mixer))
        if create is None:
            raise TypeError(
                f"{type(layer.mixer).__name__} has no state for generation; add a class to STATES."
            )
        self.state = create(layer.mixer)

    def prefill(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        x_TD, residual_TD = self._enter(hidden_TD)
        return self.layer.add(residual_TD, self.state.prefill(x_TD, packed))

    def step(self, hidden_BD: Tensor, tokens: NextTokens) -> Tensor:
        x_BD, residual_BD = self._enter(hidden_BD)
        return self.layer.add(residual_BD, self.state.step(x_BD, tokens))

    def _enter(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixer's input, and the hidden state for the residual connection."""
        if self.layer.norms_output:
            return hidden_BD, hidden_BD
        return self.layer.norm.with_residual(hidden_BD)
