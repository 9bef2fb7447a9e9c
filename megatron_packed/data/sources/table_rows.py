"""Reader of Parquet and Arrow files, which returns each row as a line of JSON, in bounded memory.

Schemas, quarantine and counts treat a row like a line. A null field counts as absent, because a
table has every field in every row; a null answer is an empty answer, as in lines. Only columns that
a schema or ``--data-fields`` uses are read, and the reader lists the others.

A table that is damaged or cut off raises `DataError` and stops the run, because its lost rows
cannot be listed in quarantine. This module imports pyarrow only when it opens such a file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import ANSWERS, DataFields
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.sources.compression import ARROW_MAGIC, PARQUET_MAGIC
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.sources.line_fields import columns_of
from megatron_packed.data.sources.line_messages import CONTENTS
from megatron_packed.data.sources.line_schema import DECIDING, deciding_among
from megatron_packed.data.sources.message_masks import LISTED_MASK
from megatron_packed.data.sources.table_files import check_pyarrow
from megatron_packed.data.sources.token_lines import TOKEN_FIELDS, TOKEN_ID_FIELDS

_BATCH_ROWS = 128
_BUFFER_BYTES = 2**20


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
    field is absent.
    """
    answers = {name: value for name, value in row.items() if value is None and name in ANSWERS}
    return answers | {name: _without_nulls(part) for name, part in row.items() if part is not None}


def _without_nulls(value: Any) -> Any:
    """Return a value without null keys; the schema decides about a null content of a message."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(part)
            for name, part in value.items()
            if part is not None or name in CONTENTS
        }
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _as_json(value: Any) -> str:
    """Return the text of a value of a type that JSON does not have.

    Bytes are decoded as UTF-8, because some Parquet writers store text as bytes. Dates and decimals
    become the text that ``str`` returns.
    """
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
