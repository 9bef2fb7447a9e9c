"""Documents of an indexed data set: tokenised text that is trained completely."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.data.documents import Documents, TokensAndTargets, stop_of_piece
from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.packed.array_types import Int64Array, IntegerArray

_SAMPLES = 64
"""Number of documents whose tokens are checked when a data set is opened."""
_SAMPLE_TOKENS = 2**14


class IndexedDocuments(Documents):
    """Documents (`documents.Documents`) of ``<prefix>.bin`` and ``<prefix>.idx``.

    Every token except the first of a document is a target. The sequences of a document are joined.
    Documents of fewer than two tokens are left out, because they have no target.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.
        vocab_size: vocabulary size of the tokenizer; every token must be smaller. The tokens of
            some documents are checked now, the others when they are read.
        eod_id: number of the tokenizer's end-of-document token.
        map_tokens: as for `IndexedFile`.
    Raises:
        DataError: the files are damaged, contain images or no document, or their tokens belong to
            another tokenizer.
    """

    def __init__(
        self, prefix: str | Path, *, vocab_size: int, eod_id: int, map_tokens: bool = True
    ) -> None:
        self._file = IndexedFile(prefix, map_tokens=map_tokens)
        self.prefix = self._file.prefix
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        if self._file.modes is not None:
            raise DataError(
                f"{self.prefix} contains multimodal data, but the models read only text; give a text data set."
            )
        places = self._file.document_starts()
        lengths = np.diff(places)
        used = lengths >= 2
        self._starts: Int64Array = places[:-1][used]
        self.lengths: Int64Array = lengths[used]
        self._left_out = int(lengths.size - self.lengths.size)
        if not self.lengths.size:
            raise DataError(
                f"{self.prefix} contains no document of at least two tokens; check the data paths."
            )
        self._ended = self._look()

    @property
    def source_targets(self) -> Int64Array:
        return self.lengths - 1

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self._file.fingerprint()).hexdigest()

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        """Return tokens and target marks of a document or piece; see `documents.Documents`.

        Raises:
            IndexError: there is no such document or piece.
            DataError: a token is not in the tokenizer's vocabulary, or changed since it was
                written.
        """
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} does not exist; {self.prefix} has {len(self)} documents, numbered from 0."
            )
        size = int(self.lengths[index])
        stop = stop_of_piece(f"document {index} of {self.prefix}", size, start, length)
        first = int(self._starts[index])
        tokens = self._file.tokens(first + start, first + stop)
        if not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"{self.prefix}: document {index} contains token numbers from {tokens.min()} to {tokens.max()}, but "
                f"the tokenizer has {self._vocab_size} tokens; give the tokenizer that made the data."
            )
        targets = np.ones(stop - start, np.uint8)
        targets[0] = start > 0
        return tokens.astype(np.int32), targets

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        return np.asarray(lengths, np.int64) - 1

    def sentences(self) -> list[str]:
        left_out = (
            f"; {self._left_out} documents of fewer than two tokens are left out"
            if self._left_out
            else ""
        )
        lines = [
            f"{self.prefix}: {len(self)} documents, {int(self.lengths.sum())} tokens ({self._file.dtype.name}); the "
            f"longest document has {int(self.lengths.max())} tokens{left_out}"
        ]
        if not self._ended:
            lines.append(
                f"  none of the checked documents ends with token {self._eod_id}, the tokenizer's end-of-document "
                "token. A model trained on them does not learn to stop; preprocess the data with "
                f"{flags.APPEND_EOD}"
            )
        return lines

    def _look(self) -> int:
        """Check the tokens of evenly spread documents.

        Returns:
            The number of checked documents that end with the end-of-document token.
        """
        ended = 0
        for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLES).astype(np.int64)).tolist():
            size = int(self.lengths[index])
            piece = min(size, _SAMPLE_TOKENS)
            tokens, _ = self.document(index, size - piece, piece)
            ended += int(tokens[-1]) == self._eod_id
        return ended
