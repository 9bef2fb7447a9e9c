"""Router logits on the meta device: shapes, and the workspaces of the products in three parts."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.ops.on_meta import Memory, of_shape, workspace
from megatron_packed.ops.router_logits.api import partial_sums

_PARTS = 3


def run(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return a tensor ``(T, E)`` in the dtype of the weight; see `api.router_logits`."""
    (tokens, channels), experts = x_TD.shape, weight_ED.shape[0]
    of_weight, of_gradient = (
        workspace(_PARTS, rows, columns, dtype=torch.bfloat16)
        for rows, columns in ((experts, channels), (tokens, experts))
    )
    sums = workspace(partial_sums(tokens), experts, channels)
    memory = Memory(forward=[of_weight], backward=[of_weight, of_gradient, sums])
    return of_shape((tokens, experts), x_TD, weight_ED, dtype=weight_ED.dtype, memory=memory)
