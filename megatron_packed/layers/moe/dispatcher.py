"""Bringing tokens to their experts and back, on one rank.

Letters: T tokens, D hidden size, E experts, K experts per token, R = T K rows sorted by expert.
"""

from __future__ import annotations

from torch import Tensor

from megatron_packed.layers.backends import Backends
from megatron_packed.ops.permute.api import Permuted, permute, unpermute


class LocalDispatcher:
    """All experts live on this rank: the exchange is a permutation of rows, with static shapes and no host read.

    Tail tokens are routed nowhere: their rows lie beyond the last expert's, count for no expert, and come back as
    zeros.
    """

    def __init__(self, num_experts: int, backends: Backends) -> None:
        self.num_experts, self.backend = num_experts, backends.permute

    def dispatch(self, x_TD: Tensor, topk_expert_ids_TK: Tensor, valid_T: Tensor) -> Permuted:
        """Rows of ``x`` sorted by expert, K for each real token, and how many there are for each expert."""
        return permute(x_TD, topk_expert_ids_TK, self.num_experts, valid_T, backend=self.backend)

    def combine(self, y_RD: Tensor, permuted: Permuted, topk_weights_TK: Tensor) -> Tensor:
        """``(T, D)``: for each token the weighted sum of its K rows; zeros for tail tokens."""
        return unpermute(y_RD, permuted, topk_weights_TK, backend=self.backend)
