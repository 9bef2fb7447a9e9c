"""Experts with a capacity: how many tokens each takes, and which ones it leaves out.

Letters: T tokens, E experts, K experts per token, C capacity.

The capacity counts the token slots of a rank's pack (of its slice, under context parallelism), ``C
= ceil(factor T K / E)``, as in Megatron; a constant, so that shapes are. What is different: the
tail takes no room. A token that an expert leaves out gets nothing from it, and the weights of its
other experts stay as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOWHERE = -1
"""Expert number of a route that leads to no expert."""


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the tokens that each expert takes of one rank.

    Example:
        4,096 slots, 2 of 8 experts for each token, factor 1.25: 1,280.
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
    """Return ``topk_expert_ids`` with ``NOWHERE`` for each route without room at its expert.

    On the device only.

    Args:
        topk_expert_ids_TK: ``(T, K)`` int64; ``NOWHERE`` for routes that need no room.
        topk_weights_TK: ``(T, K)``.
        policy: ``probs``: an expert keeps the tokens with the largest weights (among equals the
            first ones); ``position``: the first ones.
    """
    tokens = topk_expert_ids_TK.shape[0]
    if capacity >= tokens:
        return topk_expert_ids_TK
    routed_TK = topk_expert_ids_TK != NOWHERE
    column_TK = topk_expert_ids_TK.masked_fill(~routed_TK, num_experts)  # a column that is cut off
    wish = topk_weights_TK if policy == "probs" else torch.ones_like(topk_weights_TK)
    # What is not routed to an expert is wanted less than any weight, and so never displaces what
    # is.
    wish_TX = wish.new_full((tokens, num_experts + 1), -1.0).scatter_(1, column_TK, wish)
    order_ET = wish_TX[:, :num_experts].t().sort(dim=1, descending=True, stable=True).indices
    kept_ET = torch.zeros_like(order_ET, dtype=torch.bool).scatter_(1, order_ET[:, :capacity], True)
    kept_TX = torch.nn.functional.pad(kept_ET.t(), (0, 1))
    return topk_expert_ids_TK.masked_fill(~kept_TX.gather(1, column_TK), NOWHERE)
