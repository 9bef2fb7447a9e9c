"""Check of the library for tables (Parquet, Arrow), and the files of a saved Hugging Face data set.

This module works without pyarrow.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_packed.config.optional_packages import old_package
from megatron_packed.data.errors import DataError, printable
from megatron_packed.files.regular_files import open_regular

_MOST_BYTES = 64 << 20
"""Bytes of a description that are read; that of 100,000 files has 6 MB."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def check_pyarrow(file: Path) -> None:
    """Check that pyarrow is installed, which is needed to read the table ``file``.

    Raises:
        DataError: pyarrow is not installed, or a file could run code in its version.
    """
    if find_spec("pyarrow") is None:
        raise DataError(
            f"{file} needs pyarrow, which is not installed; run `pip install 'megatron-packed[data]'`, or give the "
            "data as JSONL."
        )
    if (old := old_package("pyarrow")) is not None:
        raise DataError(f"{file} would be read by {old[0]}; run `{old[1]}`.")


def is_saved_dataset(directory: Path) -> bool:
    """Return whether ``save_to_disk`` of Hugging Face's datasets wrote the directory.

    A directory of splits counts too.
    """
    return (directory / _STATE).is_file() or (directory / _SPLITS).is_file()


def saved_files(directory: Path) -> list[Path]:
    """List the Arrow files of a directory that ``save_to_disk`` wrote, in the order of their rows.

    Raises:
        DataError: the directory has several splits, its description is damaged, or the data set
            stores the order of its rows in separate files.
    """
    if not (directory / _STATE).is_file():
        splits = _description(directory / _SPLITS, "splits", str)
        if len(splits) != 1:
            raise DataError(
                f"{directory} contains the splits {printable(', '.join(splits)) or 'none'}; give the path of one "
                f"split, for example {os.path.join(directory, printable(splits[0], 40) if splits else 'train')}."
            )
        directory = directory / splits[0]
    path = directory / _STATE
    names = [entry.get("filename") for entry in _description(path, "_data_files", dict)]
    if not names or not all(
        isinstance(name, str) and name == os.path.basename(name) and "\0" not in name
        for name in names
    ):
        raise DataError(f"{path} names no data files; save the data set again.")
    if _description(path, "_indices_data_files", dict, optional=True):
        raise DataError(
            f"{directory} stores the order of its rows in a separate file; call flatten_indices() on the data set and "
            "save it again."
        )
    return [directory / name for name in names]


def _description(path: Path, field: str, kind: type, *, optional: bool = False) -> list[Any]:
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(_MOST_BYTES))
        entries = value.get(field) or [] if optional else value[field]
        if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
            raise ValueError(f"{field} does not have the expected form")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({printable(str(error), 80)}); save the data set again."
        ) from None
    return entries
