"""Documents of several sources as one: what a pack plan and a loader need of them, wherever the
tokens lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.keyed_random import KeyedRandom


class Documents(Protocol):
    """Tokenised documents, numbered from 0. Usable from several threads."""

    lengths: NDArray[np.int64]
    """``(D,)`` tokens of each document."""

    def __len__(self) -> int: ...

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """``(D,)`` tokens of each document before it was shortened; `lengths` where nothing
        shortens documents.
        """
        ...

    @property
    def source_targets(self) -> NDArray[np.int64]:
        """``(D,)`` targets of each document before it was shortened."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash of the tokens and target marks, wherever they lie."""
        ...

    def document(
        self, index: int, start: int = 0, length: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens and target marks of a document or of ``length`` of its tokens from ``start``."""
        ...

    def count_targets(
        self,
        documents: NDArray[np.integer],
        starts: NDArray[np.integer],
        lengths: NDArray[np.integer],
    ) -> NDArray[np.int64]:
        """Targets of pieces of documents, all arrays ``(S,)``: marked tokens, but for the first of
        the piece.
        """
        ...

    def sentences(self) -> list[str]:
        """Return a report of the data that was read, for people."""
        ...


class DocumentRange(NamedTuple):
    """Documents ``first`` to ``stop`` of a source."""

    documents: Documents
    first: int
    stop: int


def border_of(share: Fraction, count: int) -> int:
    """Return the end of a share of ``count`` documents that begins with the first: the nearest one,
    half to even, as Megatron rounds.
    """
    return round(share * count)


def drawing_order(count: int) -> NDArray[np.int64]:
    """Return the order in which ``count`` documents are drawn into parts: always the same of as
    many.
    """
    return KeyedRandom(0, "split", count).permutation(count)


class ShuffledDocuments:
    """The documents of a source in `drawing_order`. A `Documents`."""

    def __init__(self, source: Documents) -> None:
        self._source = source
        self._order = drawing_order(len(source))
        self.lengths: NDArray[np.int64] = source.lengths[self._order]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        return self._source.source_lengths[self._order]

    @property
    def source_targets(self) -> NDArray[np.int64]:
        return self._source.source_targets[self._order]

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(f"shuffled {self._source.content_hash}".encode()).hexdigest()

    def document(
        self, index: int, start: int = 0, length: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        return self._source.document(int(self._order[index]), start, length)

    def count_targets(
        self,
        documents: NDArray[np.integer],
        starts: NDArray[np.integer],
        lengths: NDArray[np.integer],
    ) -> NDArray[np.int64]:
        return self._source.count_targets(self._order[documents], starts, lengths)

    def sentences(self) -> list[str]:
        return self._source.sentences()


class JoinedDocuments:
    """Ranges of documents one after the other. A `Documents`.

    Args:
        ranges: not empty; none of them is.
        weights: share of the tokens of an epoch that each range contributes; None reads everything
            once.
    """

    def __init__(
        self, ranges: Sequence[DocumentRange], weights: Sequence[Fraction] | None = None
    ) -> None:
        self._ranges = tuple(ranges)
        self.weights = None if weights is None else tuple(weights)
        sizes = [piece.stop - piece.first for piece in ranges]
        self.firsts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """Number of the first document of each range, and of all documents."""
        self.lengths: NDArray[np.int64] = np.concatenate(
            [p.documents.lengths[p.first : p.stop] for p in ranges]
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([p.documents.source_lengths[p.first : p.stop] for p in self._ranges])

    @property
    def source_targets(self) -> NDArray[np.int64]:
        return np.concatenate([p.documents.source_targets[p.first : p.stop] for p in self._ranges])

    @property
    def content_hash(self) -> str:
        parts = [[piece.documents.content_hash, piece.first, piece.stop] for piece in self._ranges]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def document(
        self, index: int, start: int = 0, length: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} does not exist; there are {len(self)}, from 0.")
        number = int(np.searchsorted(self.firsts, index, side="right")) - 1
        piece = self._ranges[number]
        return piece.documents.document(
            piece.first + index - int(self.firsts[number]), start, length
        )

    def count_targets(
        self,
        documents: NDArray[np.integer],
        starts: NDArray[np.integer],
        lengths: NDArray[np.integer],
    ) -> NDArray[np.int64]:
        counts = np.zeros(len(documents), np.int64)
        of_range = self.range_of(documents)
        for number, piece in enumerate(self._ranges):
            here = np.flatnonzero(of_range == number)
            own = documents[here] - self.firsts[number] + piece.first
            counts[here] = piece.documents.count_targets(own, starts[here], lengths[here])
        return counts

    def range_of(self, documents: NDArray[np.integer]) -> NDArray[np.int64]:
        """The number of the range that each document lies in."""
        found: NDArray[np.int64] = np.searchsorted(self.firsts, documents, side="right") - 1
        return found

    def sentences(self) -> list[str]:
        return [line for piece in self._ranges for line in piece.documents.sentences()]
