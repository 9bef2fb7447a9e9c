"""Made documents for trials of speed and memory without data files, for ``--mock-data``."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.documents import Documents, TokensAndTargets, stop_of_piece
from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.packed.array_types import Int64Array, IntegerArray

_COUNTS = {"training": 16_384, "validation": 512, "test": 512}
_HALVINGS = 6
"""Documents are at most as long as one of these numbers of halvings of the longest allows."""


class MadeFrom(NamedTuple):
    """Options that decide the made documents of a run."""

    seed: int
    longest: int
    """Maximum tokens of a document."""
    sft: bool
    """True if the first third of each document is a prompt without targets."""


class MadeDocuments(Documents):
    """Documents (`documents.Documents`) of counting tokens, each from a random first token.

    They depend only on the arguments. Most documents are several times shorter than the longest, so
    packs hold several of them.

    Args:
        source: the options.
        name: ``training``, ``validation`` or ``test``, which have different documents.
        vocab_size: all tokens are smaller.
        eod_id: number of the last token of each document.
    Example:
        A document of 5 tokens that begins with 7, in a vocabulary of 9, ends with ``eod_id`` 0:
        ``[7, 8, 0, 1, 0]``.
    """

    def __init__(self, source: MadeFrom, name: str, vocab_size: int, eod_id: int) -> None:
        self.name = name
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._key = (*source, name, vocab_size, eod_id)
        count = (_COUNTS[name],)
        draw = KeyedRandom(source.seed, "made documents", name)
        most = np.maximum(source.longest >> draw.below(_HALVINGS, count), 2)
        least = np.maximum(most // 2, 2)
        self.lengths: Int64Array = least + draw.below(most - least + 1, count)
        self._first = draw.below(vocab_size, count)
        self._prompts = np.maximum(self.lengths // 3, 1) if source.sft else np.ones(count, np.int64)

    @property
    def source_targets(self) -> Int64Array:
        return self.lengths - self._prompts

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(repr(self._key).encode()).hexdigest()

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        """Return tokens and target marks of a document or piece; see `documents.Documents`.

        Raises:
            IndexError: there is no such document or piece.
        """
        size = int(self.lengths[index])
        stop = stop_of_piece(f"made document {index}", size, start, length)
        places = np.arange(start, stop)
        tokens = (self._first[index] + places) % self._vocab_size
        tokens[places == size - 1] = self._eod_id
        return tokens.astype(np.int32), (places >= self._prompts[index]).astype(np.uint8)

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        starts = np.asarray(starts, np.int64)
        first = np.maximum(self._prompts[documents], starts + 1)
        targets: Int64Array = np.maximum(starts + lengths - first, 0)
        return targets

    def sentences(self) -> list[str]:
        return [
            f"made {self.name} data ({flags.MOCK_DATA}): {len(self):,} documents, "
            f"{int(self.lengths.sum()):,} tokens that count up; the longest document has "
            f"{int(self.lengths.max()):,} tokens"
        ]
