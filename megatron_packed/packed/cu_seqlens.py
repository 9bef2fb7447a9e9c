"""Document lengths <-> cumulative offsets (``cu_seqlens``, padded to a capacity), on the host.

Everything here is a pure function of numpy arrays. A pack has ``total_tokens`` (T) slots and room
for ``capacity`` (N) real documents. Its offsets are always ``N + 2`` long: 0, the document ends,
then T (the end of the tail, a document of its own that holds the slots that no document fills and may be
empty), then T repeated. So every slot belongs to exactly one document, no kernel leaves a row
unwritten, and padding never belongs to a real document.

Example (T = 10, documents of 3 and 5 tokens, so a tail of 2)::

    capacity 2   cu_seqlens [0, 3, 8, 10]
    capacity 4   cu_seqlens [0, 3, 8, 10, 10, 10]
    both         seq_idx    [0 0 0 1 1 1 1 1 2 2]     position_ids [0 1 2 0 1 2 3 4 0 1]

With an ``alignment`` every document has slots for its tokens rounded up to a multiple of it. The
padding trails the document and belongs to it (no token sees what comes later), but is not valid: it
counts as little as the tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

MAX_TOTAL_TOKENS = 2**31 - 1
"""Offsets are int32, as every varlen kernel wants them."""


def as_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """``lengths`` as a one-dimensional int64 array.

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
    """Refuse documents that do not fit into one pack; nothing is ever cut off to make them fit.

    Raises:
        ValueError: a document without tokens, more tokens than slots, or more documents than
            ``capacity``.
    """
    if not 1 <= total_tokens <= MAX_TOTAL_TOKENS:
        raise ValueError(
            f"total_tokens ({total_tokens}) must lie between 1 and {MAX_TOTAL_TOKENS}, since offsets are int32; "
            "choose a smaller seq_length or micro_batch_size."
        )
    if lengths.size and np.min(lengths) < 1:
        at = int(np.argmin(lengths))
        raise ValueError(
            f"document {at} has length {lengths[at]}; every document needs 1 token or more, leave it out."
        )
    num_tokens = int(lengths.sum())
    if num_tokens > total_tokens:
        raise ValueError(
            f"{lengths.size} documents hold {num_tokens} tokens, but the pack has total_tokens = {total_tokens}; "
            "truncate, split or pack them differently."
        )
    if capacity is not None and lengths.size > capacity:
        raise ValueError(
            f"{lengths.size} documents do not fit into a capacity of {capacity}; raise the capacity, "
            "lower max_documents_per_pack, or use exact capacity (None)."
        )


def cu_seqlens_from_lengths(
    lengths: Sequence[int] | NDArray[np.integer], total_tokens: int, capacity: int | None = None
) -> Int32Array:
    """Offsets of the documents, of the tail, and of the unused rows.

    Args:
        lengths: tokens of each document, each at least 1.
        total_tokens: slots of the pack, T.
        capacity: real documents to leave room for, N; None for exactly as many as there are.
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
    """Slots of documents that begin and end at multiples of ``alignment``.

    Raises:
        ValueError: see `as_lengths`, or an alignment below 1.
    Example:
        lengths [1, 4, 5] with alignment 4: [4, 4, 8].
    """
    if alignment < 1:
        raise ValueError(f"alignment ({alignment}) must be 1 or more; 1 pads nothing.")
    return -(-as_lengths(lengths) // alignment) * alignment


def lengths_from_cu_seqlens(cu_seqlens: Int32Array, num_seqs: int | None = None) -> Int32Array:
    """Lengths of the first ``num_seqs`` documents; None for every row, the tail and the empty rows
    included.
    """
    lengths: Int32Array = np.diff(cu_seqlens)
    return lengths if num_seqs is None else lengths[:num_seqs]


def longest_document(cu_seqlens: Int32Array) -> int:
    """Tokens of the longest row, **the tail included**: kernels run over the tail as over any
    document, and a smaller bound would leave its last rows unwritten.
    """
    return int(np.diff(cu_seqlens).max())
