"""Array of the tokens of an indexed data set that reads from the file instead of a memory map."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed.data.errors import DataError
from megatron_packed.packed.array_types import AnyArray


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
