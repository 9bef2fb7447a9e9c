"""Causal self-attention within each document of a pack.

Letters: T tokens, D hidden size, N query heads, K key-value heads (query groups), H head dimension, P positions,
R half of the rotated dimensions, O output width of the fused projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.config.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.linear import Linear
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
        self, *, max_positions: int, rotary_dim: int, base: float, device: torch.device | str, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.max_positions, self.backend = max_positions, backend
        cos_PR, sin_PR = rope_tables(max_positions, rotary_dim, base, device)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(
            q_TNH, k_TKH, position_ids_T, self.cos_PR, self.sin_PR, backend=self.backend
        )
        return rotated


class Attention(nn.Module):
    """Grouped-query attention with one fused projection.

    The rows of ``qkv.weight`` go group by group, as in Megatron: for each key-value head first its N/K query heads,
    then the key head, then the value head (``q q k v | q q k v | ...``), H rows each. A tensor-parallel rank therefore
    owns a contiguous range of rows.

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
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_query_groups
        self.head_dim = config.head_dim
        self.backends = backends
        self.rotary = rotary
        heads_per_group = self.num_heads // self.num_groups
        self.split_sizes = [heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        self.qkv = Linear(
            config.hidden_size,
            self.num_groups * sum(self.split_sizes),
            bias=config.add_bias_linear or config.add_qkv_bias,
            device=device,
            dtype=dtype,
        )
        self.proj = Linear(
            self.num_heads * self.head_dim, config.hidden_size, bias=config.add_bias_linear, device=device, dtype=dtype
        )

    def forward(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, D)`` -> ``(T, D)``; a token sees itself and the earlier tokens of its own document."""
        tokens = x_TD.shape[0]
        # (T, O) -> (T, K, O/K) -> q (T, K, N/K * H), k (T, K, H), v (T, K, H); the split's backward is one copy
        q, k_TKH, v_TKH = self.qkv(x_TD).view(tokens, self.num_groups, -1).split(self.split_sizes, dim=-1)
        q_TNH = q.reshape(tokens, self.num_heads, self.head_dim)
        if self.rotary is not None:
            positions_T = packed.tables.get("rope_position_ids", packed.position_ids)
            q_TNH, k_TKH = self.rotary(q_TNH, k_TKH, positions_T)
        o_TNH = varlen_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            packed.cu_seqlens,
            packed.max_seqlen,
            seq_idx_1T=packed.seq_idx,
            deterministic=self.backends.deterministic,
            tables=packed.tables.get("varlen_attention"),
            backend=self.backends.varlen_attention,
        )
        return self.proj(o_TNH.reshape(tokens, -1))
