"""Plain PyTorch: the oracle of every kernel, and what trains on a CPU.

Softmax and sums in fp32 (fp64 for fp64 inputs), whatever the inputs' dtype. The score matrix exists
for ``BLOCK`` queries at a time only.

On a CPU the offsets can be read, so each document is computed alone: its bits do not depend on its
companions at all. On a GPU reading them would stall the host; there the whole pack is one segment
under a document mask, whose shapes depend on T alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_packed.ops.varlen_attention.backends import VarlenAttentionInputs
from megatron_packed.ops.varlen_attention.tables import KernelTables, document_numbers

BLOCK = 256
"""Queries per step: enough work for a CPU's matrix kernel, few enough that their scores stay small.
"""

_SAVED_SCORES_LIMIT = 2**26
"""Above this many probabilities (256 MiB in fp32), each block is recomputed in backward instead of
being kept.
"""


def not_supported_reasons(inputs: VarlenAttentionInputs) -> list[str]:
    return []


def run(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    seq_idx_1T: Tensor | None,
    softmax_scale: float,
    window_size: int | None,
    deterministic: bool,
    tables: KernelTables | None,
) -> Tensor:
    """Run the reference; on a CPU refuse offsets that do not fit: a wrong pack must not train."""
    tokens = q_TNH.shape[0]
    math = torch.promote_types(q_TNH.dtype, torch.float32)
    q, k, v = q_TNH.to(math) * softmax_scale, k_TKH.to(math), v_TKH.to(math)
    if q_TNH.device.type == "cuda":
        document_T = document_numbers(cu_seqlens, tokens)[0]
        return _attend_segment(q, k, v, document_T, window_size).to(q_TNH.dtype)
    lengths = _document_lengths(cu_seqlens, tokens, max_seqlen)
    documents = zip(
        torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True
    )
    return torch.cat([_attend_segment(*qkv, None, window_size) for qkv in documents]).to(
        q_TNH.dtype
    )


def _document_lengths(cu_seqlens: Tensor, tokens: int, max_seqlen: int) -> list[int]:
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {tokens}; got {offsets[:8]} ... {offsets[-1]}."
        )
    if max(lengths) > max_seqlen:
        raise ValueError(
            f"The longest document has {max(lengths)} tokens, more than max_seqlen ({max_seqlen})."
        )
    return [length for length in lengths if length]


def _attend_segment(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, document_T: Tensor | None, window_size: int | None
) -> Tensor:
    """Compute causal attention over one stretch of tokens: one document, or a whole pack with its
    document numbers.
    """
    tokens, num_heads = q_TNH.shape[:2]
    recompute = torch.is_grad_enabled() and num_heads * tokens * tokens // 2 > _SAVED_SCORES_LIMIT
    outputs = []
    for start, q_BNH in zip(range(0, tokens, BLOCK), torch.split(q_TNH, BLOCK), strict=True):
        end = start + q_BNH.shape[0]
        first = 0 if window_size is None else max(0, start - window_size + 1)
        visible_BS = _visible(start, end, first, document_T, window_size, q_TNH.device)
        block = (q_BNH, k_TKH[first:end], v_TKH[first:end], visible_BS)
        if recompute:
            outputs.append(
                checkpoint(_attend_block, *block, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            outputs.append(_attend_block(*block))
    return torch.cat(outputs)


def _visible(
    start: int,
    end: int,
    first: int,
    document_T: Tensor | None,
    window_size: int | None,
    device: torch.device,
) -> Tensor:
    """Return boolean (B, S): which of the keys first..end-1 each query of start..end-1 sees."""
    q_B1 = torch.arange(start, end, device=device)[:, None]
    k_1S = torch.arange(first, end, device=device)[None, :]
    visible_BS = q_B1 >= k_1S
    if window_size is not None:
        visible_BS &= q_B1 - k_1S < window_size
    if document_T is not None:
        visible_BS &= document_T[start:end, None] == document_T[None, first:end]
    return visible_BS


def _attend_block(q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, visible_BS: Tensor) -> Tensor:
    """Compute softmax attention of a block of scaled queries. Query heads n*G..n*G+G-1 share
    key/value head n.
    """
    block, num_heads, head_dim = q_BNH.shape
    kv_heads, group = k_SKH.shape[1], num_heads // k_SKH.shape[1]
    # (B, K, G, H) -> (K, G, B, H) -> (K, G*B, H)
    q_KRH = (
        q_BNH.reshape(block, kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, group * block, head_dim)
    )
    scores_KRS = q_KRH @ k_SKH.permute(1, 2, 0)
    scores_KGBS = scores_KRS.view(kv_heads, group, block, -1).masked_fill(
        ~visible_BS, float("-inf")
    )
    out_KRH = scores_KGBS.softmax(-1).view(kv_heads, group * block, -1) @ v_SKH.transpose(0, 1)
    # (K, G*B, H) -> (K, G, B, H) -> (B, K, G, H) -> (B, N, H)
    return (
        out_KRH.view(kv_heads, group, block, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(block, num_heads, head_dim)
    )
