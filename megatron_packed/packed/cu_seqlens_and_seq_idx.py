"""Offsets of the documents of a pack (``cu_seqlens``), and document numbers (``seq_idx``) and positions
of its slots, computed on the host.

Kernels with a recurrent state reset the state where ``seq_idx`` changes. Rotary embeddings read the
positions.

All functions are pure functions of numpy arrays. A pack has ``total_tokens`` (T) slots and a
capacity of N real documents. Slots after the last document form the tail, which is treated as one
more document and may be empty. The offsets always have ``N + 2`` entries: 0, the end of each
document, then T (the end of the tail), then T repeated. So every slot belongs to exactly one
document or to the tail, and kernels write every row of their outputs.

Example (T = 10, documents of 3 and 5 tokens, so a tail of 2)::

    capacity 2   cu_seqlens [0, 3, 8, 10]

    capacity 4   cu_seqlens [0, 3, 8, 10, 10, 10]

    both         seq_idx    [0 0 0 1 1 1 1 1 2 2]     position_ids [0 1 2 0 1 2 3 4 0 1]

With an ``alignment``, the number of slots of a document is its number of tokens, rounded up to a
multiple of ``alignment``. The padding at the end belongs to the document. Causal attention hides the
padding from the document's tokens, and ``valid`` is False there. So padding has no effect on losses,
like the tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_packed.packed.array_types import Int32Array as Int32Array

MAX_TOTAL_TOKENS = 2**31 - 1
"""Largest number of token slots; varlen kernels require int32 offsets."""


def as_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Convert ``lengths`` to a one-dimensional int64 array.

    Raises:
        ValueError: not one-dimensional, or not whole numbers.
    """
    array = np.asarray(lengths if len(lengths) else np.zeros(0, np.int64))
    if array.ndim != 1:
        raise ValueError(
            f"document lengths must be one list of integers, got an array of shape {array.shape}."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"document lengths must be integers, got {array.dtype}; convert them before packing."
        )
    return array.astype(np.int64)


def check_pack(lengths: NDArray[np.int64], total_tokens: int, capacity: int | None) -> None:
    """Check that documents fit into one pack; documents are never truncated to fit.

    Raises:
        ValueError: a document without tokens, more tokens than slots, or more documents than
            ``capacity``.
    """
    if not 1 <= total_tokens <= MAX_TOTAL_TOKENS:
        raise ValueError(
            f"total_tokens ({total_tokens}) must be between 1 and {MAX_TOTAL_TOKENS}, because offsets are int32; "
            "change seq_length or micro_batch_size."
        )
    if lengths.size and np.min(lengths) < 1:
        at = int(np.argmin(lengths))
        raise ValueError(
            f"document {at} has length {lengths[at]}; every document needs at least 1 token. Remove this document."
        )
    num_tokens = int(lengths.sum())
    if num_tokens > total_tokens:
        raise ValueError(
            f"{lengths.size} documents hold {num_tokens} tokens, but the pack has total_tokens = {total_tokens}; "
            "truncate or split documents, or put fewer documents into the pack."
        )
    if capacity is not None and lengths.size > capacity:
        raise ValueError(
            f"{lengths.size} documents do not fit into a capacity of {capacity}; raise the capacity, "
            "lower max_documents_per_pack, or use exact capacity (None)."
        )


def cu_seqlens_from_lengths(
    lengths: Sequence[int] | NDArray[np.integer], total_tokens: int, capacity: int | None = None
) -> Int32Array:
    """Compute the offsets of the documents and of the tail, padded to a capacity.

    Args:
        lengths: number of tokens of each document, at least 1.
        total_tokens: number of slots of the pack, T.
        capacity: capacity in real documents, N; None for the number of documents in ``lengths``.
    Returns:
        ``(N + 2,)`` int32, from 0 to T, never decreasing.
    Raises:
        ValueError: see `check_pack`.
    Example:
        lengths [3, 5] in 10 slots with capacity 4: ``[0, 3, 8, 10, 10, 10]``.
    """
    counts = as_lengths(lengths)
    check_pack(counts, total_tokens, capacity)
    num_rows = (counts.size if capacity is None else capacity) + 2
    cu_seqlens = np.full(num_rows, total_tokens, dtype=np.int32)
    cu_seqlens[0] = 0
    np.cumsum(counts, out=cu_seqlens[1 : counts.size + 1], dtype=np.int32)
    return cu_seqlens


def aligned(lengths: Sequence[int] | NDArray[np.integer], alignment: int) -> NDArray[np.int64]:
    """Round the lengths of documents up to multiples of ``alignment``.

    Raises:
        ValueError: see `as_lengths`, or an alignment below 1.
    Example:
        lengths [1, 4, 5] with alignment 4: [4, 4, 8].
    """
    if alignment < 1:
        raise ValueError(f"alignment ({alignment}) must be 1 or more; 1 means no padding.")
    return -(-as_lengths(lengths) // alignment) * alignment


def lengths_from_cu_seqlens(cu_seqlens: Int32Array, num_seqs: int | None = None) -> Int32Array:
    """Return the lengths of the first ``num_seqs`` documents.

    With None, also return those of the tail and of the empty rows after the tail.
    """
    lengths: Int32Array = np.diff(cu_seqlens)
    return lengths if num_seqs is None else lengths[:num_seqs]


def longest_document(cu_seqlens: Int32Array) -> int:
    """Return the number of tokens of the longest row, **including the tail**.

    Kernels process the tail like a document. With a smaller bound they would not write its last
    rows.
    """
    return int(np.diff(cu_seqlens).max())


def bounded_max_seqlen(cu_seqlens: Int32Array, max_seqlen: int | None) -> int:
    """Return the length of the longest row, or the larger bound ``max_seqlen``.

    Raises:
        ValueError: ``max_seqlen`` is below the longest row, so kernels would skip the row's end.
    """
    longest = longest_document(cu_seqlens)
    if max_seqlen is None:
        return longest
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen ({max_seqlen}) is below the longest row of the pack ({longest} tokens, including the tail); "
            f"pass at least {longest}, or total_tokens, which is enough for every pack."
        )
    return max_seqlen


def seq_idx_from_cu_seqlens(cu_seqlens: Int32Array) -> Int32Array:
    """Return the document number of every slot, ``(T,)`` int32.

    The document number of the tail is the number of real documents.
    """
    return np.repeat(np.arange(cu_seqlens.size - 1, dtype=np.int32), np.diff(cu_seqlens))


def position_ids_from_cu_seqlens(cu_seqlens: Int32Array) -> Int32Array:
    """Return the position of every slot in its document or in the tail, ``(T,)`` int32, from 0."""
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return np.arange(starts.size, dtype=np.int32) - starts
