"""State of a gated delta net: the last inputs of the convolution, and the state of the rule.

Letters: T tokens of a pack, B documents, D hidden size, C convolution channels, W convolution
width, N value heads, K key head dimension, V value head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.layers.decoding.state import MixerState, NextTokens
from megatron_packed.layers.gated_delta_net import GatedDeltaNet
from megatron_packed.ops.causal_conv1d.step import convolve_next, last_inputs
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_delta_rule.step import final_states, update_next
from megatron_packed.packed.params import PackedSeqParams


class GatedDeltaState(MixerState):
    """Last W - 1 inputs ``(B, W - 1, C)`` of the convolution, and states ``(B, N, K, V)``.

    The states are float32, or float64 in a float64 model. Their size does not depend on the length
    of the documents.
    """

    def __init__(self, mixer: GatedDeltaNet) -> None:
        self.mixer = mixer
        self.last_BWC = torch.empty(0)
        self.state_BNKV = torch.empty(0)

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        mixer, lengths = self.mixer, packed.document_lengths.tolist()
        qkv_TC, z_TI, b_TN, a_TN = split_columns(mixer.in_proj(x_TD), *mixer.qkvzba_shapes)
        self.last_BWC = last_inputs(qkv_TC, lengths, mixer.conv1d.weight.shape[1])
        qkv_TC = mixer.conv1d(qkv_TC, packed.seq_idx)
        q_TGK, k_TGK, v_TNV = split_columns(qkv_TC, *mixer.qkv_shapes)
        self.state_BNKV = final_states(
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            mixer.A_log,
            mixer.dt_bias,
            lengths,
            allow_neg_eigval=mixer.allow_neg_eigval,
        )
        o_TNV = mixer.scan_heads(q_TGK, k_TGK, v_TNV, b_TN, a_TN, packed)
        y_TD: Tensor = mixer.out_proj(mixer.norm(o_TNV, z_TI))
        return y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        mixer = self.mixer
        qkv_BC, z_BI, b_BN, a_BN = split_columns(mixer.in_proj(x_BD), *mixer.qkvzba_shapes)
        convolved_BC, self.last_BWC = convolve_next(
            self.last_BWC, qkv_BC, mixer.conv1d.weight, mixer.conv1d.bias
        )
        o_BNV, self.state_BNKV = update_next(
            self.state_BNKV,
            *split_columns(convolved_BC, *mixer.qkv_shapes),
            a_BN,
            b_BN,
            mixer.A_log,
            mixer.dt_bias,
            allow_neg_eigval=mixer.allow_neg_eigval,
        )
        y_BD: Tensor = mixer.out_proj(mixer.norm(o_BNV, z_BI))
        return y_BD

    def keep(self, rows_B: Tensor) -> None:
        self.last_BWC = self.last_BWC[rows_B]
        self.state_BNKV = self.state_BNKV[rows_B]
