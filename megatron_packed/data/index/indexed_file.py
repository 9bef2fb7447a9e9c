"""Reader of Megatron's indexed data sets: ``<prefix>.bin`` with tokens, and its index
``<prefix>.idx``.

Layout of the index, all little-endian:

- the magic ``MMIDIDX\\0\\0``;
- u64 version, always 1;
- u8 code of the type of the tokens;
- u64 S, the number of sequences;
- u64 D, the number of documents + 1;
- i32 ``(S,)`` lengths of the sequences in tokens;
- i64 ``(S,)`` starts of the sequences in bytes of ``.bin``;
- i64 ``(D,)`` first sequence of each document, and S as the last entry;
- for multimodal data: i8 ``(S,)`` modes.

The file ``.bin`` has no header. Megatron's writer stores the sequences without gaps.

Megatron's files have no checksums. The reader therefore compares redundant values: lengths with
starts, and counts with sizes. If each document is one sequence, as usual, the comparison detects
every change of the index. An index with as many documents as sequences is assumed to be of this
kind. `indexed_writer.IndexedWriter` also writes ``<prefix>.crc32c`` with checksums of both files.
With this file the reader detects every change.
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.checked_arrays import (
    CHECKSUM_BLOCK_BYTES,
    CHECKSUMS,
    CheckedBlocks,
)
from megatron_packed.data.sources.source_files import index_path, tokens_path
from megatron_packed.files.checksums import crc32c
from megatron_packed.files.regular_files import open_regular
from megatron_packed.packed.array_types import AnyArray, Int32Array, Int64Array, UInt8Array

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in (
        (1, "u1"),
        (2, "i1"),
        (3, "<i2"),
        (4, "<i4"),
        (5, "<i8"),
        (6, "<f8"),
        (7, "<f4"),
        (8, "<u2"),
    )
}
"""Type of the tokens for each code of the header."""
_AT_ONCE = 2**22
"""Number of entries of an index that are checked together, which limits the memory used."""


def checksums_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.crc32c")


def token_type(vocab_size: int | None) -> np.dtype[Any]:
    """Return the type in which Megatron's tools store the tokens of a vocabulary."""
    return np.dtype("<u2" if vocab_size is not None and vocab_size < 65500 else "<i4")


class TokensInFile:
    """Array of the tokens of ``.bin`` without a memory map: each slice is read from the file.

    Only slices are supported. Several threads may read, because every read passes its own file
    offset. The file is closed when the last reference to this object is dropped.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self.dtype = dtype
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._count = os.fstat(self._file).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> AnyArray:
        """Read a slice of the tokens.

        Raises:
            DataError: the file has become shorter, or cannot be read.
        """
        start, stop, _ = part.indices(self._count)
        at, end = start * self.dtype.itemsize, max(stop, start) * self.dtype.itemsize
        pieces = []
        while at < end:
            try:
                piece = os.pread(
                    self._file, end - at, at
                )  # pread may return fewer bytes than requested
            except OSError as error:
                raise DataError(
                    f"{self._path} cannot be read: {error.strerror}; test the disk."
                ) from None
            if not piece:
                raise DataError(
                    f"{self._path} ends at byte {at}, but was longer when it was opened; do not change a file in use."
                )
            pieces.append(piece)
            at += len(piece)
        return np.frombuffer(b"".join(pieces), self.dtype)


class IndexedFile:
    """Reader of an indexed data set through memory maps. Several threads may use it.

    The complete index is checked when it is opened. If there are checksums, tokens are checked when
    they are read.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        map_tokens: True maps ``.bin`` into memory. False reads tokens from ``.bin`` when they are
            requested; the index is still mapped.
    Raises:
        DataError: a file is missing, or the files do not follow the format. The message names the
            first fault.
    """

    def __init__(self, prefix: str | Path, *, map_tokens: bool = True) -> None:
        self.prefix = str(prefix)
        self._index = index_path(prefix)
        self._tokens = tokens_path(prefix)
        raw = _map(self._index)
        code, self.num_sequences, entries = self._header(raw)
        self.dtype: np.dtype[Any] = CODES[code]
        self.num_documents = entries - 1
        at = HEADER.size
        lengths, at = _view(raw, "<i4", self.num_sequences, at)
        starts, at = _view(raw, "<i8", self.num_sequences, at)
        documents, at = _view(raw, "<i8", entries, at)
        self.lengths: Int32Array = lengths
        """``(S,)`` number of tokens of each sequence."""
        self.document_index: Int64Array = documents
        """``(D,)`` first sequence of each document; the last entry is S."""
        self.modes: NDArray[np.int8] | None = (
            None if at == len(raw) else _view(raw, "i1", self.num_sequences, at)[0]
        )
        """``(S,)`` modes of multimodal data; None for text."""
        self._starts = starts
        mapped = self._map_tokens()
        self._values: AnyArray | TokensInFile = (
            mapped if map_tokens else TokensInFile(self._tokens, self.dtype)
        )
        self._checksums = self._read_checksums(raw)
        self._blocks: CheckedBlocks | None = None
        if self._checksums is not None:
            name = checksums_path(self.prefix).name
            cure = f"(CRC32C differs from {name}); test the disk, and make or copy the file again."
            self._blocks = CheckedBlocks(self._values, self._checksums, self._tokens, cure)
        self._check_sequences()
        self._check_documents()

    def __len__(self) -> int:
        return self.num_sequences

    @property
    def num_tokens(self) -> int:
        return len(self._values)

    def document_starts(self) -> Int64Array:
        """Return the place of each document's first token in ``.bin``, ``(D,)``.

        The last entry is the number of all tokens.
        """
        ends = np.append(self._starts // self.dtype.itemsize, self.num_tokens)
        places: Int64Array = ends[self.document_index]
        return places

    def tokens(self, start: int, stop: int) -> AnyArray:
        """Return the tokens ``start`` to ``stop - 1`` of ``.bin``, read-only.

        Raises:
            DataError: the tokens changed since they were written.
        """
        return self._values[start:stop] if self._blocks is None else self._blocks.read(start, stop)

    def fingerprint(self) -> bytes:
        """Return bytes that change when the data changes; path and time of the files do not count.

        The bytes are the stored checksums of all blocks. Without stored checksums, the bytes are
        checksums of the complete index and of sixteen blocks of tokens.
        """
        if self._checksums is not None:
            return b"all" + self._checksums.tobytes()
        parts = [f"some:{self.num_tokens}".encode()]
        raw = _map(self._index)
        for at in range(0, len(raw), _AT_ONCE):
            parts.append(crc32c(raw[at : at + _AT_ONCE].tobytes()).to_bytes(4, "little"))
        step = max(CHECKSUM_BLOCK_BYTES // self.dtype.itemsize, 1)
        for sample in range(16):
            start = max(self.num_tokens - step, 0) * sample // 15
            parts.append(crc32c(self._values[start : start + step].tobytes()).to_bytes(4, "little"))
        return b"".join(parts)

    # ------------------------------------------------------------------------------------------------------
    # validation

    def _header(self, raw: UInt8Array) -> tuple[int, int, int]:
        """Return ``(code, S, D)`` of the header, after checking them against the size of the index."""
        if len(raw) < HEADER.size:
            raise self._bad(
                f"has {len(raw)} bytes, fewer than its header of {HEADER.size} bytes",
                "it is cut off",
            )
        magic, version, code, sequences, entries = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise self._bad(f"begins with {magic!r}", "it is not an index, or it is damaged")
        if version != VERSION:
            raise self._bad(
                f"has version {version}, but only version {VERSION} is supported",
                "it may be damaged",
            )
        if code not in CODES:
            raise self._bad(f"has the type code {code}, but codes are 1 to 8", "it is damaged")
        if CODES[code].kind == "f":
            raise self._bad(
                f"gives tokens the type {CODES[code].name}",
                "token numbers are integers, so it is damaged",
            )
        size = HEADER.size + 12 * sequences + 8 * entries
        if len(raw) not in (size, size + sequences):
            raise self._bad(
                f"has {len(raw)} bytes, but {sequences} sequences and {entries} document entries need {size}",
                "it is cut off or damaged",
            )
        if entries < 1:
            raise self._bad("has no document entry, but the entry 0 is required", "it is damaged")
        return code, sequences, entries

    def _map_tokens(self) -> AnyArray:
        raw = _map(self._tokens)
        if len(raw) % self.dtype.itemsize:
            raise DataError(
                f"{self._tokens} has {len(raw)} bytes, which is not a multiple of the size of {self.dtype.name} tokens "
                f"in {self._index.name}; the file is cut off, or the two files do not belong together."
            )
        return raw.view(self.dtype)

    def _check_sequences(self) -> None:
        """Check that the sequences follow each other without gaps up to the end of ``.bin``.

        The starts must be the running sum of the lengths.
        """
        item, place = self.dtype.itemsize, 0
        for at in range(0, self.num_sequences, _AT_ONCE):
            lengths = self.lengths[at : at + _AT_ONCE].astype(np.int64)
            if lengths.min() < 0:
                number = at + int(lengths.argmin())
                raise self._bad(
                    f"gives sequence {number} a length of {self.lengths[number]} tokens",
                    "it is damaged",
                )
            ends = place + np.cumsum(lengths * item)
            expected = np.concatenate([[place], ends[:-1]])
            different = np.flatnonzero(self._starts[at : at + _AT_ONCE] != expected)
            if different.size:
                number = int(different[0])
                raise self._bad(
                    f"lets sequence {at + number} begin at byte {self._starts[at + number]}, but the sequences before "
                    f"it end at byte {expected[number]}",
                    "it is damaged",
                )
            place = int(ends[-1])
        if place != self.num_tokens * item:
            raise DataError(
                f"{self._tokens} has {self.num_tokens * item} bytes, but the sequences of {self._index.name} need "
                f"{place}; one of the files is cut off or damaged, or the files do not belong together."
            )

    def _check_documents(self) -> None:
        entries = self.document_index
        if entries[0] != 0 or entries[-1] != self.num_sequences:
            raise self._bad(
                f"has documents from sequence {entries[0]} to {entries[-1]}, but they must go from 0 to "
                f"{self.num_sequences}",
                "it is damaged",
            )
        single = len(entries) == self.num_sequences + 1 and self._checksums is None
        for at in range(0, len(entries) - 1, _AT_ONCE):
            steps = np.diff(entries[at : at + _AT_ONCE + 1])
            if steps.min() < 0:
                raise self._bad(
                    f"lets document {at + int(steps.argmin())} end before it begins",
                    "it is damaged",
                )
            if single and (steps != 1).any():
                raise self._bad(
                    f"has as many documents as sequences, but its document {at + int((steps != 1).argmax())} does "
                    "not consist of one sequence",
                    "it is damaged",
                )

    def _read_checksums(self, raw: UInt8Array) -> NDArray[np.uint32] | None:
        """Return the checksums of the blocks of ``.bin``, or None without a file of checksums.

        See `indexed_writer` for the layout of the file.
        """
        path = checksums_path(self.prefix)
        if not os.path.lexists(path):
            return None
        cure = f"if the data was written again, remove {path.name}; else restore the files"
        try:
            with open_regular(path) as file:
                stored = np.frombuffer(file.read(), CHECKSUMS)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}); {cure}.") from None
        of_index = -(-len(raw) // CHECKSUM_BLOCK_BYTES)
        of_tokens = -(-self.num_tokens * self.dtype.itemsize // CHECKSUM_BLOCK_BYTES)
        if len(stored) != of_index + of_tokens + 1 or crc32c(stored[:-1].tobytes()) != stored[-1]:
            raise DataError(f"{path} is damaged, or contains the checksums of other files; {cure}.")
        for block in range(of_index):
            if (
                crc32c(
                    raw[block * CHECKSUM_BLOCK_BYTES : (block + 1) * CHECKSUM_BLOCK_BYTES].tobytes()
                )
                != stored[block]
            ):
                raise DataError(
                    f"{self._index} changed since it was written (CRC32C differs from {path.name}); {cure}."
                )
        return stored[of_index:-1]

    def _bad(self, finding: str, meaning: str) -> DataError:
        return DataError(f"{self._index} {finding}; {meaning}: make or copy the file again.")


def _map(path: Path) -> UInt8Array:
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist; an indexed data set consists of a .bin and an .idx file."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} cannot be read: {reason}; check the file and its permissions."
        ) from None


def _view(raw: UInt8Array, dtype: DTypeLike, count: int, at: int) -> tuple[AnyArray, int]:
    """Return a view of ``count`` items from byte ``at``, and the byte after the items.

    The items may be unaligned, because the header has an odd size. numpy can read them.
    """
    end = at + count * np.dtype(dtype).itemsize
    return raw[at:end].view(dtype), end
