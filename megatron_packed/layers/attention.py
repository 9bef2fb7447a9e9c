"""Causal self-attention within each document of a pack.

Letters: T tokens, D hidden size, N query heads, K key-value heads (query groups), H head dimension.
P positions, R half of the rotated dimensions, O output width of the fused projection. With c
context-parallel ranks each rank holds T / c tokens. In the head-parallel layout it holds all T
tokens for N / c heads instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.differentiable import gather_rows, pass_on
from megatron_packed.layers.attention_heads import (
    attended_heads,
    attention_parts,
    key_value_heads,
    qkv_shard,
    query_heads,
)
from megatron_packed.layers.build import Build
from megatron_packed.layers.context_parallel import from_zigzag, to_zigzag
from megatron_packed.layers.joined import adds_residual
from megatron_packed.layers.linear import JoinedResidual
from megatron_packed.ops.activation.api import sigmoid_gate
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.context_parallel_attention.api import Peers, context_parallel_attention
from megatron_packed.ops.rope.api import RopeScaling, apply_rope, rope_tables
from megatron_packed.ops.varlen_attention.api import varlen_attention
from megatron_packed.ops.varlen_attention.tables import BlockTables, MaskTable
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.query_key_norm import QueryKeyNorm


class Rotary(nn.Module):
    """Cosine and sine tables of rotary position embedding, shared by all attention layers.

    Args:
        max_positions: P; must be larger than the highest position in any real document.
        rotary_dim: number of rotated dimensions of a head, 2R.
        base: theta.
        scaling: stretch of the frequencies, or None.
        device: device of the tables.
        backend: backend of the op ``rope``.
    """

    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(
        self,
        *,
        max_positions: int,
        rotary_dim: int,
        base: float,
        scaling: RopeScaling | None = None,
        device: torch.device | str,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.backend = backend
        cos_PR, sin_PR = rope_tables(max_positions, rotary_dim, base, device, scaling=scaling)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    @classmethod
    def from_config(
        cls, config: ModelConfig, max_positions: int, *, backend: str, device: torch.device | str
    ) -> Rotary | None:
        """Build the tables of a model; return None if no layer needs them."""
        if config.position_embedding_type != "rope" or not config.has_attention:
            return None
        return cls(
            max_positions=max_positions,
            rotary_dim=config.rotary_dim,
            base=config.rotary_base,
            scaling=_rope_scaling(config),
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


def _rope_scaling(config: ModelConfig) -> RopeScaling | None:
    if not config.use_rope_scaling:
        return None
    return RopeScaling(
        factor=config.rope_scaling_factor,
        low=config.rope_scaling_low_freq_factor,
        high=config.rope_scaling_high_freq_factor,
        original_max_positions=config.rope_scaling_original_max_positions,
    )


class WindowTables(NamedTuple):
    """Masks or block lists that the attention kernel reads, for each attention window."""

    by_window: Mapping[int | None, BlockTables | MaskTable]
    """Number of visible tokens, or None for all -> input of the kernel."""

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tables in self.by_window.values() for tensor in tables.tensors())


def window_tables(
    windows: Sequence[int | None],
    prepare: Callable[..., BlockTables | MaskTable | None],
    packed: PackedSeqParams,
) -> WindowTables | None:
    """Return the tables of a pack for each window; None if the kernel reads none."""
    tables = {
        window: prepare(packed.seq_idx, packed.cu_seqlens, window_size=window) for window in windows
    }
    read = {window: table for window, table in tables.items() if table is not None}
    return WindowTables(read) if read else None


class Heads(NamedTuple):
    """Parts of the fused projection, as the attention kernel reads them."""

    q_TNH: Tensor
    """Queries after norm and rotary embedding."""
    k_TKH: Tensor
    """Keys after norm and rotary embedding."""
    v_TKH: Tensor
    gate_TKF: Tensor | None
    """Gates of the output, with F = N / K * H channels for each key-value head; None without."""


class CoreAttention(nn.Module):
    """Attention between the two projections: norms, rotary embedding, kernel and output gate.

    Each context-parallel rank holds rows of the hidden state. With ``a2a`` an all-to-all changes to
    the head-parallel layout, the kernel runs on complete documents, and a second all-to-all changes
    back. With ``all_gather`` and ``p2p`` the ranks send keys and values to each other. In a zigzag,
    the rows are reordered if the other layers need contiguous rows ([Note: reordered rows]).

    Args:
        config: sizes of the model.
        build: arguments that all layers share.
        number: number of the layer in the pattern, from 0.
        norm: norms of queries and keys, whose parameters the layer holds; None for none.
        rotary: tables of the rotary embedding, or None for no position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        *,
        number: int,
        norm: QueryKeyNorm | None,
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        tp, cp = build.tp, build.cp
        # This call raises an error for heads that cannot be split evenly.
        queries, keys = attended_heads(config, tp, cp)
        self.parts = attention_parts(config, tp, cp)
        self.used_shapes = tuple((n, config.head_dim) for n in (queries, keys, keys))
        """Shapes of a part's queries, keys and values in the kernel of ``a2a``."""
        self.cp = cp
        if cp.exchanges_heads:
            self.attend = self.attend_by_heads
        else:
            self.attend = self._attend_in_zigzag if cp.uses_zigzag else self._attend_in_order
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
        self.backends = build.backends
        self.softmax_scale = config.softmax_scale
        self.window_size = config.window_of(number)
        self.norm = norm
        self.rotary = rotary
        rows = self.num_heads // self.num_groups * self.head_dim
        gates = [rows] if config.attention_output_gate else []
        self.split_sizes = [rows, *gates, self.head_dim, self.head_dim]

    def forward(self, qkv_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """Attend with the fused queries, keys and values ``(T, O)``; return ``(T, N H)``."""
        heads = self.heads(qkv_TO, self.positions(packed))
        o_TNH = self.attend(heads.q_TNH, heads.k_TKH, heads.v_TKH, packed)
        return self.gate(o_TNH, heads.gate_TKF)

    def heads(self, qkv_TO: Tensor, positions_T: Tensor | None) -> Heads:
        """Split the fused projection; apply norm and rotary embedding if the model has them.

        Args:
            qkv_TO: ``(T, O)`` result of the fused projection.
            positions_T: position of each token in its document; not used without rotary embedding.
        """
        tokens = qkv_TO.shape[0]
        # (T, O) -> (T, K, O/K) -> q and gate (T, K, N/K * H), k and v (T, K, H); the split's
        # backward is one copy
        grouped_TKF = qkv_TO.view(tokens, self.num_groups, -1)
        q_TKF, *gates, k_TKH, v_TKH = torch.split(grouped_TKF, self.split_sizes, dim=-1)
        if self.norm is not None:
            q_TKF, k_TKH = self.norm(q_TKF, k_TKH)
        q_TNH = q_TKF.reshape(tokens, self.num_heads, self.head_dim)
        if self.rotary is not None:
            q_TNH, k_TKH = self.rotary(q_TNH, k_TKH, positions_T)
        return Heads(q_TNH, k_TKH, v_TKH, gates[0] if gates else None)

    def gate(self, o_TNH: Tensor, gate_TKF: Tensor | None) -> Tensor:
        """Return the attention's output ``(T, N H)``, times the sigmoid of the gate if there is one."""
        if gate_TKF is not None:
            o_TNH = sigmoid_gate(
                o_TNH.reshape(gate_TKF.shape), gate_TKF, backend=self.backends.activation
            )
        return o_TNH.reshape(o_TNH.shape[0], -1)

    def positions(self, packed: PackedSeqParams) -> Tensor | None:
        """Return the positions of this rank's rows for the rotary embedding; None without it."""
        if self.rotary is None:
            return None
        if packed.tables.rope_position_ids is not None:
            return packed.tables.rope_position_ids
        # The tail may be longer than the tables. Its positions do not matter, but must be valid
        # rows of the tables, so they are set to 0.
        return self.cp.own(packed.position_ids * packed.valid, packed)

    def attend_by_heads(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Attend in the head-parallel layout: all rows, this rank's heads, part by part."""
        window_tables = packed.tables.find(WindowTables)
        attend = partial(
            varlen_attention,
            cu_seqlens=packed.cu_seqlens,
            max_seqlen=packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            deterministic=self.backends.deterministic,
            tables=None if window_tables is None else window_tables.by_window.get(self.window_size),
            backend=self.backends.varlen_attention,
        )
        if self.cp.exchange is None:
            return attend(q_TNH, k_TKH, v_TKH)
        from megatron_packed.distributed.all_to_all import compute_by_heads

        def attend_part(part: int, columns_TW: Tensor) -> Tensor:
            return attend(*split_columns(columns_TW, *self.used_shapes))

        return compute_by_heads((q_TNH, k_TKH, v_TKH), attend_part, self.cp.exchange, self.parts)

    def _attend_in_order(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Attend with all heads of this rank's contiguous rows to their documents' earlier keys."""
        from megatron_packed.layers.contiguous_attention import (
            EarlierKeys,
            RankOffsets,
            rank_offsets,
        )

        offsets = packed.tables.find(RankOffsets) or rank_offsets(
            [self.window_size], self.cp, packed
        )
        k_SKH, v_SKH = EarlierKeys(self.cp, self.window_size).hold(k_TKH, v_TKH)
        return varlen_attention(
            q_TNH,
            k_SKH,
            v_SKH,
            offsets.queries,
            packed.max_seqlen,
            cu_seqlens_k=offsets.keys[self.window_size],
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            deterministic=self.backends.deterministic,
            backend=self.backends.varlen_attention,
        )

    def _attend_in_zigzag(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Attend with all heads of this rank's rows of a zigzag."""
        order = self.cp.attention_order(packed)
        assert order is not None, "one rank holds all rows"
        if self.cp.reorders_attention:
            q_TNH, k_TKH, v_TKH = to_zigzag((q_TNH, k_TKH, v_TKH), self.cp, packed)
        o_TNH = context_parallel_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            slots_T=order.slots_T,
            peers=self.peers,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            deterministic=self.backends.deterministic,
            backend=self.backends.context_parallel_attention,
        )
        return from_zigzag(o_TNH, self.cp, packed) if self.cp.reorders_attention else o_TNH


class Attention(nn.Module):
    """Grouped-query attention with one fused projection.

    The rows of ``qkv.weight`` are ordered group by group, as in Megatron. A group has the N/K query
    heads of one key-value head, then its key head, then its value head
    (``q q k v | q q k v | ...``), with H rows each. With an output gate, the gates of the query
    heads follow the query heads (``q q gate gate k v | ...``). So a tensor-parallel rank holds a contiguous
    range of rows if there are at least as many groups as ranks. Otherwise several ranks share a
    group (`qkv_shard`).

    Args:
        config: sizes and biases of the model.
        build: arguments that all layers share.
        number: number of the layer in the pattern, from 0.
        rotary: tables of the rotary embedding, or None for no position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        *,
        number: int = 0,
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        norm: QueryKeyNorm | None = None
        if config.qk_layernorm:
            from megatron_packed.layers.query_key_norm import query_key_norms

            norm = query_key_norms(config, build)
        self.core_attn = CoreAttention(config, build, number=number, norm=norm, rotary=rotary)
        self.qkv = build.parts.column_parallel(
            config.hidden_size,
            qkv_shard(config, build.tp),
            bias=config.add_bias_linear or config.add_qkv_bias,
            build=build,
        )
        self.proj = build.parts.row_parallel(
            build.tp.shard(query_heads(config), dim=1),
            config.hidden_size,
            bias=config.add_bias_linear,
            build=build,
        )
        if norm is not None:
            self.q_norm = norm.q_norm
            self.k_norm = norm.k_norm

    @property
    def output_projection(self) -> nn.Module:
        return self.proj

    @adds_residual
    def forward(
        self, x_TD: Tensor, packed: PackedSeqParams, joined: JoinedResidual | None = None
    ) -> Tensor:
        """Map ``(T, D)`` to ``(T, D)``.

        A token attends to itself and to the earlier tokens of its own document.
        """
        y_TI = self.core_attn(self.qkv(x_TD), packed)
        y_TD: Tensor = self.proj(y_TI) if joined is None else self.proj(y_TI, joined)
        return y_TD
