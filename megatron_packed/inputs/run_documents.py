"""Documents of a run for training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megatron_packed.data.documents import Documents
from megatron_packed.data.made_documents import MadeDocuments, MadeFrom
from megatron_packed.data.tokenizers.base import Tokenizer

VALIDATION, TEST = "validation", "test"
"""Names of the data in messages."""


class RunDocuments(NamedTuple):
    """Documents that a run trains, validates and tests on."""

    train: Documents
    valid: Documents | None
    test: Documents | None
    sentences: list[str]
    """Sentences about the files that were read and how their documents were divided."""
    valid_sets: Mapping[str, Documents] = MappingProxyType({})
    """Name of a set -> its part of ``valid``, with ``--multiple-validation-sets``."""

    @property
    def evaluated(self) -> dict[str, Documents]:
        """``validation`` and ``test`` -> documents, for the data that the run has.

        With several validation sets, the keys ``validation (NAME)`` replace ``validation``.
        """
        both = {VALIDATION: self.valid, TEST: self.test}
        if self.valid_sets:
            sets = {
                f"{VALIDATION} ({name})": documents for name, documents in self.valid_sets.items()
            }
            both = {**sets, TEST: self.test}
        return {name: documents for name, documents in both.items() if documents is not None}


def made_documents(
    source: MadeFrom, tokenizer: Tokenizer, *, validates: bool, tests: bool, sets: Sequence[str]
) -> RunDocuments:
    """Return made documents; a validation set is all of the validation data."""
    train, valid, test = (
        MadeDocuments(source, name, tokenizer.vocab_size, tokenizer.eod_id) if wanted else None
        for name, wanted in (("training", True), (VALIDATION, validates), (TEST, tests))
    )
    assert train is not None
    sentences = [
        line
        for documents in (train, valid, test)
        if documents is not None
        for line in documents.sentences()
    ]
    return RunDocuments(
        train, valid, test, sentences, {} if valid is None else dict.fromkeys(sets, valid)
    )
