"""State of a Mamba layer.

Letters: T tokens of a pack, B documents, N heads, P head dimension, G groups, S state size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_packed.layers.decoding.recurrent_state import RecurrentState
from megatron_packed.layers.mamba_mixer import MambaMixer
from megatron_packed.ops.ssd.step import final_states, scan_next


class MambaState(RecurrentState[MambaMixer]):
    """`RecurrentState` with states ``(B, N, P, S)`` of the scan."""

    def final_states(
        self, heads: Sequence[Tensor], per_head: Sequence[Tensor], lengths: list[int]
    ) -> Tensor:
        x_TNP, B_TGS, _ = heads
        (dt_TN,) = per_head
        return final_states(x_TNP, dt_TN, self.mixer.A_log, B_TGS, self.mixer.dt_bias, lengths)

    def next_output(self, heads: Sequence[Tensor], per_head: Sequence[Tensor]) -> Tensor:
        mixer = self.mixer
        x_BNP, B_BGS, C_BGS = heads
        (dt_BN,) = per_head
        y_BNP, self.state_BN = scan_next(
            self.state_BN, x_BNP, dt_BN, mixer.A_log, B_BGS, C_BGS, mixer.D, mixer.dt_bias
        )
        return y_BNP
