"""Documents of a run for training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_packed.data.documents import Documents

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
            sets = {f"{VALIDATION} ({name})": one for name, one in self.valid_sets.items()}
            both = {**sets, TEST: self.test}
        return {name: documents for name, documents in both.items() if documents is not None}
