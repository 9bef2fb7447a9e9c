"""Norms of queries and keys before the position embedding.

Letters: T tokens, N query heads, K key-value heads, H head dimension, F = N / K * H channels of the
query heads of one group.

With the scope ``head`` each head of each token is normalised on its own, and all heads share a
weight of H channels. With ``all_heads`` the mean is over the channels of all heads, and each channel
has its own weight. Tensor-parallel ranks then add their sums of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment, set_shard
from megatron_packed.layers.attention_heads import query_heads
from megatron_packed.layers.build import Build
from megatron_packed.layers.norm import Norm, norm_of
from megatron_packed.layers.parameters import no_weight_decay
from megatron_packed.ops.rms_norm.api import rms_norm


class QueryKeyNorm(NamedTuple):
    """Norms of the queries and of the keys of one layer."""

    q_norm: Norm | AllHeadsNorm
    k_norm: Norm | AllHeadsNorm

    def __call__(self, q_TKF: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, which may be views of a fused projection."""
        tokens, groups, width = k_TKH.shape
        if isinstance(self.q_norm, Norm):
            # (T, K, F) -> (T K, N/K, H): a view, because the groups of all tokens are equally far apart
            heads = q_TKF.view(tokens * groups, -1, width)
            return self.q_norm(heads).view(tokens, groups, -1), self.k_norm(k_TKH)
        q_TC, k_TC = q_TKF.reshape(tokens, -1), k_TKH.reshape(tokens, -1)
        return self.q_norm(q_TC).view_as(q_TKF), self.k_norm(k_TC).view_as(k_TKH)


class AllHeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads, whose heads are split over tensor-parallel ranks.

    Args:
        heads: query heads or key-value heads of the complete layer.
        config: value added to the mean square, and whether the weight is stored minus one.
        build: arguments that all layers share.
    """

    def __init__(self, heads: SplitSegment, config: ModelConfig, build: Build) -> None:
        super().__init__()
        tp = build.tp
        shard = tp.shard(heads)
        weight = build.new_parameter(shard.local_length)
        self.weight = set_shard(no_weight_decay(weight), shard)
        self.eps = config.norm_epsilon
        self.zero_centered = config.apply_layernorm_1p
        self.backend = build.backends.rms_norm
        self.tp = tp
        # Ranks that hold the same head count its squares once each.
        self.counted_channels = tp.size * shard.local_length

    def forward(self, x_TC: Tensor) -> Tensor:
        """Normalise the ``(T, C)`` channels of this rank's heads."""
        if self.tp.group is None:
            return rms_norm(
                x_TC,
                self.weight,
                self.eps,
                zero_centered=self.zero_centered,
                backend=self.backend,
            )
        x = x_TC.to(torch.promote_types(x_TC.dtype, torch.float32))
        squares_T1 = self.tp.sum_over_ranks(x.square().sum(dim=-1, keepdim=True))
        scale_C = self.weight.to(x.dtype)
        normed = x * torch.rsqrt(squares_T1 / self.counted_channels + self.eps)
        return (normed * (1 + scale_C if self.zero_centered else scale_C)).to(x_TC.dtype)


def query_key_norms(config: ModelConfig, build: Build) -> QueryKeyNorm:
    """Build the norms of queries and keys of one attention layer."""
    if config.qk_layernorm_scope == "all_heads":
        keys = SplitSegment(
            noun="key-value heads",
            count=config.num_query_groups,
            width=config.head_dim,
            shareable=True,
        )
        return QueryKeyNorm(
            AllHeadsNorm(query_heads(config), config, build),
            AllHeadsNorm(keys, config, build),
        )
    norms = QueryKeyNorm(*(norm_of(Norm, config.head_dim, config, build) for _ in range(2)))
    for norm in norms:
        for parameter in norm.parameters():
            # Each rank computes the gradient terms of its own heads.
            build.tp.use_inside(parameter)
    return norms
