"""Attention in plain PyTorch, for training on a CPU and as the reference in tests of all kernels.

Softmax and sums are fp32 (fp64 for fp64 inputs). The score matrix exists only for ``BLOCK`` queries
at a time.

On a CPU the module reads the offsets and computes each document separately, so the bits of a document
do not depend on other documents. On a GPU reading the offsets would stall the host. There the complete
pack is one segment with a document mask, and all shapes depend only on T.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

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


def run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, call: AttentionCall) -> Tensor:
    """Run the reference.

    On a CPU, offsets that do not fit the rows are an error: training must not use a wrong pack.
    """
    tokens, keys = q_TNH.shape[0], k_SKH.shape[0]
    math = torch.promote_types(q_TNH.dtype, torch.float32)
    q, k, v = q_TNH.to(math) * call.softmax_scale, k_SKH.to(math), v_SKH.to(math)
    if q_TNH.device.type == "cuda":
        documents = _Documents.on_device(call, tokens, keys)
        return _attend_segment(q, k, v, 0, documents, call.window_size).to(q_TNH.dtype)
    rows = _document_rows(call.cu_seqlens, call.cu_seqlens_k, tokens, keys, call.max_seqlen)
    outputs = [
        _attend_segment(
            q[slice(*queries)],
            k[slice(*seen)],
            v[slice(*seen)],
            seen[1] - seen[0] - (queries[1] - queries[0]),
            None,
            call.window_size,
        )
        for queries, seen in rows
    ]
    return torch.cat(outputs).to(q_TNH.dtype)


class _Documents(NamedTuple):
    """Documents of a segment that is a complete pack."""

    of_query_T: Tensor
    of_key_S: Tensor
    place_T: Tensor | None
    """Row of each query's own key; None if it is the row of the query."""

    @classmethod
    def on_device(cls, call: AttentionCall, tokens: int, keys: int) -> _Documents:
        of_query_T = document_numbers(call.cu_seqlens, tokens)[0]
        if call.cu_seqlens_k is call.cu_seqlens:
            return cls(of_query_T, of_query_T, None)
        # The last query of a document belongs to its last key.
        shift_D = (call.cu_seqlens_k - call.cu_seqlens)[1:]
        place_T = torch.arange(tokens, device=shift_D.device) + shift_D[of_query_T]
        of_key_S = document_numbers(call.cu_seqlens_k, keys)[0]
        # Rows before the first document would have its number. Rows after the last have a new one.
        before_S = torch.arange(keys, device=of_key_S.device) < call.cu_seqlens_k[0]
        return cls(of_query_T, of_key_S.masked_fill(before_S, -1), place_T)


_Range = tuple[int, int]


def _document_rows(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, tokens: int, keys: int, max_seqlen: int
) -> list[tuple[_Range, _Range]]:
    """Return the rows of queries and of keys of each document that has queries."""
    offsets, offsets_k = cu_seqlens.tolist(), cu_seqlens_k.tolist()
    lengths, lengths_k = (
        [end - start for start, end in pairwise(each)] for each in (offsets, offsets_k)
    )
    if offsets[0] != 0 or offsets[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at T = {tokens}; got {offsets[:8]} ... {offsets[-1]}."
        )
    outside = offsets_k[0] < 0 or offsets_k[-1] > keys
    if outside or any(own > seen for own, seen in zip(lengths, lengths_k)):
        raise ValueError(
            f"cu_seqlens_k must be offsets of at most S = {keys} rows, with at least as many keys as a document has "
            f"queries; got {offsets_k[:8]} ... {offsets_k[-1]}."
        )
    if max(lengths_k) > max_seqlen:
        raise ValueError(
            f"The longest document has {max(lengths_k)} tokens, more than max_seqlen ({max_seqlen})."
        )
    documents = zip(pairwise(offsets), pairwise(offsets_k))
    return [(queries, seen) for queries, seen in documents if queries[0] < queries[1]]


def _attend_segment(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    earlier: int,
    documents: _Documents | None,
    window_size: int | None,
) -> Tensor:
    """Compute causal attention over one segment: one document, or a complete pack.

    Args:
        earlier: number of keys before the first query's own key; not used for a pack.
        documents: the documents of a pack; None for one document.
    """
    tokens, num_heads = q_TNH.shape[:2]
    pairs = tokens * (tokens // 2 + k_SKH.shape[0] - tokens)
    recompute = torch.is_grad_enabled() and num_heads * pairs > _SAVED_SCORES_LIMIT
    outputs = []
    for start, q_BNH in zip(range(0, tokens, BLOCK), torch.split(q_TNH, BLOCK), strict=True):
        stop = start + q_BNH.shape[0]
        if documents is None or documents.place_T is None:
            first = 0 if window_size is None else max(0, start + earlier - window_size + 1)
            end = stop + earlier
            place_B = torch.arange(start + earlier, end, device=q_TNH.device)
        else:
            first, end = 0, k_SKH.shape[0]
            place_B = documents.place_T[start:stop]
        distance_BS = place_B[:, None] - torch.arange(first, end, device=q_TNH.device)
        visible_BS = distance_BS >= 0
        if window_size is not None:
            visible_BS &= distance_BS < window_size
        if documents is not None:
            visible_BS &= documents.of_query_T[start:stop, None] == documents.of_key_S[first:end]
        block = (q_BNH, k_SKH[first:end], v_SKH[first:end], visible_BS)
        if recompute:
            outputs.append(
                checkpoint(_attend_block, *block, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            outputs.append(_attend_block(*block))
    return torch.cat(outputs)


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
