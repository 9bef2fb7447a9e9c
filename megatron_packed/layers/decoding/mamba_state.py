"""State of a Mamba layer: the last inputs of the convolution, and the state of the scan.

Letters: T tokens of a pack, B documents, D hidden size, C convolution channels, W convolution
width, N heads, P head dimension, S state size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.layers.decoding.state import MixerState, NextTokens
from megatron_packed.layers.mamba_mixer import MambaMixer
from megatron_packed.ops.causal_conv1d.step import convolve_next, last_inputs
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.ssd.step import final_states, scan_next
from megatron_packed.packed.params import PackedSeqParams


class MambaState(MixerState):
    """Last W - 1 inputs ``(B, W - 1, C)`` of the convolution, and states ``(B, N, P, S)``.

    The states are float32, or float64 in a float64 model. Their size does not depend on the length
    of the documents.
    """

    def __init__(self, mixer: MambaMixer) -> None:
        self.mixer = mixer
        self.last_BWC = torch.empty(0)
        self.state_BNPS = torch.empty(0)

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        mixer, lengths = self.mixer, packed.document_lengths.tolist()
        z_TI, xBC_TC, dt_TN = split_columns(mixer.in_proj(x_TD), *mixer.zxBCdt_shapes)
        self.last_BWC = last_inputs(xBC_TC, lengths, mixer.conv1d.weight.shape[1])
        x_TNP, B_TGS, C_TGS = split_columns(mixer.conv1d(xBC_TC, packed.seq_idx), *mixer.xBC_shapes)
        self.state_BNPS = final_states(x_TNP, dt_TN, mixer.A_log, B_TGS, mixer.dt_bias, lengths)
        y_TNP = mixer.scan_heads(x_TNP, dt_TN, B_TGS, C_TGS, packed)
        y_TD: Tensor = mixer.out_proj(mixer.norm(y_TNP.flatten(1), z_TI))
        return y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        mixer = self.mixer
        z_BI, xBC_BC, dt_BN = split_columns(mixer.in_proj(x_BD), *mixer.zxBCdt_shapes)
        convolved_BC, self.last_BWC = convolve_next(
            self.last_BWC, xBC_BC, mixer.conv1d.weight, mixer.conv1d.bias
        )
        x_BNP, B_BGS, C_BGS = split_columns(convolved_BC, *mixer.xBC_shapes)
        y_BNP, self.state_BNPS = scan_next(
            self.state_BNPS, x_BNP, dt_BN, mixer.A_log, B_BGS, C_BGS, mixer.D, mixer.dt_bias
        )
        y_BD: Tensor = mixer.out_proj(mixer.norm(y_BNP.flatten(1), z_BI))
        return y_BD

    def keep(self, rows_B: Tensor) -> None:
        self.last_BWC = self.last_BWC[rows_B]
        self.state_BNPS = self.state_BNPS[rows_B]
