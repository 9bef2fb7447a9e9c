"""Reader of Parquet and Arrow files, which returns each row as a line of JSON, in bounded memory.

Schemas, quarantine and counts treat a row like a line. A null field counts as absent, because a
table has every field in every row; a null answer is an empty answer, as in lines. Only columns that
a schema or ``--data-fields`` uses are read, and the reader lists the others.

A table that is damaged or cut off raises `DataError` and stops the run, because its lost rows
cannot be listed in quarantine. This module imports pyarrow only when it opens such a file. It also
lists the files of a data set that Hugging Face's ``save_to_disk`` wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import ANSWERS, DataFields
from megatron_packed.config.optional_packages import old_package
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.sources.compression import ARROW_MAGIC, PARQUET_MAGIC
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.sources.line_fields import columns_of
from megatron_packed.data.sources.line_messages import CONTENTS
from megatron_packed.data.sources.line_schema import DECIDING, deciding_among
from megatron_packed.data.sources.message_masks import LISTED_MASK
from megatron_packed.data.sources.token_lines import TOKEN_FIELDS, TOKEN_ID_FIELDS
from megatron_packed.data.sources.tool_fields import without_nulls
from megatron_packed.files.regular_files import open_regular

_BATCH_ROWS = 128
_BUFFER_BYTES = 2**20
_MOST_BYTES = 64 << 20
"""Bytes of a description that are read; that of 100,000 files has 6 MB."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"


@dataclass
class RowReader:
    """Iterator over the rows of one table as `RawLine`s, numbered from 1.

    Args:
        file: Parquet, Arrow file or Arrow stream.
        max_line_bytes: rows that are longer than this as JSON are reported as ``line_too_long``.
        columns: columns to read; columns that the file does not have are ignored.
        fields: paths whose columns are read in place of ``columns``; the file must have all of
            them.
    Raises:
        DataError: during the iteration, if the file is damaged, lacks columns or has one of the
            columns twice, or if pyarrow is not installed.
    """

    file: Path
    max_line_bytes: int
    columns: Collection[str]
    fields: DataFields | None = None
    bytes_read: int = 0
    """Number of bytes of the file read so far; for Parquet, estimated from the rows read."""
    unread_columns: tuple[str, ...] = ()
    """Columns that are not read, from the first row on; empty with ``fields``, which are a choice."""

    def __iter__(self) -> Iterator[RawLine]:
        check_pyarrow(self.file)
        number = 1
        for batch in self._batches():
            for data, reason in self._lines(batch):
                yield RawLine(number, data, reason, "row")
                number += 1

    def _batches(self) -> Iterator[Any]:
        """Yield record batches of a few rows, with only the requested columns."""
        with self.file.open("rb") as stream:
            magic = stream.read(6)
        with self._telling_damage():
            yield from (
                self._parquet()
                if magic.startswith(PARQUET_MAGIC)
                else self._arrow(magic == ARROW_MAGIC)
            )

    @contextmanager
    def _telling_damage(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        # UnicodeDecodeError: the damage is in the name of a column.
        except (pyarrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.file} is damaged or cut off ({printable(str(error), 120)}); copy or write the file again."
            ) from None

    def _parquet(self) -> Iterator[Any]:
        from pyarrow import parquet

        size, rows = self.file.stat().st_size, 0
        with parquet.ParquetFile(
            self.file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as table:
            names = self._wanted(table.schema_arrow.names)
            for group in range(table.num_row_groups):
                in_group = table.metadata.row_group(group)
                row_bytes = in_group.total_byte_size // max(in_group.num_rows, 1)
                at_once = min(max(self.max_line_bytes // max(row_bytes, 1), 1), _BATCH_ROWS)
                for batch in table.iter_batches(
                    at_once, row_groups=[group], columns=names, use_threads=False
                ):
                    rows += len(batch)
                    self.bytes_read = size * rows // table.metadata.num_rows
                    yield batch

    def _arrow(self, is_file: bool) -> Iterator[Any]:
        import pyarrow

        with closing(pyarrow.memory_map(str(self.file))) as mapped:
            if is_file:
                reader = pyarrow.ipc.open_file(mapped)
                batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = pyarrow.ipc.open_stream(mapped)
                batches = iter(reader)
            names = self._wanted(reader.schema.names)
            for batch in batches:
                wanted = batch.select(names)
                self._check(wanted)
                self.bytes_read = mapped.tell()
                for start in range(0, len(wanted), _BATCH_ROWS):
                    yield wanted.slice(start, _BATCH_ROWS)

    def _check(self, batch: Any) -> None:
        """Validate the offsets of a batch: an offset outside the mapped file would crash the
        process.
        """
        try:
            batch.validate(full=True)
        except ValueError as error:  # ArrowInvalid
            if "UTF8" not in str(error):  # text that is not UTF-8 makes only its row a bad line
                raise

    def _wanted(self, names: list[str]) -> list[str]:
        fields = self.fields
        columns = self._columns(names) if fields is None else columns_of(fields, names, self.file)
        wanted = [name for name in names if name in columns]
        needed = set(columns) if fields is not None else deciding_among(self.columns)
        if needed.isdisjoint(wanted):
            raise DataError(
                f"{self.file} has the columns {printable(', '.join(names)) or 'none'}, but needs at least one of "
                f"{', '.join(sorted(needed))}; name its columns with {flags.DATA_FIELDS}."
            )
        if fields is None:
            self.unread_columns = tuple(name for name in names if name not in columns)
        if len(set(wanted)) < len(wanted):
            raise DataError(
                f"{self.file} has two columns with the same name ({printable(', '.join(wanted))}); rename one of them."
            )
        return wanted

    def _columns(self, names: Collection[str]) -> set[str]:
        """Return the columns to read, without columns of tokens that no row uses.

        Data sets keep their texts next to the tokens, and a schema of texts comes first.
        """
        columns = set(self.columns)
        decide = DECIDING & columns - set(TOKEN_ID_FIELDS)
        return columns if decide.isdisjoint(names) else columns - (TOKEN_FIELDS - {LISTED_MASK})

    def _lines(self, batch: Any) -> Iterator[tuple[bytes, str | None]]:
        # Python objects take several times the bytes of the batch, so a large batch is divided.
        reason = "line_too_long" if batch.nbytes > self.max_line_bytes else None
        rows: list[dict[str, Any]] = []
        if reason is None:
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                reason = "invalid_utf8"
        if reason is None:
            yield from map(self._line, rows)
        elif len(batch) == 1:
            yield b"", reason
        else:
            for row in range(len(batch)):
                yield from self._lines(batch.slice(row, 1))

    def _line(self, row: dict[str, Any]) -> tuple[bytes, str | None]:
        try:
            text = json.dumps(row_fields(row), ensure_ascii=False, default=_as_json)
            data = text.encode("utf-8")
        except UnicodeDecodeError:
            return b"", "invalid_utf8"
        return (data[:1024], "line_too_long") if len(data) > self.max_line_bytes else (data, None)


def row_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of a table; a null answer is an empty answer, and any other null
    field is absent. The schema decides about a null content of a message.
    """
    answers = {name: value for name, value in row.items() if value is None and name in ANSWERS}
    fields = {name: value for name, value in row.items() if value is not None}
    return answers | {name: without_nulls(part, CONTENTS) for name, part in fields.items()}


def _as_json(value: Any) -> str:
    """Return the text of a value of a type that JSON does not have.

    Bytes are decoded as UTF-8, because some Parquet writers store text as bytes. Dates and decimals
    become the text that ``str`` returns.
    """
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


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
