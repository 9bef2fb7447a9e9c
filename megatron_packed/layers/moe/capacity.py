"""Expert capacity: the number of tokens that each expert accepts, and the choice of dropped tokens.

Letters: T tokens, E experts, K experts per token, C capacity.

As in Megatron the capacity is ``C = ceil(factor T K / E)``. T counts all token slots of a rank's
pack, or of the rank's slice under context parallelism. So C is constant and shapes are static.
Unlike in Megatron, the tail of a pack uses no capacity. If an expert drops a token, that expert
adds nothing to the token's output, and the weights of the token's other experts do not change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOWHERE = -1
"""Expert id of a route that is sent to no expert."""


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the number of tokens that each expert accepts from one rank.

    Example:
        4,096 token slots, 2 of 8 experts per token, factor 1.25: capacity 1,280.
    """
    return math.ceil(tokens * topk / num_experts * factor)


@torch.no_grad()
def drop_beyond_capacity(
    topk_expert_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    num_experts: int,
    capacity: int,
    policy: str,
) -> Tensor:
    """Return ``topk_expert_ids`` with ``NOWHERE`` for each route beyond its expert's capacity.

    The host reads no device value.

    Args:
        topk_expert_ids_TK: ``(T, K)`` int64; ``NOWHERE`` for routes that use no capacity.
        topk_weights_TK: ``(T, K)`` weights of the routes.
        num_experts: E.
        capacity: C.
        policy: ``probs``: an expert accepts the tokens with the largest weights, and of equal
            weights the first tokens of the pack. ``position``: it accepts the first tokens.
    """
    tokens = topk_expert_ids_TK.shape[0]
    if capacity >= tokens:
        return topk_expert_ids_TK
    routed_TK = topk_expert_ids_TK != NOWHERE
    column_TK = topk_expert_ids_TK.masked_fill(~routed_TK, num_experts)  # column E is not used
    wish = topk_weights_TK if policy == "probs" else torch.ones_like(topk_weights_TK)
    # A token that is not routed to an expert gets -1 there, less than any weight, so it never
    # displaces a routed token.
    wish_TX = wish.new_full((tokens, num_experts + 1), -1.0).scatter_(1, column_TK, wish)
    order_ET = wish_TX[:, :num_experts].t().sort(dim=1, descending=True, stable=True).indices
    kept_ET = torch.zeros_like(order_ET, dtype=torch.bool).scatter_(1, order_ET[:, :capacity], True)
    kept_TX = torch.nn.functional.pad(kept_ET.t(), (0, 1))
    return topk_expert_ids_TK.masked_fill(~kept_TX.gather(1, column_TK), NOWHERE)
