"""Interface of tokenised documents for pack plans and loaders, and combinations of sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np

from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.packed.array_types import Int32Array, Int64Array, IntegerArray, UInt8Array

TokensAndTargets = tuple[Int32Array, UInt8Array]
"""Tokens of a document or of a piece, and 1 for each token that is a target, else 0."""


class Documents(Protocol):
    """Interface of tokenised documents, numbered from 0. Several threads may use it."""

    lengths: Int64Array
    """``(D,)`` number of tokens of each document."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def source_lengths(self) -> Int64Array:
        """``(D,)`` number of tokens of each document before it was shortened.

        The same as `lengths` if documents are not shortened.
        """
        return self.lengths

    @property
    def source_targets(self) -> Int64Array:
        """``(D,)`` number of targets of each document before it was shortened."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash of the tokens and target marks; the paths of files do not count."""
        ...

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        """Return tokens and target marks of a document, or of ``length`` tokens from ``start``."""
        ...

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        """Return the number of targets of pieces of documents; all arrays are ``(S,)``.

        The first token of a piece does not count, because no token of the piece predicts it.
        """
        ...

    def sentences(self) -> list[str]:
        """Return a report of the data as lines of text."""
        ...


def stop_of_piece(name: str, size: int, start: int, length: int | None) -> int:
    """Return the end of a piece of a document of ``size`` tokens; None for ``length`` is its rest.

    Raises:
        IndexError: the document ``name`` has no such piece.
    """
    stop = size if length is None else start + length
    if not 0 <= start < stop <= size:
        raise IndexError(f"{name} has {size} tokens; tokens {start} to {stop} do not exist.")
    return stop


class DocumentRange(NamedTuple):
    """Documents ``first`` to ``stop - 1`` of a source."""

    documents: Documents
    first: int
    stop: int


def border_of(share: Fraction, count: int) -> int:
    """Return the number of documents in the given share of ``count`` documents.

    The number is rounded to the nearest integer, and halves to even, as in Megatron.
    """
    return round(share * count)


def drawing_order(count: int) -> Int64Array:
    """Return the random order in which ``count`` documents are divided into training and other
    parts.

    The order depends only on ``count``.
    """
    return KeyedRandom(0, "split", count).permutation(count)


class ShuffledDocuments(Documents):
    """Documents of a source in `drawing_order`; implements `Documents`."""

    def __init__(self, source: Documents) -> None:
        self._source = source
        self._order = drawing_order(len(source))
        self.lengths: Int64Array = source.lengths[self._order]

    @property
    def source_lengths(self) -> Int64Array:
        return self._source.source_lengths[self._order]

    @property
    def source_targets(self) -> Int64Array:
        return self._source.source_targets[self._order]

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"shuffled {self._source.content_hash}".encode()).hexdigest()

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        return self._source.document(int(self._order[index]), start, length)

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        return self._source.count_targets(self._order[documents], starts, lengths)

    def sentences(self) -> list[str]:
        return self._source.sentences()


class JoinedDocuments(Documents):
    """Concatenation of ranges of documents; implements `Documents`.

    Args:
        ranges: at least one range; no range is empty.
        weights: share of the tokens of an epoch that each range contributes; None reads every
            document once per epoch.
    """

    def __init__(
        self, ranges: Sequence[DocumentRange], weights: Sequence[Fraction] | None = None
    ) -> None:
        self._ranges = tuple(ranges)
        self.weights = None if weights is None else tuple(weights)
        sizes = [piece.stop - piece.first for piece in ranges]
        self.firsts: Int64Array = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """Number of the first document of each range. The last entry is the number of documents."""
        self.lengths = self._of_ranges("lengths")

    @property
    def source_lengths(self) -> Int64Array:
        return self._of_ranges("source_lengths")

    @property
    def source_targets(self) -> Int64Array:
        return self._of_ranges("source_targets")

    def _of_ranges(self, name: str) -> Int64Array:
        """Return an array ``(D,)`` of the sources, for the documents of the ranges."""
        return np.concatenate(
            [getattr(part.documents, name)[part.first : part.stop] for part in self._ranges]
        )

    @property
    def content_hash(self) -> str:
        parts = [[piece.documents.content_hash, piece.first, piece.stop] for piece in self._ranges]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} does not exist; there are {len(self)} documents, numbered from 0."
            )
        number = int(np.searchsorted(self.firsts, index, side="right")) - 1
        piece = self._ranges[number]
        return piece.documents.document(
            piece.first + index - int(self.firsts[number]), start, length
        )

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        counts = np.zeros(len(documents), np.int64)
        of_range = self.range_of(documents)
        for number, piece in enumerate(self._ranges):
            indices = np.flatnonzero(of_range == number)
            source_documents = documents[indices] - self.firsts[number] + piece.first
            counts[indices] = piece.documents.count_targets(
                source_documents, starts[indices], lengths[indices]
            )
        return counts

    def range_of(self, documents: IntegerArray) -> Int64Array:
        """Return the number of the range that contains each document."""
        ranges: Int64Array = np.searchsorted(self.firsts, documents, side="right") - 1
        return ranges

    def sentences(self) -> list[str]:
        return [line for piece in self._ranges for line in piece.documents.sentences()]
