"""Kinds of data files by their first bytes, and decompression in blocks of bounded size.

The first bytes of a file decide, not its name: gzip, zstd, bzip2, xz, or a table. Several compressed
streams in one file are read as one, because programs that compress in parallel write such files.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_packed.config.data_files import reads_zstd
from megatron_packed.data.errors import DataError

_READ_BYTES = 2**20
_INPUT_BYTES = 2**16
_XZ_MEMORY = 256 * 2**20
"""Memory in bytes that an xz stream may request; ``xz -9`` needs 65 MiB."""
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x50\x2a\x4d\x18": "zstd",  # skippable frame, with which parallel zstd begins a file
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
}
"""First bytes of each compressed format, and the name of the format."""
PARQUET_MAGIC, ARROW_MAGIC = b"PAR1", b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"
"""First bytes of a message of an Arrow stream; no text begins with these bytes."""


def compression_of(file: Path) -> str | None:
    """Return the name of the compression of a file; None if the file is not compressed."""
    first = _first_bytes(file)
    return next((name for magic, name in _MAGIC.items() if first.startswith(magic)), None)


def is_table(file: Path) -> bool:
    """Return whether a file is Parquet or Arrow."""
    return _first_bytes(file).startswith((PARQUET_MAGIC, ARROW_MAGIC, _STREAM_MAGIC))


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(8)


def check_compression(file: Path) -> None:
    """Check that this machine can decompress a file.

    Raises:
        DataError: the file is a zip archive, or needs a library that is not installed.
    """
    compression = compression_of(file)
    if compression == "zip":
        raise DataError(
            f"{file} is a zip archive, which is not read; convert it with `unzip -p {file} | gzip > "
            "NAME.jsonl.gz`."
        )
    if compression == "zstd" and not reads_zstd():
        raise DataError(
            f"{file} is compressed with zstd, which needs Python 3.14 or pyarrow; run "
            "`pip install 'megatron-packed[data]'`."
        )


class Blocks:
    """Iterator over the decompressed content of a file, in blocks of at most 1 MiB.

    The content of the file never raises an exception: the iteration ends at damage.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.damage: str | None = None
        """Key of `errors.REASONS` if the iteration ended at damage or a read error, else None."""
        self._raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Number of bytes of the file read so far; compressed bytes if the file is compressed."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else 0

    def __iter__(self) -> Iterator[bytes]:
        with self.file.open("rb") as raw:
            self._raw = raw
            try:
                yield from _READERS[compression_of(self.file)](raw)
            except (EOFError, zlib.error, lzma.LZMAError, _zstd_error()):
                self.damage = "corrupt_stream"
            except OSError as error:
                # Only errors of the operating system have a number, errors of libraries have none.
                self.damage = "corrupt_stream" if error.errno is None else "read_error"


def _plain(raw: Any) -> Iterator[bytes]:
    while block := raw.read1(_READ_BYTES):
        yield block


def _zstd(raw: IO[bytes]) -> Iterator[bytes]:
    if sys.version_info >= (3, 14):
        from compression import zstd

        yield from _streams(raw, zstd.ZstdDecompressor)
        return
    import pyarrow

    with pyarrow.CompressedInputStream(raw, "zstd") as stream:
        while block := stream.read(_INPUT_BYTES):
            yield block


def _streams(raw: IO[bytes], new_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of all compressed streams of a file.

    Raises:
        EOFError: the last stream is cut off.
    """
    decoder = None
    while data := raw.read(_INPUT_BYTES):
        while data:
            if decoder is None:
                data = data.lstrip(b"\0")  # padding between streams
                if not data:
                    break
                decoder = new_decoder()
            yield decoder.decompress(data, _READ_BYTES)
            while not decoder.eof and not decoder.needs_input:
                yield decoder.decompress(b"", _READ_BYTES)
            data = b""
            if decoder.eof:
                data, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("the compressed stream is cut off")


def _zstd_error() -> type[Exception]:
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdError
    return EOFError


_READERS: dict[str | None, Callable[[IO[bytes]], Iterator[bytes]]] = {
    None: _plain,
    "gzip": lambda raw: _plain(gzip.GzipFile(fileobj=raw, mode="rb")),
    "zstd": _zstd,
    "bzip2": lambda raw: _streams(raw, bz2.BZ2Decompressor),
    "xz": lambda raw: _streams(raw, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY)),
    "zip": _plain,
}
