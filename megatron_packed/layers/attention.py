"""Causal self-attention within each document of a pack.

Letters: T tokens, D hidden size, N query heads, K key-value heads (query groups), H head dimension,
P positions, R half of the rotated dimensions, O output width of the fused projection. Of c
context-parallel ranks each has T / c tokens, but where it has all of them for N / c heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron_packed.config.layer_pattern import ATTENTION
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.all_to_all import heads_to_rows, rows_to_heads
from megatron_packed.distributed.differentiable import gather_rows, pass_on
from megatron_packed.distributed.tensor_parallel_shards import Shard, ShardPiece, SplitSegment
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.ops.context_parallel_attention.api import Peers, context_parallel_attention
from megatron_packed.ops.rope.api import apply_rope, rope_tables
from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.packed.params import PackedSeqParams


class Rotary(nn.Module):
    """Cosine and sine tables of rotary positions, one object for all attention layers of a model.

    Args:
        max_positions: P, more than the highest position of any real document.
        rotary_dim: how many dimensions of a head rotate, 2R.
        base: theta.
    """

    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(
        self,
        *,
        max_positions: int,
        rotary_dim: int,
        base: float,
        device: torch.device | str,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.backend = backend
        cos_PR, sin_PR = rope_tables(max_positions, rotary_dim, base, device)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    @classmethod
    def of(
        cls, config: ModelConfig, max_positions: int, *, backend: str, device: torch.device | str
    ) -> Rotary | None:
        """Build the tables of a model; None where no layer reads them."""
        if config.position_embedding_type != "rope" or ATTENTION not in config.layer_types:
            return None
        return cls(
            max_positions=max_positions,
            rotary_dim=config.rotary_dim,
            base=config.rotary_base,
            device=device,
            backend=backend,
        )

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(
            q_TNH, k_TKH, position_ids_T, self.cos_PR, self.sin_PR, backend=self.backend
        )
        return rotated


def query_heads(config: ModelConfig) -> SplitSegment:
    """Columns of the output projection."""
    return SplitSegment(
        noun="attention heads", count=config.num_attention_heads, width=config.head_dim
    )


def key_value_heads(config: ModelConfig) -> SplitSegment:
    """Groups of the fused projection's rows: the query heads of a key-value head, and the keys and
    values.
    """
    heads_per_group = config.num_attention_heads // config.num_query_groups
    width = (heads_per_group + 2) * config.head_dim
    return SplitSegment(
        noun="key-value heads", count=config.num_query_groups, width=width, shareable=True
    )


def qkv_shard(config: ModelConfig, tp: TensorParallel) -> Shard:
    """This rank's rows of the fused projection: whole groups, or some query heads of one group and
    its key and value.

    Raises:
        ValueError: the heads do not fit the ranks.
    Example:
        4 query heads and 2 key-value heads on rank 1 of 4: the second query head of the first group
        (rows H to 2H), and that group's key and value (2H to 4H), which rank 0 has too.
    """
    queries = tp.local_count(query_heads(config)) * config.head_dim
    groups = tp.shard(key_value_heads(config))
    (group,) = groups.pieces
    if group.shared_by == 1:
        return groups
    first = group.start + tp.rank % group.shared_by * queries
    keys = group.start + group.length - 2 * config.head_dim
    pieces = (
        ShardPiece(start=first, length=queries),
        ShardPiece(start=keys, length=2 * config.head_dim, shared_by=group.shared_by),
    )
    return Shard(dim=0, length=groups.length, pieces=pieces)


def attended_heads(config: ModelConfig, tp: TensorParallel, cp: ContextParallel) -> tuple[int, int]:
    """Query and key-value heads for which a rank sees whole documents: its own, or with ``a2a`` its
    part of them.

    Raises:
        ValueError: they do not divide among the context-parallel ranks.
    """
    heads = [tp.local_segment(query_heads(config)), tp.local_segment(key_value_heads(config))]
    if cp.exchanges_heads:
        queries, keys = (cp.local_count(segment) for segment in heads)
        return queries, keys
    return heads[0].count, heads[1].count


class CoreAttention(nn.Module):
    """Everything between the projections of attention; it has no parameters.

    Context-parallel ranks have rows of the hidden state. With ``a2a`` they exchange heads for rows,
    run the kernel on whole documents, and exchange back; with ``all_gather`` and ``p2p`` keys and
    values travel to the queries.

    Args:
        config: sizes.
        rotary: shared tables, or None for no position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rotary: Rotary | None,
        backends: Backends,
        tp: TensorParallel,
        cp: ContextParallel,
    ) -> None:
        super().__init__()
        attended_heads(config, tp, cp)  # refuses heads that do not divide
        self.cp = cp
        self.exchanges_heads = cp.exchanges_heads
        self.peers = Peers(
            rank=cp.rank,
            size=cp.size,
            comm_type=cp.comm_type,
            gather_rows=partial(gather_rows, group=cp.group),
            pass_on=partial(pass_on, group=cp.group),
            group=cp.group,
            global_ranks=cp.global_ranks,
        )
        self.num_heads = tp.local_count(query_heads(config))
        self.num_groups = tp.local_count(key_value_heads(config))
        self.head_dim = config.head_dim
        self.backends = backends
        self.rotary = rotary
        heads_per_group = self.num_heads // self.num_groups
        self.split_sizes = [heads_per_group * self.head_dim, self.head_dim, self.head_dim]

    def forward(self, qkv_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, O)`` of queries, keys and values -> ``(T, N H)``."""
        tokens = qkv_TO.shape[0]
        # (T, O) -> (T, K, O/K) -> q (T, K, N/K * H), k (T, K, H), v (T, K, H); the split's backward
        # is one copy
        q, k_TKH, v_TKH = qkv_TO.view(tokens, self.num_groups, -1).split(self.split_sizes, dim=-1)
        q_TNH = q.reshape(tokens, self.num_heads, self.head_dim)
        if self.rotary is not None:
            q_TNH, k_TKH = self.rotary(q_TNH, k_TKH, self._positions(packed))
        attend = self._attend_by_heads if self.exchanges_heads else self._attend_by_rows
        return attend(q_TNH, k_TKH, v_TKH, packed).reshape(tokens, -1)

    def _positions(self, packed: PackedSeqParams) -> Tensor:
        if packed.tables.rope_position_ids is not None:
            return packed.tables.rope_position_ids
        # The tail may be longer than the tables; its position is of no consequence, and must lie
        # inside them.
        return self.cp.own(packed.position_ids * packed.valid, packed)

    def _attend_by_heads(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Attend to whole documents with this rank's part of the heads."""
        if self.cp.group is not None:
            q_TNH, k_TKH, v_TKH = rows_to_heads((q_TNH, k_TKH, v_TKH), self.cp.group)
        o_TNH = varlen_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            deterministic=self.backends.deterministic,
            tables=packed.tables.attention,
            backend=self.backends.varlen_attention,
        )
        if self.cp.group is not None:
            (o_TNH,) = heads_to_rows((o_TNH,), self.cp.group)
        return o_TNH

    def _attend_by_rows(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Attend from this rank's rows with all heads."""
        order = self.cp.order(packed)
        assert order is not None, "keys and values travel where rows lie in a zigzag"
        return context_parallel_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            slots_T=order.slots_T,
            peers=self.peers,
            deterministic=self.backends.deterministic,
            backend=self.backends.context_parallel_attention,
        )


class Attention(nn.Module):
    """Grouped-query attention with one fused projection.

    The rows of ``qkv.weight`` go group by group, as in Megatron: for each key-value head first its
    N/K query heads,
    then the key head, then the value head (``q q k v | q q k v | ...``), H rows each. A tensor-parallel rank therefore
    owns a contiguous range of rows where there are enough groups; where not, ranks share one
    (`qkv_shard`).

    Args:
        config: sizes and biases.
        rotary: shared tables, or None for no position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rotary: Rotary | None,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.core_attn = CoreAttention(config, rotary=rotary, backends=backends, tp=tp, cp=cp)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        options = {"tp": tp, "device": device, "dtype": dtype}
        parts = implementation(backends.transformer_impl, device, dtype)
        self.qkv = parts.column_parallel(
            config.hidden_size, qkv_shard(config, tp), bias=qkv_bias, **options
        )
        columns = tp.shard(query_heads(config), dim=1)
        self.proj = parts.row_parallel(
            columns, config.hidden_size, bias=config.add_bias_linear, **options
        )

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, D)`` -> ``(T, D)``; a token sees itself and the earlier tokens of its own document."""
        y_TD: Tensor = self.proj(self.core_attn(self.qkv(x_TD), packed))
        return y_TD
