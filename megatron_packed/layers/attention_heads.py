"""Heads of an attention layer as rows of its fused projection, and the part of each rank."""

from __future__ import annotations

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import Shard, ShardPiece, SplitSegment
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.tensor_parallel import TensorParallel


def query_heads(config: ModelConfig) -> SplitSegment:
    """Return the segment of query heads: the columns of the output projection."""
    return SplitSegment(
        noun="attention heads", count=config.num_attention_heads, width=config.head_dim
    )


def key_value_heads(config: ModelConfig) -> SplitSegment:
    """Return the segment of key-value heads: the row groups of the fused projection.

    A group contains the rows of the query heads that share a key head, of their gates with
    ``attention_output_gate``, of the key head and of the value head.
    """
    heads_per_group = config.num_attention_heads // config.num_query_groups
    width = (_query_parts(config) * heads_per_group + 2) * config.head_dim
    return SplitSegment(
        noun="key-value heads", count=config.num_query_groups, width=width, shareable=True
    )


def _query_parts(config: ModelConfig) -> int:
    """Return the number of rows of the fused projection for each channel of a query head."""
    return 2 if config.attention_output_gate else 1


def qkv_shard(config: ModelConfig, tp: TensorParallel) -> Shard:
    """Return this rank's rows of the fused projection.

    With at least as many key-value heads as ranks these are complete groups. With fewer, a rank
    holds some query heads of one group, their gates, and the key head and value head of that group.

    Raises:
        ValueError: the heads cannot be split evenly over the tensor-parallel ranks.
    Example:
        With 4 query heads and 2 key-value heads, rank 1 of 4 holds the second query head of the
        first group (rows H to 2H). It also holds the key and value of that group (rows 2H to 4H),
        which rank 0 holds too.
    """
    queries = tp.local_count(query_heads(config)) * config.head_dim
    groups = tp.shard(key_value_heads(config))
    (group,) = groups.pieces
    if group.shared_by == 1:
        return groups
    first = group.start + tp.rank % group.shared_by * queries
    keys = group.start + group.length - 2 * config.head_dim
    pieces = (
        # The gates of the group follow all query heads of the group.
        *(
            ShardPiece(start=first + part * group.shared_by * queries, length=queries)
            for part in range(_query_parts(config))
        ),
        ShardPiece(start=keys, length=2 * config.head_dim, shared_by=group.shared_by),
    )
    return Shard(dim=0, length=groups.length, pieces=pieces)


def attended_heads(config: ModelConfig, tp: TensorParallel, cp: ContextParallel) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads in a rank's attention kernel.

    These are the heads of the tensor-parallel rank. With ``a2a`` they are split further over the
    context-parallel ranks, and into the parts that are exchanged one after the other.

    Raises:
        ValueError: with ``a2a``, the heads cannot be split evenly over the context-parallel ranks.
    """
    heads = _local_heads(config, tp)
    if cp.exchanges_heads:
        parts = attention_parts(config, tp, cp)
        queries, keys = (cp.local_count(segment) // parts for segment in heads)
        return queries, keys
    return heads[0].count, heads[1].count


def attention_parts(config: ModelConfig, tp: TensorParallel, cp: ContextParallel) -> int:
    """Return the number of parts in which the heads of a layer are exchanged; 1 without ``a2a``."""
    if not cp.exchanges_heads:
        return 1
    return cp.parts(*(segment.count for segment in _local_heads(config, tp)))


def _local_heads(config: ModelConfig, tp: TensorParallel) -> list[SplitSegment]:
    """Return query heads and key-value heads of a tensor-parallel rank."""
    return [tp.local_segment(query_heads(config)), tp.local_segment(key_value_heads(config))]
