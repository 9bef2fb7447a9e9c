"""Cached keys and values of an attention layer.

Letters: T tokens of a pack, B documents, D hidden size, N query heads, K key-value heads, R query
heads per key-value head, H head dimension, L cached positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packed.layers.attention import Attention
from megatron_packed.layers.decoding.state import CACHE_BLOCK, MixerState, NextTokens
from megatron_packed.packed.params import PackedSeqParams


class AttentionCache(MixerState):
    """Keys (after the rotary embedding) and values of all tokens of each document.

    The cache is ``(B, K, L, H)``. L doubles when the longest document does not fit, so the cost of
    copying is constant per token.
    """

    def __init__(self, mixer: Attention) -> None:
        self.mixer = mixer
        self.keys_BKLH = torch.empty(0)
        self.values_BKLH = torch.empty(0)

    def prefill(self, x_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        core = self.mixer.core_attn
        positions_T = core.positions(packed)
        q_TNH, k_TKH, v_TKH, gate_TKF = core.heads(self.mixer.qkv(x_TD), positions_T)
        documents, longest = packed.num_seqs, int(packed.document_lengths.max())
        real = int(packed.document_lengths.sum())
        length = -(-longest // CACHE_BLOCK) * CACHE_BLOCK
        document_T, place_T = packed.seq_idx[0, :real].long(), packed.position_ids[:real].long()
        # Unused positions must be finite, because their weight of 0 does not remove a NaN.
        cache = [x.new_zeros(documents, x.shape[1], length, x.shape[2]) for x in (k_TKH, v_TKH)]
        for cache_BKLH, x_TKH in zip(cache, (k_TKH, v_TKH), strict=True):
            cache_BKLH[document_T, :, place_T] = x_TKH[:real]
        self.keys_BKLH, self.values_BKLH = cache
        o_TNH = core.attend_by_heads(q_TNH, k_TKH, v_TKH, packed)
        y_TD: Tensor = self.mixer.proj(core.gate(o_TNH, gate_TKF))
        return y_TD

    def step(self, x_BD: Tensor, tokens: NextTokens) -> Tensor:
        core = self.mixer.core_attn
        q_BNH, k_BKH, v_BKH, gate_BKF = core.heads(self.mixer.qkv(x_BD), tokens.positions_B)
        self._reserve(tokens.longest)
        document_B = torch.arange(len(x_BD), device=x_BD.device)
        self.keys_BKLH[document_B, :, tokens.positions_B] = k_BKH
        self.values_BKLH[document_B, :, tokens.positions_B] = v_BKH
        visible_BL = tokens.visible_BL
        attended = visible_BL.shape[1]
        if core.window_size is not None:
            distance_BL = tokens.positions_B[:, None] - torch.arange(attended, device=x_BD.device)
            visible_BL = visible_BL & (distance_BL < core.window_size)
        # Query heads that share a key head become rows of one matrix: (B, N, H) -> (B, K, R, H)
        o_BKRH = F.scaled_dot_product_attention(
            q_BNH.view(len(x_BD), k_BKH.shape[1], -1, q_BNH.shape[2]),
            self.keys_BKLH[:, :, :attended],
            self.values_BKLH[:, :, :attended],
            attn_mask=visible_BL[:, None, None],
            scale=core.softmax_scale,
        )
        y_BD: Tensor = self.mixer.proj(core.gate(o_BKRH, gate_BKF))
        return y_BD

    def keep(self, rows_B: Tensor) -> None:
        self.keys_BKLH = self.keys_BKLH[rows_B]
        self.values_BKLH = self.values_BKLH[rows_B]

    def _reserve(self, length: int) -> None:
        """Double the cached positions until there are at least ``length``."""
        while self.keys_BKLH.shape[2] < length:
            grown = [
                torch.cat([cache, torch.zeros_like(cache)], dim=2)
                for cache in (self.keys_BKLH, self.values_BKLH)
            ]
            self.keys_BKLH, self.values_BKLH = grown
