"""Attention in plain PyTorch that rounds the same intermediate results to bf16 as flash attention.

Backward of flash attention subtracts the row sums of dO O from dP. It uses the rounded O, so dS has an
error wherever both terms are similar. That is the case if the values of a document have a large
common part, and for short documents. Then the gradients of queries and keys can have many times the
error that they have with the unrounded O.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_packed.ops.varlen_attention import reference


@contextmanager
def rounded_attention() -> Iterator[None]:
    """Let the reference round as flash attention does."""
    exact = reference._attend_block
    reference._attend_block = RoundedAttention.apply
    try:
        yield
    finally:
        reference._attend_block = exact


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class RoundedAttention(torch.autograd.Function):
    """Attention of a block of scaled queries; P, O and dS are rounded before a product with them.

    Letters: B queries, S keys, N query heads, K key heads, H channels.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, visible_BS: Tensor
    ) -> Tensor:
        k_SNH = k_SKH.repeat_interleave(q_BNH.shape[1] // k_SKH.shape[1], dim=1)
        v_SNH = v_SKH.repeat_interleave(q_BNH.shape[1] // v_SKH.shape[1], dim=1)
        scores_NBS = torch.einsum("bnh,snh->nbs", q_BNH, k_SNH).masked_fill(~visible_BS, -torch.inf)
        p_NBS = scores_NBS.softmax(-1)
        o_BNH = torch.einsum("nbs,snh->bnh", rounded(p_NBS), v_SNH)
        ctx.save_for_backward(q_BNH, k_SNH, v_SNH, p_NBS, o_BNH)
        ctx.key_heads = k_SKH.shape[1]
        return o_BNH

    @staticmethod
    def backward(ctx: Any, do_BNH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNH, k_SNH, v_SNH, p_NBS, o_BNH = ctx.saved_tensors
        delta_NB = (do_BNH * rounded(o_BNH)).sum(-1).T
        dp_NBS = torch.einsum("bnh,snh->nbs", do_BNH, v_SNH)
        ds_NBS = rounded(p_NBS * (dp_NBS - delta_NB[:, :, None]))
        dq_BNH = torch.einsum("nbs,snh->bnh", ds_NBS, k_SNH)
        dk_SNH = torch.einsum("nbs,bnh->snh", ds_NBS, q_BNH)
        dv_SNH = torch.einsum("nbs,bnh->snh", rounded(p_NBS), do_BNH)
        heads = (ctx.key_heads, -1)
        return dq_BNH, *(x.unflatten(1, heads).sum(2) for x in (dk_SNH, dv_SNH)), None
