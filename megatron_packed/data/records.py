"""Records in memory, written once as a JSONL file that is then read as every other file.

A record is a dict in a schema of `line_schema`, a list of token ids, or a text. The name of the
file is a hash of its content, so equal records share a file and its tokens, wherever they come
from. Line N of the file is record N, counted from 1.

A NumPy array or a tensor becomes a list. Any other value that JSON does not have raises an error,
because a silent conversion would train on a text that the caller did not write.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.packed_dataset_checks import TEXT_CURE, describe_value
from megatron_packed.data.progress_bar import ProgressBar
from megatron_packed.data.sources.line_fields import columns_of
from megatron_packed.data.sources.line_schema import FIELDS
from megatron_packed.data.sources.table_rows import row_fields
from megatron_packed.files.written_files import write_all

_BLOCK_BYTES = 2**20
_STALE_SECONDS = 24 * 3600.0
_MOST_PLACE = 120
"""Most characters of the place of a value in a message."""


def is_huggingface_dataset(data: object) -> bool:
    """Return True for a data set of Hugging Face's ``datasets``, which need not be installed."""
    return hasattr(data, "column_names") and isinstance(data, Iterable)


def selected_columns(dataset: Any, fields: DataFields | None) -> tuple[Any, list[str]]:
    """Select the columns of a Hugging Face data set that a schema or ``fields`` reads.

    Columns that are not read may hold images, which are slow to decode and no JSON. If a schema
    reads none of the columns, all stay, and the report of the lines names them.

    Returns:
        The data set, and the names of the columns that a report lists as not read.
    Raises:
        DataError: the data set lacks a column that ``fields`` names.
    """
    names = dataset.column_names
    if not names or not hasattr(dataset, "select_columns"):
        return dataset, []
    wanted = FIELDS if fields is None else columns_of(fields, names, "the data set")
    columns = [name for name in names if name in wanted]
    if not columns:
        return dataset, []
    # Columns that ``fields`` leaves out are the choice of the user, and no report lists them.
    unread = [name for name in names if name not in wanted and fields is None]
    return dataset.select_columns(columns), unread


def rows_of_table(records: Iterable[Any], unread: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a data set without null fields, as rows of a Parquet file are read.

    Args:
        unread: columns that are not read. Each row has True in their place, so that the report
            counts them.
    """
    for record in records:
        if isinstance(record, dict):
            record = row_fields(record) | dict.fromkeys(unread, True)
        yield record


def write_records(
    records: Iterable[Any], directory: Path, *, texts: bool, count: int | None, show: bool
) -> Path:
    """Write the records as a file of ``directory`` and return its path.

    Several processes may do so at once. The records are read once, from the first to the last.

    Args:
        texts: strings are texts.
        count: number of records for the display of progress; None if unknown.
        show: display the progress.
    Raises:
        DataError: a record is of a wrong type or no JSON, or the file cannot be written.
    """
    # The name of the file begins with a dot, so that the file is no data of a directory.
    temporary = directory / f".records-{uuid.uuid4().hex}.tmp"
    digest = hashlib.sha256()
    try:
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(directory)
            file = temporary.open("xb", buffering=0)
        with file, ProgressBar("writing records", count or 0, show and count is not None) as bar:
            for number, block in _blocks(records, texts):
                digest.update(block)
                with _writing(directory):  # not around the loop: a generator has errors of its own
                    write_all(file.fileno(), block)
                bar.update(number)
        final = directory / f".records-{digest.hexdigest()[:16]}.jsonl"
        with _writing(directory):
            _publish(temporary, final, digest.hexdigest())
    finally:
        with suppress(OSError):
            temporary.unlink()
    return final


def _blocks(records: Iterable[Any], texts: bool) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of lines, each with the number of the records up to its end."""
    lines: list[bytes] = []
    num_bytes = number = 0
    for number, record in enumerate(records, 1):
        lines.append(_line(record, number, texts))
        num_bytes += len(lines[-1])
        if num_bytes >= _BLOCK_BYTES:
            yield number, b"".join(lines)
            lines, num_bytes = [], 0
    yield number, b"".join(lines)


def _line(record: Any, number: int, texts: bool) -> bytes:
    """Return a record as a line of JSON.

    Raises:
        DataError: the record is of a wrong type, or a value in it is no JSON.
    """
    value = _as_dict(record, number, texts)
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, default=_as_list, separators=(",", ":")
        )
    except (TypeError, ValueError, RecursionError) as error:
        try:
            fault = _fault(value, "") or printable(str(error))
        except RecursionError:
            fault = "it is nested too deeply or contains itself; make it flat"
        raise DataError(f"record {number} cannot be written as JSON: {fault}.") from None
    # Half a surrogate pair becomes an escape, and the reader counts the line as unusable.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _as_dict(record: Any, number: int, texts: bool) -> dict[str, Any]:
    """Return a record as the fields of a line."""
    if isinstance(record, Mapping):
        return dict(record)
    if isinstance(record, str):
        if not texts:
            raise DataError(f"record {number} is a string. {TEXT_CURE}")
        return {"text": record}
    ids = record.tolist() if hasattr(record, "tolist") else record
    if not isinstance(ids, list | tuple):
        raise DataError(
            f"record {number} is {describe_value(record)}; give a dict, or a list of token ids, for each record."
        )
    if not set(map(type, ids)) <= {int}:  # fast for the usual list
        _check_ids(ids, number)
    return {"input_ids": ids}


def _check_ids(ids: Sequence[Any], number: int) -> None:
    for at, token in enumerate(ids):
        if not isinstance(token, Integral) or isinstance(token, bool):
            chat = " A conversation is a dict: {'messages': [...]}." * isinstance(token, Mapping)
            raise DataError(
                f"record {number} is a list, but its element {at} is {describe_value(token)}; give whole numbers as "
                f"token ids.{chat}"
            )


def _as_list(value: Any) -> Any:
    """Return a NumPy array, a tensor or a NumPy number as values of JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def _fault(value: Any, place: str) -> str:
    """Return the place of the first value that JSON does not have, and the cure; "" without one."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        parts = [(f"{place}.{name}".lstrip("."), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{place}[{at}]", part) for at, part in enumerate(value)]
    elif value is None or isinstance(value, str | int):
        return ""
    elif isinstance(value, float):
        cure = "give None or a number, or leave the field out"
        return "" if math.isfinite(value) else f"{_cut(place)} is {value}; {cure}"
    else:
        cure = "decode it" if isinstance(value, bytes) else "convert it, for example by str()"
        return f"{_cut(place)} is {describe_value(value)}; {cure}, or leave the field out"
    return next(filter(None, (_fault(part, inside) for inside, part in parts)), "")


def _cut(place: str) -> str:
    return printable(place, _MOST_PLACE)


def _publish(temporary: Path, final: Path, digest: str) -> None:
    """Give a complete file its final name, unless another process has already written the file.

    A link, unlike a rename, does not replace the file of the other process. The time of that file
    is part of the identity of a large file, and must be the same for all processes.
    """
    try:
        os.link(temporary, final)
    except OSError:  # the name exists, or the file system has no hard links
        if not _holds(final, digest):
            os.replace(temporary, final)


def _holds(file: Path, digest: str) -> bool:
    """Return True if a file has the content of a hash."""
    if not file.is_file():
        return False
    file_digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            file_digest.update(block)
    return file_digest.hexdigest() == digest


def _remove_stale(directory: Path) -> None:
    """Remove the temporary files of killed processes."""
    for left in directory.glob(".records-*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{directory} cannot be written: {error.strerror or error}; free disk space, or give cache_dir another "
            "directory."
        ) from None
