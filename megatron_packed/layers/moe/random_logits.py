"""Random logits for benchmarks of routers (``--moe-router-force-load-balancing``).

A logit depends only on a seed, the number of a document in its pack, the position in the document,
and the expert. No random generator is used. So eager execution, recomputation, CUDA graphs and all
parallel layouts choose the same experts.

Letters: T tokens, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOW_BITS = (1 << 32) - 1


def random_logits(seed: int, document_T: Tensor, position_T: Tensor, num_experts: int) -> Tensor:
    """Return normally distributed logits, ``(T, E)`` float32.

    Args:
        seed: seed of 63 bits.
        document_T: ``(T,)`` integers, number of the document of each token.
        position_T: ``(T,)`` integers, position of each token in its document.
        num_experts: E.
    """
    folded = (seed ^ (seed >> 32)) & _LOW_BITS
    token_T = _mixed(position_T.long() ^ _mixed(document_T.long() ^ folded))
    expert_E = _mixed(torch.arange(num_experts, device=token_T.device))
    bits_TE = _mixed(token_T[:, None] ^ expert_E) >> 9
    # 23 bits and the half are exact in float32, so the argument of erfinv is never -1 or 1.
    return math.sqrt(2) * torch.erfinv((bits_TE.float() + 0.5) * 2.0**-22 - 1)


def replace_values(logits_TE: Tensor, values_TE: Tensor) -> Tensor:
    """Return ``values_TE``; its gradient becomes the gradient of ``logits_TE``, as in Megatron.

    The difference is exactly 0 for finite logits, and NaN for others.
    """
    return values_TE + (logits_TE - logits_TE.detach())


def _mixed(x: Tensor) -> Tensor:
    """Return 32-bit hashes of 32-bit numbers, as int64. Source: the last step of MurmurHash3."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW_BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW_BITS
    return x ^ (x >> 16)
