"""Chunks of a pack for the gated delta rule, computed once per micro-batch for all layers.

Each document is cut into chunks of 64 tokens from its own first token; its last chunk may be
shorter. So a chunk has tokens of one document only, and the chunks of a document do not depend on
its place in the pack. All shapes depend only on the number of tokens and the number of documents, and
the host reads nothing back, so a CUDA graph can capture the computation.

Letters: T tokens, D documents of ``cu_seqlens`` (with the tail and empty ones), Q chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""


class DeltaRuleTables(NamedTuple):
    """Chunks in the order of the pack, then empty chunks up to the fixed number Q.

    Example:
        Documents of 65, 0 and 3 tokens: Q is (68 + 3 * 63) // 64 = 4. The chunks are 0..64, 64..65,
        65..68 and the empty 68..68, of documents 0, 0, 2 and 2. ``first_chunk_D`` is [0, 2, 2],
        ``num_chunks_D`` is [2, 0, 1], ``longest_first_D`` is [0, 2, 1] and ``occupied_1`` is [2].
    """

    document_Q: Tensor
    """``(Q,)`` int32: document of each chunk, an index into ``cu_seqlens``; D - 1 if empty."""
    start_Q: Tensor
    """``(Q,)`` int32: first token of each chunk; T if the chunk is empty."""
    end_Q: Tensor
    """``(Q,)`` int32: token after the last token of each chunk; T if the chunk is empty."""
    first_chunk_D: Tensor
    """``(D,)`` int32: first chunk of each document; of an empty one, that of the next document."""
    num_chunks_D: Tensor
    """``(D,)`` int32: number of chunks of each document; 0 for an empty document."""
    longest_first_D: Tensor
    """``(D,)`` int32: documents in descending order of their chunks, equal ones in their order."""
    occupied_1: Tensor
    """``(1,)`` int32: number of documents that have tokens."""


def max_chunks(tokens: int, documents: int) -> int:
    """Return Q, the largest number of chunks that ``documents`` of together ``tokens`` can have."""
    return (tokens + documents * (CHUNK - 1)) // CHUNK


def build_tables(cu_seqlens: Tensor, tokens: int) -> DeltaRuleTables:
    """Build the tables of a pack.

    Args:
        cu_seqlens: ``(D + 1,)`` int32, first 0, last ``tokens``; documents may be empty.
        tokens: number of tokens of the pack, T.
    """
    documents = cu_seqlens.shape[0] - 1
    starts_D = cu_seqlens[:-1]
    num_chunks_D = (cu_seqlens[1:] - starts_D + (CHUNK - 1)) // CHUNK
    ends_D = num_chunks_D.cumsum(0, dtype=torch.int32)
    first_chunk_D = ends_D - num_chunks_D
    chunk_Q = torch.arange(
        max_chunks(tokens, documents), dtype=torch.int32, device=cu_seqlens.device
    )
    # A chunk belongs to the first document whose last chunk is not before it. The spare chunks get the
    # number of the last document and no tokens.
    document_Q = torch.searchsorted(ends_D, chunk_Q, right=True, out_int32=True)
    document_Q = document_Q.clamp_max(documents - 1)
    # A spare chunk would start at or after the end of the last document, which is T.
    start_Q = starts_D[document_Q] + (chunk_Q - first_chunk_D[document_Q]) * CHUNK
    start_Q = start_Q.clamp_max(tokens)
    end_Q = torch.minimum(start_Q + CHUNK, cu_seqlens[1:][document_Q])
    longest_first_D = num_chunks_D.argsort(descending=True, stable=True).int()
    occupied_1 = num_chunks_D.sign().sum(0, keepdim=True, dtype=torch.int32)
    return DeltaRuleTables(
        document_Q, start_Q, end_Q, first_chunk_D, num_chunks_D, longest_first_D, occupied_1
    )
