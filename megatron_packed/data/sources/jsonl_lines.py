"""From paths to files, and from JSONL files, plain or gzip, to raw lines, as a stream of bytes in
bounded memory.

A line ends with ``\\n``; a ``\\r`` before it and a byte order mark at its start are dropped. Lines
of white space alone are counted as blank, not as bad: files are often joined with empty lines
between them, and nothing is lost with them.
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
"""First bytes that no text has, and what opens such files."""
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
QUARANTINE_SUFFIX = ".quarantine.jsonl"

_WHOLE_HASH_BYTES = 256 * 2**20
_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 16


class RawLine(NamedTuple):
    """One physical line, or one row of a table as the line that it would be."""

    number: int
    """From 1."""
    data: bytes
    """Without its end; the first 1024 bytes only where ``reason`` says that the line is unusable.
    """
    reason: str | None = None
    """Why the bytes themselves are unusable: a key of `errors.REASONS`, else None."""
    kind: str = "line"
    """``row`` where a table was read; see `table_rows`."""
    count: int = 1
    """Lines from ``number`` on that this one stands for; more than one only where all are blank."""

    @property
    def is_blank(self) -> bool:
        return self.reason is None and not self.data.strip()


def begins_array(data: bytes) -> bool:
    """Return whether a line is, or begins, a JSON array: many data sets come as one array of all
    their conversations.
    """
    return data.lstrip().startswith(b"[")


def expand_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Files named by ``paths``: each a file, a directory (its ``*.jsonl``, ``*.jsonl.gz`` and
    ``*.parquet``, at any depth, sorted; or the files of a Hugging Face data set), or a pattern with
    ``*``, ``?`` or ``[]``. The order of files is the order of documents.

    Raises:
        DataError: nothing is there, a path is not a regular readable file, a file is named twice,
            or is a table and pyarrow is not installed.
    """
    if not paths:
        raise DataError(
            "no data path was given; name a .jsonl, .jsonl.gz or .parquet file, a directory or a pattern."
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
                f"{file} is named twice by the data paths; every file is read once per epoch, remove one."
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
                f"{path} holds no .jsonl, .jsonl.gz or .parquet file; name the files or another directory."
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
            f"{path} is not a file; weights (`0.5 first 0.5 second`) are for data that a run reads, name the files "
            "without them."
        )
    raise DataError(
        f"{path} does not exist; name a .jsonl, .jsonl.gz or .parquet file, a directory or a pattern."
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
            f"{file} is not a regular file; a pipe or device cannot be read twice, write it to a file."
        )
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} cannot be read: permission denied; check its permissions.")
    with file.open("rb") as stream:
        first = stream.read(8)
    for magic, program in _COMPRESSED.items():
        if first.startswith(magic):
            raise DataError(
                f"{file} is compressed, and of compressed files those of gzip alone are read; `{program} "
                f"{'-p' if program == 'unzip' else '-dc'} {file} | gzip > NAME.jsonl.gz` makes one."
            )


def file_identity(file: Path) -> str:
    """A hash that changes when the file does, whatever its name.

    Up to 256 MiB: of the whole content. Beyond: of size, modification time and sixteen evenly
    spaced blocks of 64 KiB, since reading a terabyte at every start would cost more than it
    protects.
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
    """Iterates over the `RawLine`s of one file.

    Never raises for what the file contains: a damaged gzip stream and a read error end the file
    with one unusable line.

    Args:
        file: plain or gzip, told by its first bytes and not by its name.
        max_line_bytes: longer lines are skipped in bounded memory and reported as
            ``line_too_long``.
    """

    def __init__(self, file: Path, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.file = file
        self.max_line_bytes = max_line_bytes
        self._raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file (compressed, if it is) read so far."""
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
        pending_bytes = 0  # counted beyond the limit too, though nothing beyond it is kept
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
                    blank += 1  # millions of them in a row are one step of the work that follows
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
            # What was read of the last line cannot be trusted to be a whole line, even if it
            # parses.
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
