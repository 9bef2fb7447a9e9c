"""Attention in plain PyTorch, for training on a CPU and as the reference in tests of all kernels.

Softmax and sums are fp32 (fp64 for fp64 inputs). The score matrix exists only for ``BLOCK`` queries
at a time.

On a CPU the module reads the offsets and computes each document separately, so the bits of a document
do not depend on other documents. On a GPU reading the offsets would stall the host. There the complete
pack is one segment with a document mask, and all shapes depend only on T.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_packed.ops.varlen_attention.api import AttentionCall
from megatron_packed.ops.varlen_attention.tables import document_numbers

BLOCK = 256
"""Queries that are processed together: enough work for a matrix product on a CPU, with small scores."""

_SAVED_SCORES_LIMIT = 2**26
"""Largest number of probabilities that are saved for backward (256 MiB in fp32).

With more, backward recomputes each block.
"""


def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, call: AttentionCall) -> Tensor:
    """Run the reference.

    On a CPU, offsets that do not fit the tokens are an error: training must not use a wrong pack.
    """
    tokens = q_TNH.shape[0]
    math = torch.promote_types(q_TNH.dtype, torch.float32)
    q, k, v = q_TNH.to(math) * call.softmax_scale, k_TKH.to(math), v_TKH.to(math)
    if q_TNH.device.type == "cuda":
        document_T = document_numbers(call.cu_seqlens, tokens)[0]
        return _attend_segment(q, k, v, document_T, call.window_size).to(q_TNH.dtype)
    lengths = _document_lengths(call.cu_seqlens, tokens, call.max_seqlen)
    documents = zip(
        torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True
    )
    return torch.cat([_attend_segment(*qkv, None, call.window_size) for qkv in documents]).to(
        q_TNH.dtype
    )


def _document_lengths(cu_seqlens: Tensor, tokens: int, max_seqlen: int) -> list[int]:
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at T = {tokens}; got {offsets[:8]} ... {offsets[-1]}."
        )
    if max(lengths) > max_seqlen:
        raise ValueError(
            f"The longest document has {max(lengths)} tokens, more than max_seqlen ({max_seqlen})."
        )
    return [length for length in lengths if length]


def _attend_segment(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, document_T: Tensor | None, window_size: int | None
) -> Tensor:
    """Compute causal attention over one segment.

    The segment is one document, or a complete pack with document numbers.
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
    """Return boolean (B, S), True if a query of start..end-1 sees a key of first..end-1."""
    q_B1 = torch.arange(start, end, device=device)[:, None]
    k_1S = torch.arange(first, end, device=device)[None, :]
    visible_BS = q_B1 >= k_1S
    if window_size is not None:
        visible_BS &= q_B1 - k_1S < window_size
    if document_T is not None:
        visible_BS &= document_T[start:end, None] == document_T[None, first:end]
    return visible_BS


def _attend_block(q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, visible_BS: Tensor) -> Tensor:
    """Compute softmax attention of a block of scaled queries.

    Query heads n*G..n*G+G-1 share key/value head n.
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
