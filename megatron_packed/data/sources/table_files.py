"""Detection of tables (Parquet, Arrow), and of the files of which a Hugging Face data set consists
of.

Nothing here needs pyarrow.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_packed.data.errors import DataError, printable

PARQUET_MAGIC, ARROW_MAGIC = b"PAR1", b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"
"""First bytes of a message of an Arrow stream; no text begins so."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_table(file: Path) -> bool:
    """Return whether a file is Parquet or Arrow, by its first bytes and not by its name."""
    with file.open("rb") as stream:
        return stream.read(8).startswith((PARQUET_MAGIC, ARROW_MAGIC, _STREAM_MAGIC))


def check_pyarrow(file: Path) -> None:
    """Raises:
    DataError: with the cure, where pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:
        raise DataError(
            f"{file} needs pyarrow, which is not installed; pip install 'megatron-packed[data]', or give the data as "
            "JSONL."
        )


def is_saved_dataset(directory: Path) -> bool:
    """Return whether ``save_to_disk`` of Hugging Face's datasets wrote the directory, with or
    without splits.
    """
    return (directory / _STATE).is_file() or (directory / _SPLITS).is_file()


def saved_files(directory: Path) -> list[Path]:
    """The Arrow files of a directory that ``save_to_disk`` wrote, in their order.

    Raises:
        DataError: there are several splits, its description is damaged, or a file is missing.
    """
    if not (directory / _STATE).is_file():
        splits = _description(directory / _SPLITS, "splits", str)
        if len(splits) != 1:
            raise DataError(
                f"{directory} holds the splits {printable(', '.join(splits)) or 'none'}; name one of them, for "
                f"example {os.path.join(directory, printable(splits[0], 40) if splits else 'train')}."
            )
        directory = directory / splits[0]
    path = directory / _STATE
    names = [entry.get("filename") for entry in _description(path, "_data_files", dict)]
    if not names or not all(
        isinstance(name, str) and name == os.path.basename(name) for name in names
    ):
        raise DataError(f"{path} names no data files; save the data set anew.")
    if _description(path, "_indices_data_files", dict, optional=True):
        raise DataError(
            f"{directory} keeps its order in a file of its own; save it anew after flatten_indices()."
        )
    return [directory / name for name in names]


def _description(path: Path, field: str, kind: type, *, optional: bool = False) -> list[Any]:
    try:
        value = json.loads(path.read_bytes())
        found = value.get(field) or [] if optional else value[field]
        if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
            raise ValueError(f"{field} is not as expected")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({printable(str(error), 80)}); save the data set anew."
        ) from None
    return found
