"""Names of data files that a directory stands for, and the libraries that some of them need."""

from __future__ import annotations

import sys

from megatron_packed.config.optional_packages import is_installed

TABLE_SUFFIXES = (".parquet", ".arrow")
ZSTD_SUFFIX = ".zst"
COMPRESSED_SUFFIXES = (".gz", ZSTD_SUFFIX, ".bz2", ".xz")
_TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson")
DATA_SUFFIXES = (
    *_TEXT_SUFFIXES,
    *(text + packed for text in _TEXT_SUFFIXES for packed in COMPRESSED_SUFFIXES),
    ".parquet",
)
"""Ends of the names of files that a directory stands for."""
PLAIN_SUFFIXES = (".txt", *(f".txt{packed}" for packed in COMPRESSED_SUFFIXES))
"""Ends of the names of files that are one text each. A directory stands for them if it has no other
data files, because data often comes with a licence or a description as text.
"""
DATA_FILE_NAMES = ".jsonl, .json, .parquet or .txt file"
"""Kinds of files that a directory stands for, for messages. Text may also be compressed."""


def is_data_name(name: str) -> bool:
    """Return whether the name of a file in a directory is that of a data file."""
    return name.endswith(DATA_SUFFIXES) or is_plain_name(name)


def is_plain_name(name: str) -> bool:
    """Return whether the name of a file is that of a plain text."""
    return name.endswith(PLAIN_SUFFIXES)


def may_be_description(name: str) -> bool:
    """Return whether a file may be a ``.json`` file that describes a data set or a model.

    Downloads often have such files, for example ``dataset_infos.json``, next to their data.
    """
    return name.endswith((".json", *(f".json{packed}" for packed in COMPRESSED_SUFFIXES)))


def reads_zstd() -> bool:
    """Return whether a library that reads zstd is installed: Python 3.14, or pyarrow."""
    return sys.version_info >= (3, 14) or is_installed("pyarrow")
