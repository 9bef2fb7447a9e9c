"""Large memory-mapped arrays on disk, with a checksum per block.

The checksum of a block is checked when the block is first read. Damaged data is therefore detected
before it is used, and opening an array does not read its data.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import DTypeLike

from megatron_packed.data.errors import DataError
from megatron_packed.packed.array_types import AnyArray

BLOCK_BYTES = 2**16
"""Bytes per checksum; a multiple of every item size."""
_CHECKSUMS = np.dtype("<u4")


def checksum(data: bytes) -> int:
    """Return the CRC32C of ``data``."""
    return int(google_crc32c.value(data))


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
        # 4 bytes each; a trillion int32 tokens have 61 million checksums
        self._checksums = array("I")
        self._block = bytearray()
        self._count = 0

    def append(self, values: AnyArray) -> None:
        raw = np.ascontiguousarray(values, self._dtype).tobytes()
        self._count += len(values)
        self._block += raw
        if len(self._block) >= BLOCK_BYTES:
            num_bytes = len(self._block) // BLOCK_BYTES * BLOCK_BYTES
            self._write(bytes(self._block[:num_bytes]))
            del self._block[:num_bytes]

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), BLOCK_BYTES):
            self._checksums.append(checksum(data[start : start + BLOCK_BYTES]))
        self._file.write(data)

    def close(self) -> dict[str, Any]:
        """Write the rest and the checksums, and return the array's entry in the manifest."""
        if self._block:
            self._write(bytes(self._block))
        self._file.close()
        checksums = np.frombuffer(self._checksums, np.uint32).astype(_CHECKSUMS).tobytes()
        self._checksums_file.write_bytes(checksums)
        return {
            "dtype": self._dtype.str,
            "count": self._count,
            "checksums_crc32c": checksum(checksums),
        }


class CheckedArray:
    """Memory-mapped reader of an array that `ArrayWriter` wrote.

    Args:
        directory, name: directory and name of the array, as given to `ArrayWriter`.
        dtype: expected type of the items; a different type in ``entry`` is an error.
        entry: the array's entry in the manifest.
    Raises:
        DataError: a file is missing or has the wrong size, or the file of checksums is damaged.
    """

    def __init__(self, directory: Path, name: str, dtype: DTypeLike, entry: dict[str, Any]) -> None:
        self.path = directory / f"{name}.bin"
        item = np.dtype(dtype)
        if entry["dtype"] != item.str:
            raise DataError(
                f"{self.path} contains items of type {entry['dtype']}, expected {item.str}; remove the cache directory "
                "to build it again."
            )
        self.count = int(entry["count"])
        num_bytes = self.count * item.itemsize
        self._check_size(self.path, num_bytes)
        checksums_path = directory / f"{name}.crc32c"
        self._check_size(checksums_path, -(-num_bytes // BLOCK_BYTES) * _CHECKSUMS.itemsize)
        raw = checksums_path.read_bytes()
        if checksum(raw) != entry["checksums_crc32c"]:
            raise DataError(f"{checksums_path} is damaged; remove {directory} to build it again.")
        self._checksums = np.frombuffer(raw, _CHECKSUMS)
        self._checked = np.zeros(len(self._checksums), np.bool_)
        self._items_per_block = BLOCK_BYTES // item.itemsize
        empty = np.zeros(0, item)
        self._values: AnyArray = (
            np.asarray(np.memmap(self.path, item, "r")) if self.count else empty
        )

    def read(self, start: int, stop: int) -> AnyArray:
        """Return a read-only view of the items from ``start`` to ``stop - 1``.

        Raises:
            DataError: a block has changed since it was written.
        """
        if stop > start:
            first, last = start // self._items_per_block, (stop - 1) // self._items_per_block
            if not self._checked[first : last + 1].all():
                self._check_blocks(first, last)
        return self._values[start:stop]

    def read_all(self) -> AnyArray:
        return self.read(0, self.count)

    def _check_blocks(self, first: int, last: int) -> None:
        for block in range(first, last + 1):
            if self._checked[block]:
                continue
            at = block * self._items_per_block
            if (
                checksum(self._values[at : at + self._items_per_block].tobytes())
                != self._checksums[block]
            ):
                raise DataError(
                    f"{self.path}: bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES - 1} changed since they "
                    f"were written (CRC32C differs); test the disk, and remove {self.path.parent} to build it again."
                )
            self._checked[block] = True

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
