"""Checks of the arguments of `PackedDataset`."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral, Number
from typing import Any, NamedTuple

from megatron_packed.config.data_files import DATA_FILE_NAMES
from megatron_packed.config.errors import printable
from megatron_packed.config.hub_paths import is_hub_name, is_hub_path
from megatron_packed.config.sections.packing import default_overlong_policy
from megatron_packed.data.errors import DataError
from megatron_packed.data.packing.packer import check_integers
from megatron_packed.data.sources.source_files import is_indexed
from megatron_packed.files.regular_files import StrPath

Data = StrPath | Iterable[Any]
"""Type of the first argument of `PackedDataset`: paths, or records."""
TEXT_CURE = (
    "A string is a path: give texts as {'text': ...}, or as a list of strings with texts=True."
)
"""Sentence of errors about strings."""
_CALLS_OF_TABLES = ("to_pylist()", "to_dicts()", "to_dict(orient='records')")
"""Calls that return the rows of a table of pyarrow, polars and pandas."""


def check_pack_sizes(
    tokens_per_pack: int, max_documents: int | None, max_document_length: int | None
) -> None:
    """Check the sizes of packs and documents.

    Raises:
        ValueError: with the option, its value and the cure.
    """
    optional = {"max_documents": max_documents, "max_document_length": max_document_length}
    limits = {name: value for name, value in optional.items() if value is not None}
    check_integers(tokens_per_pack=tokens_per_pack, **limits)
    if tokens_per_pack < 2:
        raise ValueError(f"tokens_per_pack is {tokens_per_pack}; it must be at least 2.")
    if max_document_length is not None and not 2 <= max_document_length <= tokens_per_pack:
        raise ValueError(
            f"max_document_length ({max_document_length}) must be at least 2 and at most tokens_per_pack "
            f"({tokens_per_pack})."
        )
    if max_documents is not None and max_documents > tokens_per_pack:
        raise ValueError(
            f"max_documents ({max_documents}) is more than tokens_per_pack ({tokens_per_pack}), but every document "
            "has at least one token; give a smaller max_documents."
        )


def paths_or_records(data: Data, texts: bool) -> list[StrPath] | Iterator[Any]:
    """Return paths as a list, and records as an iterator.

    The first value decides: strings and ``os.PathLike`` values are paths. With ``texts``, strings are
    records.

    Raises:
        ValueError: ``data`` has a wrong type or no value, or has paths and other values.
        DataError: a string names no file.
    """
    if _is_path(data, texts=False) and not texts:
        return _checked_paths([data])
    _check_type(data)
    assert isinstance(data, Iterable)
    values = iter(data)
    try:
        first = next(values)
    except StopIteration:
        again = "; a generator can be read only once, so make a new one" * (values is data)
        raise ValueError(
            f"data is an empty {type(data).__name__}{again}; give a path or a list of at least one path, or records."
        ) from None
    if _is_path(first, texts):
        return _checked_paths([first, *values])
    if isinstance(first, Integral):
        raise ValueError(
            f"data is one {type(data).__name__} of numbers; give a path or a list of at least one path. Or, for token "
            "ids, give one list for each document: [[5, 3, 8], [2, 7]]."
        )
    return chain([first], values)


def _check_type(data: Any) -> None:
    """Refuse values that are no collection, and collections that iterate over names."""
    kind = type(data).__name__
    if isinstance(data, Mapping):
        names = ", ".join(printable(str(name), 40) for name in list(data)[:5])
        cure = "a list of dicts, one for each record: [{...}, {...}]"
        if any(hasattr(value, "column_names") for value in data.values()):
            cure = f"one of its data sets, for example data[{next(iter(data))!r}]"
        raise ValueError(f"data is one {kind} with the keys {names}; give {cure}.")
    for call in _CALLS_OF_TABLES:
        if hasattr(data, "columns") and hasattr(data, call.partition("(")[0]):
            raise ValueError(f"data is a {kind}; give its rows as dicts: data.{call}.")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | os.PathLike):
        raise ValueError(
            f"data is {describe_value(data)}; give a path or a list of at least one path, or records: a list of dicts, "
            "of lists of token ids, or with texts=True of strings."
        )


def _checked_paths(values: Sequence[Any]) -> list[StrPath]:
    """Check that all values are paths, and that every string names something."""
    for number, value in enumerate(values, 1):
        place = f"value {number} of data, " * (len(values) > 1)
        if not _is_path(value, texts=False):
            raise ValueError(
                f"{place}{describe_value(value)}, is no path, but the first value is one; give either paths or "
                f"records. {TEXT_CURE}"
            )
        if isinstance(value, str) and not is_hub_name(value) and _names_nothing(value):
            raise DataError(
                f"{place}{describe_value(value)}, does not exist; give a {DATA_FILE_NAMES}, a directory or a pattern. "
                f"{TEXT_CURE}"
            )
    return list(values)


def _is_path(value: object, texts: bool) -> bool:
    is_path_string = isinstance(value, str) and value != "" and not texts
    return isinstance(value, os.PathLike) or is_path_string


def _names_nothing(path: str) -> bool:
    """Return True if a string is no file, directory, indexed data set, pattern or path of the Hub."""
    try:
        if is_hub_path(path) or os.path.lexists(path) or is_indexed(path):
            return False
    except OSError:  # a text may be longer than the name of a file can be
        return True
    return next(glob.iglob(path, recursive=True), None) is None


def describe_value(value: object) -> str:
    """Return a short text for a value in a message; a collection gives only its type."""
    if value is None or isinstance(value, str | os.PathLike | Number):
        return printable(repr(value), 80)
    return f"of type {type(value).__name__}"


def check_run(seed: int, rank: int, world_size: int) -> None:
    """Check the seed, and that ``rank`` is one of the ranks.

    Raises:
        ValueError: with the values and the cure.
    """
    check_integers(seed=seed, rank=rank, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank ({rank}) is not one of world_size ({world_size}) ranks; give a rank from 0 to world_size - 1."
        )


class CutRules(NamedTuple):
    """Rules for documents that are too long for a pack."""

    longest: int
    """Most tokens of a document, or of a piece of a document."""
    policy: str
    sft: bool

    @classmethod
    def from_options(
        cls, tokens_per_pack: int, max_document_length: int | None, policy: str | None, sft: bool
    ) -> CutRules:
        """Return the rules of the options of a `PackedDataset`.

        Raises:
            ValueError: the policy needs answers, and the data has none.
        """
        if policy == "truncate_prompt" and not sft:
            raise ValueError(
                "overlong_policy truncate_prompt keeps the last answer of a conversation; add sft=True, or choose "
                "another policy."
            )
        longest = tokens_per_pack if max_document_length is None else max_document_length
        return cls(longest, default_overlong_policy(sft) if policy is None else policy, sft)

    @property
    def shorten_to(self) -> int | None:
        """Most tokens to which a conversation is shortened; None shortens nothing."""
        return self.longest if self.policy == "truncate_prompt" else None
