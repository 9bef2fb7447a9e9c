"""State of a recurrent mixer: the last inputs of the convolution, and a state of each head.

Letters: T tokens of a pack, B documents, D hidden size, C convolution channels, W convolution
width, N heads, P channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.layers.decoding.state import MixerState, NextTokens
from megatron_packed.layers.recurrent_mixer import RecurrentMixer
from megatron_packed.ops.causal_conv1d.step import convolve_next, last_inputs
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.packed.params import PackedSeqParams


class RecurrentState(MixerState):
    """Last W - 1 inputs ``(B, W - 1, C)`` of the convolution, and states of the heads ``(B, N, ...)``.

    The states are float32, or float64 in a float64 model. Their size does not depend on the length
    of the documents.
    """

    def __init__(self, mixer: RecurrentMixer) -> None:
        self.mixer = mixer
        self.last_BWC = torch.empty(0)
        self.state_BN = torch.empty(0)

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        mixer, lengths = self.mixer, packed.document_lengths.tolist()
        z_TI, conv_TC, *per_head = mixer.split(mixer.in_proj(x_TD))
        self.last_BWC = last_inputs(conv_TC, lengths, mixer.conv1d.weight.shape[1])
        heads = split_columns(mixer.conv1d(conv_TC, packed.seq_idx), *mixer.conv_shapes)
        inputs = heads, per_head, mixer.values_of_heads()
        self.state_BN = mixer.final_states(inputs, lengths)
        y_TNP = mixer.scan_heads(inputs, packed)
        y_TD: Tensor = mixer.out_proj(mixer.norm(y_TNP.flatten(1), z_TI))
        return y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        mixer = self.mixer
        z_BI, conv_BC, *per_head = mixer.split(mixer.in_proj(x_BD))
        convolved_BC, self.last_BWC = convolve_next(
            self.last_BWC, conv_BC, mixer.conv1d.weight, mixer.conv1d.bias
        )
        heads = split_columns(convolved_BC, *mixer.conv_shapes)
        inputs = heads, per_head, mixer.values_of_heads()
        y_BNP, self.state_BN = mixer.next_output(self.state_BN, inputs)
        y_BD: Tensor = mixer.out_proj(mixer.norm(y_BNP.flatten(1), z_BI))
        return y_BD

    def keep(self, rows_B: Tensor) -> None:
        self.last_BWC = self.last_BWC[rows_B]
        self.state_BN = self.state_BN[rows_B]
