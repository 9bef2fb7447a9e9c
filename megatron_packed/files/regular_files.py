"""Opening of files that a user names or a download contains, and reading of their lines.

A pipe without a writer blocks for ever, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import IO

StrPath = str | os.PathLike[str]


def open_regular(path: StrPath, *, pipes: bool = False) -> IO[bytes]:
    """Open a regular file for reading; links are followed.

    Args:
        pipes: accept a pipe too, as a shell makes for ``<(command)``.
    Raises:
        OSError: the file cannot be opened, or is a directory, a pipe or a device.
    """
    if pipes and stat.S_ISFIFO(os.stat(path).st_mode):
        return open(path, "rb")
    # O_NONBLOCK: the open of a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "directory" if stat.S_ISDIR(mode) else "pipe or a device"
    raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file", os.fspath(path))


def limited_lines(file: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file with their ends.

    Raises:
        ValueError: a clause, because a line is longer than ``most_bytes``.
    """
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise ValueError(f"has a line of more than {most_bytes:,} bytes")
        yield line
