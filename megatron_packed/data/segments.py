"""What becomes of documents that are longer than allowed: the pieces of documents that packs are made of.

A `Segments` value lists pieces ``tokens[start : start + length]`` of documents. The packer and the pack plan speak
of pieces by their number; the collate step looks up where each lies. Without over-long documents piece i is document
i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OVERLONG_POLICIES = ("truncate", "split", "drop", "error")
"""truncate: keep the head. split: keep everything, in pieces. drop: leave the document out. error: refuse the data."""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Where the tokens of a data set went: ``tokens_in == kept + truncated + dropped``, to the token."""

    documents_in: int
    documents_truncated: int
    documents_split: int
    documents_dropped: int
    tokens_in: int
    tokens_kept: int
    tokens_truncated: int
    tokens_dropped: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Pieces of documents, none longer than ``max_tokens``, in document order."""

    document: NDArray[np.int64]
    """``(S,)``, the document of each piece."""
    start: NDArray[np.int64]
    """``(S,)``, its first token within the document."""
    length: NDArray[np.int64]
    """``(S,)``, its tokens, at least 1."""
    max_tokens: int
    counts: TokenCounts

    def __len__(self) -> int:
        return len(self.length)

    @classmethod
    def cut(cls, document_lengths: NDArray[np.integer], max_tokens: int, policy: str = "truncate") -> Segments:
        """Apply ``policy`` to documents of more than ``max_tokens`` tokens.

        Args:
            document_lengths: ``(D,)`` tokens of each document, at least 1.
            max_tokens: the longest piece allowed.
            policy: one of `OVERLONG_POLICIES`. 'split' cuts pieces of ``max_tokens`` and one remainder; the first
                token of every later piece is no longer predicted, since its context is elsewhere.
        Raises:
            ValueError: unknown policy, a document without tokens, or an over-long document under 'error'.
        """
        lengths = np.asarray(document_lengths, dtype=np.int64)
        _check(lengths, max_tokens, policy)
        overlong = lengths > max_tokens
        document = np.arange(lengths.size, dtype=np.int64)
        start = np.zeros(lengths.size, dtype=np.int64)
        if policy == "split":
            pieces = -(-lengths // max_tokens)
            document = np.repeat(document, pieces)
            first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
            start = (np.arange(document.size) - first_piece) * max_tokens
            length = np.minimum(lengths[document] - start, max_tokens)
        elif policy == "drop":
            document, start = document[~overlong], start[~overlong]
            length = lengths[~overlong]
        else:
            length = np.minimum(lengths, max_tokens)
        return cls(
            document=document,
            start=start,
            length=length,
            max_tokens=max_tokens,
            counts=_count(lengths, overlong, length, max_tokens, policy),
        )

    def targets(
        self,
        document_lengths: NDArray[np.integer],
        document_targets: NDArray[np.integer],
        target_mask: Callable[[int], NDArray[np.integer]],
    ) -> NDArray[np.int64]:
        """Target tokens of each piece, ``(S,)``: tokens marked as targets, but for the first, which nothing precedes.

        Args:
            document_lengths: ``(D,)``, as given to `cut`.
            document_targets: ``(D,)`` targets of each whole document, counted in the same way.
            target_mask: the mask of a document by number; asked for documents that were cut, and no other.
        """
        targets = np.asarray(document_targets, dtype=np.int64)[self.document]
        for piece in np.flatnonzero(self.length != np.asarray(document_lengths)[self.document]):
            mask = target_mask(int(self.document[piece]))
            first = int(self.start[piece])
            targets[piece] = np.count_nonzero(mask[first + 1 : first + int(self.length[piece])])
        return targets


def _check(lengths: NDArray[np.int64], max_tokens: int, policy: str) -> None:
    if policy not in OVERLONG_POLICIES:
        raise ValueError(f"unknown over-long policy {policy!r}; choose one of {', '.join(OVERLONG_POLICIES)}.")
    if max_tokens < 1:
        raise ValueError(f"the longest document allowed is {max_tokens} tokens; it must be at least 1.")
    if lengths.size and lengths.min() < 1:
        at = int(lengths.argmin())
        raise ValueError(f"document {at} has {lengths[at]} tokens; leave documents without tokens out of the index.")
    if policy == "error" and lengths.size and lengths.max() > max_tokens:
        at = int(lengths.argmax())
        raise ValueError(
            f"{np.count_nonzero(lengths > max_tokens)} documents are longer than {max_tokens} tokens (the longest is "
            f"document {at} with {lengths[at]}); raise the sequence length or choose truncate, split or drop."
        )


def _count(
    lengths: NDArray[np.int64], overlong: NDArray[np.bool_], kept: NDArray[np.int64], max_tokens: int, policy: str
) -> TokenCounts:
    num_overlong = int(np.count_nonzero(overlong))
    in_overlong = int(lengths[overlong].sum())
    return TokenCounts(
        documents_in=lengths.size,
        documents_truncated=num_overlong if policy == "truncate" else 0,
        documents_split=num_overlong if policy == "split" else 0,
        documents_dropped=num_overlong if policy == "drop" else 0,
        tokens_in=int(lengths.sum()),
        tokens_kept=int(kept.sum()),
        tokens_truncated=in_overlong - num_overlong * max_tokens if policy == "truncate" else 0,
        tokens_dropped=in_overlong if policy == "drop" else 0,
    )
