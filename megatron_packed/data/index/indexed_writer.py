"""Writer of Megatron's indexed data sets, with checksums in ``<prefix>.crc32c``.

The docstring of `indexed_file` describes the layout. ``<prefix>.crc32c`` contains u32 CRC32C
checksums: one per 64 KiB of ``.idx``, one per 64 KiB of ``.bin``, and at the end one of all these
checksums.

[Note: publication of an indexed data set]
The writer writes files under temporary names, flushes them to the disk, and renames them. An older
index is removed before the first rename, and the new index is renamed last. An index therefore
always describes the tokens next to it. If the writer is killed, the data set is complete, or is
still the previous one, or has no index. The temporary file of the tokens is locked. The kernel
releases the lock of a writer that died, and the next writer starts from the beginning.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megatron_packed.data.errors import DataError
from megatron_packed.data.index.indexed_file import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    checksums_path,
)
from megatron_packed.data.sources.checked_arrays import CHECKSUMS, BlockWriter
from megatron_packed.data.sources.source_files import index_path, tokens_path
from megatron_packed.files.checksums import crc32c
from megatron_packed.packed.array_types import AnyArray, IntegerArray

_CODE_OF = {dtype: code for code, dtype in CODES.items() if dtype.kind != "f"}
_SUFFIX = ".part"


class IndexedWriter:
    """Writer of one indexed data set, to which documents are appended.

    `close` publishes the data set. If an exception leaves the context, nothing is written.

    Args:
        prefix: path without ``.bin`` and ``.idx``; its directory is created.
        dtype: type of the stored tokens (`indexed_file.token_type`).
    Raises:
        DataError: the format does not have the type, the path cannot be written, or another process
            writes the same data set.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODE_OF:
            raise DataError(
                f"an indexed data set cannot store tokens of type {self.dtype}; choose uint16 or int32."
            )
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._tokens = _open(tokens_path(prefix))

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_document(self, tokens: IntegerArray, lengths: Sequence[int] | None = None) -> None:
        """Append a document.

        Args:
            tokens: ``(L,)`` tokens of the document.
            lengths: number of tokens of each sequence of the document, with sum L. By default the
                document is one sequence.
        Raises:
            DataError: a token does not fit the type.
            ValueError: the lengths do not sum up to L.
        """
        self._append(tokens, np.array([len(tokens)] if lengths is None else lengths, np.int64))
        self._documents.append(len(self._lengths))

    def _append(self, tokens: IntegerArray, lengths: IntegerArray) -> None:
        tokens = np.asarray(tokens)
        if int(lengths.sum()) != tokens.size or lengths.min(initial=0) < 0:
            raise ValueError(
                f"the lengths of the sequences, {lengths.tolist()}, do not sum up to {tokens.size} tokens."
            )
        if lengths.max(initial=0) > np.iinfo(np.int32).max:
            raise DataError(
                f"a sequence of {lengths.max()} tokens is too long for the int32 lengths of an index; divide it."
            )
        if tokens.size and not self._limits.min <= tokens.min() <= tokens.max() <= self._limits.max:
            raise DataError(
                f"tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}; write {self.prefix} with "
                "int32."
            )
        try:
            self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise self._unwritable(error) from error
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def add_documents(self, tokens: IntegerArray, lengths: IntegerArray) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: ``(L,)`` concatenated tokens of all documents.
            lengths: ``(n,)`` number of tokens of each document, with sum L.
        Raises:
            DataError: a token does not fit the type.
            ValueError: the lengths do not sum up to L.
        """
        self._append(tokens, lengths)
        first = len(self._lengths) - len(lengths) + 1
        self._documents.frombytes(np.arange(first, first + len(lengths), dtype=np.int64).tobytes())

    def close(self) -> None:
        """Make the appended documents the data set at ``prefix``.

        See [Note: publication of an indexed data set].
        """
        temporary = [self._tokens]
        try:
            temporary.append(index := _open(index_path(self.prefix)))
            self._write_index(index)
            sums = np.concatenate([index.finish(), self._tokens.finish()])
            closing = np.array([crc32c(sums.tobytes())], CHECKSUMS)
            temporary.append(beside := _open(checksums_path(self.prefix)))
            beside.write(sums.tobytes() + closing.tobytes())
            beside.finish()
            index_path(self.prefix).unlink(missing_ok=True)
            self._tokens.publish()
            beside.publish()
            index.publish()
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            for file in temporary:
                file.abandon()

    def abandon(self) -> None:
        """Delete the temporary files, unless the data set is published."""
        self._tokens.abandon()

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.prefix} cannot be written: {error.strerror}; free disk space and try again."
        )

    def _write_index(self, index: _Summed) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        index.write(
            HEADER.pack(MAGIC, VERSION, _CODE_OF[self.dtype], len(lengths), len(self._documents))
        )
        index.write(lengths.astype("<i4", copy=False).tobytes())
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        index.write(
            np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
            .astype("<i8", copy=False)
            .tobytes()
        )
        index.write(np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).tobytes())

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _open(path: Path) -> _Summed:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Summed(path)
    except BlockingIOError:
        raise DataError(
            f"another process is writing {path}; wait until it ends, or choose another path."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}; choose another path."
        ) from None


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


class _Summed:
    """File under a temporary name, with a lock and the checksums of its blocks."""

    def __init__(self, final: Path) -> None:
        self._final = final
        self._path = final.with_name(final.name + _SUFFIX)
        # The name is fixed, because its lock excludes other writers; a link there is not followed.
        self._file: Any = open(self._path, "ab", opener=_open_without_links)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        except OSError:
            pass  # the file system has no locks; the writer continues without a lock
        if (
            not self._path.exists()
            or os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino
        ):
            self._file.close()  # another writer renamed or removed the file after it was opened here
            raise BlockingIOError
        self._file.truncate(0)
        self._blocks = BlockWriter(self._file)

    def write(self, data: bytes) -> None:
        self._blocks.write(data)

    def finish(self) -> AnyArray:
        """Flush the file to the disk and return the checksums of all blocks."""
        checksums = self._blocks.finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        return checksums

    def publish(self) -> None:
        os.replace(self._path, self._final)
        self._file.close()

    def abandon(self) -> None:
        """Remove the temporary file, unless it was published."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            # Closing writes the rest of the buffer, which a full disk refuses again.
            with suppress(OSError):
                self._file.close()
