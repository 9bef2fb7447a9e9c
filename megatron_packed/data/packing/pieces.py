"""Pieces of documents that packs are made of, none longer than allowed, with counts of what is
lost.

A `Pieces` value lists pieces ``tokens[start : start + length]`` of documents. The packer and the
pack plan speak of pieces by their number; the collate step looks up where each lies. Without
over-long documents piece i is document i.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags

OVERLONG_POLICIES = ("truncate_prompt", "truncate", "split", "drop", "error")
"""truncate: keep the head. split: keep everything, in pieces. drop: leave the document out. error:
refuse the data. truncate_prompt: keep the last answer; documents were shortened as they were
tokenised (`shorten_conversations`), so none is cut here, but for lengths without documents.
"""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Account of the tokens of a data set: ``tokens_in == kept + truncated + dropped +
    without_targets``.
    """

    documents_in: int
    documents_truncated: int
    documents_split: int
    documents_dropped: int
    documents_of_pieces_without_targets: int = 0
    """Documents of the pieces that were left out because they hold no target."""
    pieces_without_targets: int = 0
    """Pieces that were left out because they hold no target."""
    tokens_in: int
    """Before anything was cut off, at tokenisation or here."""
    tokens_kept: int
    tokens_truncated: int
    tokens_dropped: int
    tokens_without_targets: int = 0
    """Tokens of the pieces that were left out because they hold no target."""

    def sentence(self) -> str:
        """Return the sum in words."""
        without = ""
        if self.pieces_without_targets:
            without = (
                f" + {self.tokens_without_targets:,} of pieces without a target ({self.pieces_without_targets:,} "
                f"pieces of {self.documents_of_pieces_without_targets:,} documents)"
            )
        return (
            f"{self.tokens_in:,} tokens of {self.documents_in:,} documents in = {self.tokens_kept:,} kept "
            f"+ {self.tokens_truncated:,} truncated ({self.documents_truncated:,} documents) "
            f"+ {self.tokens_dropped:,} dropped ({self.documents_dropped:,} documents){without}; "
            f"{self.documents_split:,} documents split."
        )


@dataclass(frozen=True, kw_only=True)
class TargetCounts:
    """Account of the targets of a data set: ``targets_in == kept + truncated + split + dropped``,
    to the target.
    """

    documents_in: int
    targets_in: int
    """Before anything was cut off, at tokenisation or here."""
    targets_kept: int
    targets_truncated: int
    targets_split: int
    """First tokens of later pieces of a document, which nothing precedes in their pack."""
    targets_dropped: int
    documents_without_targets: int
    """Documents of which no target is kept."""

    def sentence(self) -> str:
        """Return the sum in words."""
        return (
            f"{self.targets_in:,} targets of {self.documents_in:,} documents in = {self.targets_kept:,} kept "
            f"+ {self.targets_truncated:,} lost by truncation + {self.targets_split:,} by splitting "
            f"+ {self.targets_dropped:,} by dropping; {self.documents_without_targets:,} documents keep none."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of documents, none longer than ``max_tokens``, in document order."""

    document: NDArray[np.int64]
    """``(S,)``, the document of each piece."""
    start: NDArray[np.int64]
    """``(S,)``, its first token within the document."""
    length: NDArray[np.int64]
    """``(S,)``, its tokens, at least 1."""
    max_tokens: int
    counts: TokenCounts
    targets: TargetCounts | None = None
    """None where lengths alone are known."""

    def __len__(self) -> int:
        return len(self.length)

    @classmethod
    def cut(
        cls,
        document_lengths: NDArray[np.integer],
        max_tokens: int,
        policy: str = "truncate",
        source_lengths: NDArray[np.integer] | None = None,
    ) -> Pieces:
        """Apply ``policy`` to documents of more than ``max_tokens`` tokens.

        Args:
            document_lengths: ``(D,)`` tokens of each document, at least 1.
            max_tokens: the longest piece allowed.
            policy: one of `OVERLONG_POLICIES`. 'split' cuts pieces of ``max_tokens`` and one
                remainder; the first token of every later piece is no longer predicted, since its
                context is elsewhere.
            source_lengths: ``(D,)`` tokens of each document before it was shortened; None if none
            was.
        Raises:
            ValueError: unknown policy, a document without tokens, or an over-long document under
                'error'.
        """
        lengths = np.asarray(document_lengths, dtype=np.int64)
        policy = "truncate" if policy == "truncate_prompt" else policy
        sources = lengths if source_lengths is None else np.asarray(source_lengths, dtype=np.int64)
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
            counts=_count(sources, lengths, overlong, length, policy),
        )

    def sentences(self) -> list[str]:
        """Return where every token and every target went, for people."""
        return [
            self.counts.sentence(),
            *([] if self.targets is None else [self.targets.sentence()]),
        ]

    def as_dict(self) -> dict[str, int]:
        """Return the same as plain values for a JSON file."""
        return {**asdict(self.counts), **({} if self.targets is None else asdict(self.targets))}

    def with_targets(self, targets: NDArray[np.integer]) -> Pieces:
        """Leave out the pieces without a target, and count them.

        Args:
            targets: ``(S,)`` targets of each piece.
        """
        kept = np.asarray(targets) > 0
        if kept.all():
            return self
        counts = replace(
            self.counts,
            tokens_kept=int(self.length[kept].sum()),
            tokens_without_targets=int(self.length[~kept].sum()),
            pieces_without_targets=int(np.count_nonzero(~kept)),
            documents_of_pieces_without_targets=np.unique(self.document[~kept]).size,
        )
        start, length = self.start[kept], self.length[kept]
        return replace(
            self, document=self.document[kept], start=start, length=length, counts=counts
        )


def _check(lengths: NDArray[np.int64], max_tokens: int, policy: str) -> None:
    if policy not in OVERLONG_POLICIES:
        raise ValueError(
            f"unknown over-long policy {policy!r}; choose one of {', '.join(OVERLONG_POLICIES)}."
        )
    if max_tokens < 1:
        raise ValueError(
            f"the longest document allowed is {max_tokens} tokens; it must be at least 1."
        )
    if lengths.size and lengths.min() < 1:
        at = int(lengths.argmin())
        raise ValueError(
            f"document {at} has {lengths[at]} tokens; leave documents without tokens out of the index."
        )
    if policy == "error" and lengths.size and lengths.max() > max_tokens:
        at = int(lengths.argmax())
        raise ValueError(
            f"{np.count_nonzero(lengths > max_tokens)} documents are longer than {max_tokens} tokens (the longest is "
            f"document {at} with {lengths[at]}); raise {flags.MAX_DOCUMENT_LENGTH} "
            f"or choose another {flags.OVERLONG_POLICY}."
        )


def _count(
    sources: NDArray[np.int64],
    lengths: NDArray[np.int64],
    overlong: NDArray[np.bool_],
    kept: NDArray[np.int64],
    policy: str,
) -> TokenCounts:
    dropped = overlong & (policy == "drop")
    tokens_in, tokens_kept = int(sources.sum()), int(kept.sum())
    tokens_dropped = int(lengths[dropped].sum())
    truncated = (sources > lengths) | (overlong & (policy == "truncate"))
    return TokenCounts(
        documents_in=lengths.size,
        documents_truncated=int(np.count_nonzero(truncated)),
        documents_split=int(np.count_nonzero(overlong)) if policy == "split" else 0,
        documents_dropped=int(np.count_nonzero(dropped)),
        tokens_in=tokens_in,
        tokens_kept=tokens_kept,
        tokens_truncated=tokens_in - tokens_kept - tokens_dropped,
        tokens_dropped=tokens_dropped,
    )
