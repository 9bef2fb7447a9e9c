"""Large memory-mapped arrays on disk, with a checksum per block.

The checksum of a block is checked when the block is first read. Damaged data is therefore detected
before it is used, and opening an array does not read its data.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron_packed.data.errors import DataError
from megatron_packed.files.checksums import crc32c
from megatron_packed.packed.array_types import AnyArray

CHECKSUM_BLOCK_BYTES = 2**16
"""Bytes per checksum; a multiple of every item size."""
CHECKSUMS = np.dtype("<u4")


class BlockWriter:
    """Writer of bytes to an open file, with the CRC32C of each block."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._block = bytearray()
        # 4 bytes each; a trillion int32 tokens have 61 million checksums
        self._checksums = array("I")

    def write(self, data: bytes) -> None:
        self._block += data
        if len(self._block) >= CHECKSUM_BLOCK_BYTES:
            self._write(len(self._block) // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES)

    def finish(self) -> AnyArray:
        """Write the rest and return the checksums of all blocks, as they are stored."""
        self._write(len(self._block))
        return np.frombuffer(self._checksums, np.uint32).astype(CHECKSUMS)

    def _write(self, num_bytes: int) -> None:
        data = bytes(self._block[:num_bytes])
        del self._block[:num_bytes]
        for start in range(0, num_bytes, CHECKSUM_BLOCK_BYTES):
            self._checksums.append(crc32c(data[start : start + CHECKSUM_BLOCK_BYTES]))
        self._file.write(data)


@dataclass
class CheckedBlocks:
    """Items of a file of which each block is compared with its checksum when it is first read.

    Args:
        values: the items.
        checksums: CRC32C of each block of `CHECKSUM_BLOCK_BYTES` bytes.
        path: the file, for messages.
        cure: end of the message about a block that has changed.
    """

    values: Any
    checksums: AnyArray
    path: Path
    cure: str

    def __post_init__(self) -> None:
        self._checked = np.zeros(len(self.checksums), np.bool_)
        self._items = CHECKSUM_BLOCK_BYTES // self.values.dtype.itemsize

    def read(self, start: int, stop: int) -> AnyArray:
        """Return the items from ``start`` to ``stop - 1``, read-only.

        Raises:
            DataError: a block has changed since it was written.
        """
        first, end = start // self._items, -(-stop // self._items)
        for block in (first + np.flatnonzero(~self._checked[first:end])).tolist():
            data = self.values[block * self._items : (block + 1) * self._items].tobytes()
            if crc32c(data) != self.checksums[block]:
                byte = block * CHECKSUM_BLOCK_BYTES
                raise DataError(
                    f"{self.path}: bytes {byte} to {byte + CHECKSUM_BLOCK_BYTES - 1} changed since they were "
                    f"written {self.cure}"
                )
            self._checked[block] = True
        items: AnyArray = self.values[start:stop]
        return items


class ArrayWriter:
    """Writer of one array: appends to ``<name>.bin`` and writes ``<name>.crc32c`` when closed.

    Args:
        directory: existing directory for both files.
        name: name of the array.
        dtype: little-endian type of the items.
    """

    def __init__(self, directory: Path, name: str, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = (directory / f"{name}.bin").open("wb")
        self._checksums_file = directory / f"{name}.crc32c"
        self._blocks = BlockWriter(self._file)
        self._count = 0

    def append(self, values: ArrayLike) -> None:
        items = np.ascontiguousarray(values, self._dtype)
        self._count += len(items)
        self._blocks.write(items.tobytes())

    def close(self) -> dict[str, Any]:
        """Write the rest and the checksums, and return the array's entry in the manifest."""
        checksums = self._blocks.finish().tobytes()
        self._file.close()
        self._checksums_file.write_bytes(checksums)
        return {
            "dtype": self._dtype.str,
            "count": self._count,
            "checksums_crc32c": crc32c(checksums),
        }


class CheckedArray(CheckedBlocks):
    """Memory-mapped reader of an array that `ArrayWriter` wrote.

    Args:
        directory, name: directory and name of the array, as given to `ArrayWriter`.
        dtype: expected type of the items; a different type in ``entry`` is an error.
        entry: the array's entry in the manifest.
    Raises:
        DataError: a file is missing or has the wrong size, or the file of checksums is damaged.
    """

    def __init__(self, directory: Path, name: str, dtype: DTypeLike, entry: dict[str, Any]) -> None:
        path = directory / f"{name}.bin"
        item = np.dtype(dtype)
        if entry["dtype"] != item.str:
            raise DataError(
                f"{path} contains items of type {entry['dtype']}, expected {item.str}; remove the cache directory "
                "to build it again."
            )
        self.count = int(entry["count"])
        num_bytes = self.count * item.itemsize
        self._check_size(path, num_bytes)
        checksums_path = directory / f"{name}.crc32c"
        self._check_size(checksums_path, -(-num_bytes // CHECKSUM_BLOCK_BYTES) * CHECKSUMS.itemsize)
        raw = checksums_path.read_bytes()
        if crc32c(raw) != entry["checksums_crc32c"]:
            raise DataError(f"{checksums_path} is damaged; remove {directory} to build it again.")
        values = np.memmap(path, item, "r") if self.count else np.zeros(0, item)
        super().__init__(
            np.asarray(values),
            np.frombuffer(raw, CHECKSUMS),
            path,
            f"(CRC32C differs); test the disk, and remove {directory} to build it again.",
        )

    def read_all(self) -> AnyArray:
        return self.read(0, self.count)

    @staticmethod
    def _check_size(path: Path, expected: int) -> None:
        try:
            size = path.stat().st_size
        except OSError:
            raise DataError(f"{path} is missing; remove {path.parent} to build it again.") from None
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, expected {expected}; remove {path.parent} to build it again."
            )
