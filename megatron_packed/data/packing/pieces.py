"""Cutting of documents into pieces, none longer than the limit, with counts of every token and target.

A `Pieces` value lists pieces ``tokens[start : start + length]`` of documents. Packs are made of
pieces. The packer and the pack plan refer to a piece by its number; the collate step looks up its
document and its place. Without over-long documents, piece i is document i.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.documents import Documents
from megatron_packed.data.errors import DataError
from megatron_packed.packed.array_types import BoolArray, Int64Array, IntegerArray

OVERLONG_POLICIES = ("truncate_prompt", "truncate", "split", "drop", "error")
"""Policies for documents that are longer than the limit:

- ``truncate_prompt``: keep the last answer. Tokenisation shortened the documents already
  (`shorten_conversations`). If only lengths are known, this policy cuts like ``truncate``.
- ``truncate``: keep the head of the document.
- ``split``: keep everything, in several pieces.
- ``drop``: leave the document out.
- ``error``: raise an error.
"""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Counts of the tokens of a data set.

    ``tokens_in == tokens_kept + tokens_truncated + tokens_dropped + tokens_without_targets``.
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
    """Tokens before tokenisation or packing cut any document."""
    tokens_kept: int
    tokens_truncated: int
    tokens_dropped: int
    tokens_without_targets: int = 0
    """Tokens of the pieces that were left out because they hold no target."""

    @property
    def all_kept(self) -> bool:
        """True if every token is kept, in its whole document."""
        return self.tokens_kept == self.tokens_in and not self.documents_split

    def sentence(self) -> str:
        """Return the counts as one sentence for a console."""
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
    """Counts of the targets of a data set.

    ``targets_in == targets_kept + targets_truncated + targets_split + targets_dropped``, exactly.
    """

    documents_in: int
    targets_in: int
    """Targets before tokenisation or packing cut any document."""
    targets_kept: int
    targets_truncated: int
    targets_split: int
    """Targets lost by splitting. They are the first tokens of later pieces of documents, because a
    piece has no token that predicts its first token.
    """
    targets_dropped: int
    documents_without_targets: int
    """Documents of which no target is kept."""

    @property
    def all_kept(self) -> bool:
        """True if every target is kept."""
        return self.targets_kept == self.targets_in

    def sentence(self) -> str:
        """Return the counts as one sentence for a console."""
        return (
            f"{self.targets_in:,} targets of {self.documents_in:,} documents in = {self.targets_kept:,} kept "
            f"+ {self.targets_truncated:,} lost by truncation + {self.targets_split:,} by splitting "
            f"+ {self.targets_dropped:,} by dropping; {self.documents_without_targets:,} documents keep no target."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of documents, none longer than ``max_tokens``, in document order."""

    document: Int64Array
    """``(S,)`` document number of each piece."""
    start: Int64Array
    """``(S,)`` first token of each piece within its document."""
    length: Int64Array
    """``(S,)`` number of tokens of each piece, at least 1."""
    max_tokens: int
    counts: TokenCounts
    targets: TargetCounts | None = None
    """Counts of targets; None if only the lengths of documents are known."""

    def __len__(self) -> int:
        return len(self.length)

    @classmethod
    def cut(
        cls,
        document_lengths: IntegerArray,
        max_tokens: int,
        policy: str = "truncate",
        source_lengths: IntegerArray | None = None,
    ) -> Pieces:
        """Apply ``policy`` to documents of more than ``max_tokens`` tokens.

        Args:
            document_lengths: ``(D,)`` tokens of each document, at least 1.
            max_tokens: the longest piece allowed.
            policy: one of `OVERLONG_POLICIES`. 'split' cuts a document into pieces of
                ``max_tokens`` and one remainder. The first token of every later piece is not
                predicted, because the piece has no token before it.
            source_lengths: ``(D,)`` tokens of each document before tokenisation shortened it; None
                if no document was shortened.
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

    @property
    def keeps_everything(self) -> bool:
        """True if no token and no target was cut or left out."""
        targets_kept = self.targets is None or self.targets.all_kept
        return self.counts.tokens_kept == self.counts.tokens_in and targets_kept

    def sentences(self) -> list[str]:
        """Return the counts of tokens and targets as sentences for a console; none if all are kept."""
        counts: list[TokenCounts | TargetCounts] = [self.counts]
        if self.targets is not None:
            counts.append(self.targets)
        return [part.sentence() for part in counts if not part.all_kept]

    def as_dict(self) -> dict[str, int]:
        """Return the counts of tokens and targets as plain values for a JSON file."""
        return {**asdict(self.counts), **({} if self.targets is None else asdict(self.targets))}

    def with_targets(self, targets: IntegerArray) -> Pieces:
        """Leave out the pieces without a target, and count them.

        Args:
            targets: ``(S,)`` targets of each piece.
        """
        has_target = np.asarray(targets) > 0
        if has_target.all():
            return self
        counts = replace(
            self.counts,
            tokens_kept=int(self.length[has_target].sum()),
            tokens_without_targets=int(self.length[~has_target].sum()),
            pieces_without_targets=int(np.count_nonzero(~has_target)),
            documents_of_pieces_without_targets=np.unique(self.document[~has_target]).size,
        )
        start, length = self.start[has_target], self.length[has_target]
        return replace(
            self, document=self.document[has_target], start=start, length=length, counts=counts
        )


def _check(lengths: Int64Array, max_tokens: int, policy: str) -> None:
    if policy not in OVERLONG_POLICIES:
        raise ValueError(
            f"unknown over-long policy {policy!r}; choose one of {', '.join(OVERLONG_POLICIES)}."
        )
    if max_tokens < 1:
        raise ValueError(f"the limit for documents is {max_tokens} tokens; it must be at least 1.")
    if lengths.size and lengths.min() < 1:
        at = int(lengths.argmin())
        raise ValueError(
            f"document {at} has {lengths[at]} tokens; every document needs at least 1, remove it from the index."
        )
    if policy == "error" and lengths.size and lengths.max() > max_tokens:
        at = int(lengths.argmax())
        raise ValueError(
            f"{np.count_nonzero(lengths > max_tokens)} documents are longer than {max_tokens} tokens (the longest is "
            f"document {at} with {lengths[at]}); raise {flags.MAX_DOCUMENT_LENGTH} "
            f"or choose another {flags.OVERLONG_POLICY}."
        )


def _count(
    sources: Int64Array,
    lengths: Int64Array,
    overlong: BoolArray,
    kept_lengths: Int64Array,
    policy: str,
) -> TokenCounts:
    dropped = overlong & (policy == "drop")
    tokens_in, tokens_kept = int(sources.sum()), int(kept_lengths.sum())
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


def cut_documents(
    documents: Documents, max_tokens: int, policy: str, *, only_with_targets: bool
) -> tuple[Pieces, Int64Array]:
    """Cut documents that are longer than ``max_tokens``, and count the lost tokens and targets.

    Args:
        policy: one of `OVERLONG_POLICIES`.
        only_with_targets: True leaves out pieces without a target.
    Returns:
        The pieces, and the number of targets of each piece, ``(S,)``.
    Raises:
        DataError: see `Pieces.cut`.
    """
    try:
        cut = Pieces.cut(documents.lengths, max_tokens, policy, documents.source_lengths)
    except ValueError as error:  # an over-long document under --overlong-policy error
        raise DataError(str(error)) from None
    targets = documents.count_targets(cut.document, cut.start, cut.length)
    every = np.arange(len(documents.lengths))
    document_targets = documents.count_targets(every, np.zeros_like(every), documents.lengths)
    kept_targets = np.zeros(every.size, np.int64)
    np.add.at(kept_targets, cut.document, targets)
    pieces = replace(
        cut, targets=_account(documents.source_targets, document_targets, kept_targets, policy)
    )
    if not only_with_targets:
        return pieces, targets
    return pieces.with_targets(targets), targets[targets > 0]


def _account(
    sources: Int64Array,
    document_targets: Int64Array,
    kept_targets: Int64Array,
    policy: str,
) -> TargetCounts:
    """Count the targets that each policy lost.

    Targets lost when tokenisation shortened a document count as truncated. Targets lost when the
    document was cut into pieces count under ``policy``.

    Args:
        sources: ``(D,)`` targets of each document before it was shortened.
        document_targets: ``(D,)`` targets of each tokenised document.
        kept_targets: ``(D,)`` targets of the pieces of each document.
    """
    cut = int((document_targets - kept_targets).sum())
    split, dropped = (cut if policy == name else 0 for name in ("split", "drop"))
    counts = TargetCounts(
        documents_in=sources.size,
        targets_in=int(sources.sum()),
        targets_kept=int(kept_targets.sum()),
        targets_truncated=int((sources - document_targets).sum()) + cut - split - dropped,
        targets_split=split,
        targets_dropped=dropped,
        documents_without_targets=int(np.count_nonzero(kept_targets == 0)),
    )
    accounted = (
        counts.targets_kept
        + counts.targets_truncated
        + counts.targets_split
        + counts.targets_dropped
    )
    assert counts.targets_in == accounted, counts
    return counts


def targets_of_depths(
    documents: Documents, pieces: Pieces, targets: IntegerArray, depths: int
) -> list[Int64Array]:
    """Return the targets of each piece, ``(S,)``, at each depth of multi-token prediction.

    At depth k these are the targets of the piece except those among its first k + 1 tokens, as no
    token of the piece is k + 1 tokens before them. Only these tokens are read.

    Args:
        targets: ``(S,)`` targets of each piece.
        depths: number of depths.
    """
    depth_targets = []
    for depth in range(1, depths + 1):
        first = np.minimum(pieces.length, depth + 1)
        skipped = documents.count_targets(pieces.document, pieces.start, first)
        depth_targets.append(np.asarray(targets) - skipped)
    return depth_targets
