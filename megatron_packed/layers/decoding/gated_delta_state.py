"""State of a gated delta net.

Letters: T tokens of a pack, B documents, N value heads, G key heads, K key head dimension, V value
head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_packed.layers.decoding.recurrent_state import RecurrentState
from megatron_packed.layers.gated_delta_net import GatedDeltaNet
from megatron_packed.ops.gated_delta_rule.step import final_states, update_next


class GatedDeltaState(RecurrentState[GatedDeltaNet]):
    """`RecurrentState` with states ``(B, N, K, V)`` of the gated delta rule."""

    def final_states(
        self, heads: Sequence[Tensor], per_head: Sequence[Tensor], lengths: list[int]
    ) -> Tensor:
        mixer = self.mixer
        _, k_TGK, v_TNV = heads
        b_TN, a_TN = per_head
        return final_states(
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            mixer.A_log,
            mixer.dt_bias,
            lengths,
            allow_neg_eigval=mixer.allow_neg_eigval,
        )

    def next_output(self, heads: Sequence[Tensor], per_head: Sequence[Tensor]) -> Tensor:
        mixer = self.mixer
        q_BGK, k_BGK, v_BNV = heads
        b_BN, a_BN = per_head
        o_BNV, self.state_BN = update_next(
            self.state_BN,
            q_BGK,
            k_BGK,
            v_BNV,
            a_BN,
            b_BN,
            mixer.A_log,
            mixer.dt_bias,
            allow_neg_eigval=mixer.allow_neg_eigval,
        )
        return o_BNV
