"""Expansion of data paths to files, and a reader of JSONL files, plain or gzip, in bounded memory.

A line ends with ``\\n``. The reader drops a ``\\r`` before ``\\n`` and a byte order mark at the
start of a line. Lines with only white space are counted as blank, not as bad, because files are
often joined with empty lines between them.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.table_files import (
    check_pyarrow,
    is_saved_dataset,
    is_table,
    saved_files,
)

MAX_LINE_BYTES = 64 * 2**20
"""Default limit of one line, in decompressed bytes."""
_READ_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "unzip",
}
"""First bytes of compressed formats that are not read, and the program that decompresses each."""
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
QUARANTINE_SUFFIX = ".quarantine.jsonl"

_WHOLE_HASH_BYTES = 256 * 2**20
_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 16


class RawLine(NamedTuple):
    """One line of a file, or one row of a table as a line of JSON."""

    number: int
    """Number of the line or row in its file, from 1."""
    data: bytes
    """Bytes of the line without the line end. If ``reason`` is set, only the first 1024 bytes."""
    reason: str | None = None
    """Key of `errors.REASONS` if the bytes of the line are unusable, else None."""
    kind: str = "line"
    """``row`` if the file is a table, else ``line``; see `table_rows`."""
    count: int = 1
    """Number of consecutive lines that this value represents: above 1 only for blank lines."""

    @property
    def is_blank(self) -> bool:
        return self.reason is None and not self.data.strip()


def begins_array(data: bytes) -> bool:
    """Return whether a line begins a JSON array.

    Many data sets are published as one array of all conversations, which is not JSONL.
    """
    return data.lstrip().startswith(b"[")


def expand_paths(paths: Sequence[str | Path]) -> list[Path]:
    """List the files that ``paths`` name. The order of files is the order of documents.

    Args:
        paths: each is a file, a directory, or a pattern with ``*``, ``?`` or ``[]``. A directory
            stands for its ``*.jsonl``, ``*.jsonl.gz`` and ``*.parquet`` files at any depth, sorted,
            or for the files of a data set that Hugging Face's ``save_to_disk`` wrote.
    Raises:
        DataError: a path names no file, a file is not regular or not readable, a file is named
            twice, or a file is a table and pyarrow is not installed.
    """
    if not paths:
        raise DataError(
            "no data path was given; give a .jsonl, .jsonl.gz or .parquet file, a directory or a pattern."
        )
    files: list[Path] = []
    for path in paths:
        files.extend(_expand(str(path)))
    seen: set[Path] = set()
    for file in files:
        _check_file(file)
        if is_table(file):
            check_pyarrow(file)
        resolved = file.resolve()
        if resolved in seen:
            raise DataError(
                f"the data paths name {file} twice, but each file is read once per epoch; remove one of the two."
            )
        seen.add(resolved)
    return files


def _expand(path: str) -> list[Path]:
    here = Path(path)
    if here.is_dir() and is_saved_dataset(here):
        return saved_files(here)
    if here.is_dir():
        found = sorted(
            file
            for file in here.rglob("*")
            if file.name.endswith(_SUFFIXES)
            and not file.name.endswith(QUARANTINE_SUFFIX)
            and not any(part.startswith(".") for part in file.relative_to(here).parts)
            and file.is_file()
        )
        if not found:
            raise DataError(
                f"{path} contains no .jsonl, .jsonl.gz or .parquet file; give the files or another directory."
            )
        return found
    if here.exists() or here.is_symlink():
        return [here]
    if any(c in path for c in "*?["):
        matched = [
            Path(name)
            for name in sorted(glob.glob(path, recursive=True))
            if not Path(name).is_dir()
        ]
        if not matched:
            raise DataError(f"{path} matches no file; check the pattern.")
        return matched
    if _is_number(path):
        raise DataError(
            f"{path} is not a file; only a training run accepts weights (`0.5 first 0.5 second`), so give the files "
            "without weights."
        )
    raise DataError(
        f"{path} does not exist; give a .jsonl, .jsonl.gz or .parquet file, a directory or a pattern."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_file(file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}; check the path and its permissions."
        ) from None
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{file} is not a regular file; a pipe or device cannot be read twice, so write its content to a file."
        )
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} cannot be read: permission denied; check its permissions.")
    with file.open("rb") as stream:
        first = stream.read(8)
    for magic, program in _COMPRESSED.items():
        if first.startswith(magic):
            raise DataError(
                f"{file} is compressed, but gzip is the only supported compression; convert it with `{program} "
                f"{'-p' if program == 'unzip' else '-dc'} {file} | gzip > NAME.jsonl.gz`."
            )


def file_identity(file: Path) -> str:
    """Hash a file to detect a change of its content; the name of the file does not count.

    For files up to 256 MiB the hash covers the complete content. For larger files it covers the
    size, the modification time and sixteen evenly spaced blocks of 64 KiB, because reading a
    terabyte at every start would take too long.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}:".encode())
    with file.open("rb") as stream:
        if size <= _WHOLE_HASH_BYTES:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
        else:
            digest.update(f"{file.stat().st_mtime_ns}:".encode())
            for sample in range(_NUM_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class LineReader:
    """Iterator over the `RawLine`s of one file.

    The content of the file never raises an exception. If the gzip stream is damaged or a read
    fails, the iteration ends with one unusable line.

    Args:
        file: plain text or gzip. The first bytes of the file decide, not its name.
        max_line_bytes: longer lines are skipped in bounded memory and reported as
            ``line_too_long``.
    """

    def __init__(self, file: Path, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.file = file
        self.max_line_bytes = max_line_bytes
        self._raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the file read so far; compressed bytes if the file is compressed."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else 0

    def __iter__(self) -> Iterator[RawLine]:
        with self.file.open("rb") as raw:
            self._raw = raw
            compressed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw, mode="rb") if compressed else raw
            yield from self._lines(stream)

    def _lines(self, stream: Any) -> Iterator[RawLine]:
        number, blank = 1, 0
        pending: list[bytes] = []  # pieces of a line whose end has not been read yet
        pending_bytes = 0  # counts all bytes of that line; bytes beyond the limit are not stored
        damage: str | None = None
        while True:
            try:
                block = stream.read1(_READ_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                damage, block = "corrupt_gzip", b""
            except OSError:
                damage, block = "read_error", b""
            if not block:
                break
            first, *others = block.split(b"\n")
            for piece in others:
                if not pending_bytes and not first.strip():
                    blank += (
                        1  # consecutive blank lines become one RawLine, as there may be millions
                    )
                else:
                    if blank:
                        yield RawLine(number - blank, b"", count=blank)
                        blank = 0
                    yield self._line(number, [*pending, first], pending_bytes + len(first))
                number += 1
                pending, pending_bytes = [], 0
                first = piece
            pending_bytes += len(first)
            if pending_bytes <= self.max_line_bytes:
                pending.append(first)
            elif sum(map(len, pending)) > 1024:
                pending = [b"".join(pending)[:1024]]
        if blank:
            yield RawLine(number - blank, b"", count=blank)
        if damage is not None:
            # The bytes read of the last line may be only its beginning, even if they parse.
            yield RawLine(number, b"".join(pending)[:1024], damage)
        elif pending_bytes:
            yield self._line(number, pending, pending_bytes)

    def _line(self, number: int, pieces: list[bytes], num_bytes: int) -> RawLine:
        if num_bytes > self.max_line_bytes:
            start = b"".join(piece[:1024] for piece in pieces[:2])[:1024]
            return RawLine(number, start, "json_array" if begins_array(start) else "line_too_long")
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if data.startswith(_BYTE_ORDER_MARK):
            data = data[len(_BYTE_ORDER_MARK) :]
        return RawLine(number, data[:-1] if data.endswith(b"\r") else data)
