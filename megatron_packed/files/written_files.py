"""Files that this project writes: created without following links, and replaced atomically.

Other users may write to the folders of a group. A link that they place under a name that a run
will write would redirect the run's output to another file. So temporary names are random, and a
new file is opened only if its name is free.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_MEMORY_FOLDER = "/dev/shm"  # noqa: S108  an ordinary file system in memory
_SHOWN_OF_NAME = 40
"""Characters of a file's name in its temporary name; a file name has at most 255 bytes."""

_RANDOM_DIGITS = 12
_ABANDONED_SECONDS = 24 * 3600.0


def open_new(path: str | os.PathLike[str], *, mode: int = 0o666, dir_fd: int | None = None) -> int:
    """Create a file and return its descriptor, for reading and writing.

    Args:
        mode: permissions, before those of the umask are removed.
        dir_fd: open directory to which a relative path refers.
    Raises:
        FileExistsError: the name is taken, also by a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode, dir_fd=dir_fd)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes to an open file; one call of the system may write only some."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Return a random path in the folder of ``path``."""
    return path.with_name(f".{path.name[:_SHOWN_OF_NAME]}.tmp-{uuid.uuid4().hex[:_RANDOM_DIGITS]}")


def open_temporary(path: Path) -> int:
    """Create a file with a name of `temporary_path`, locked until it is closed; return its
    descriptor.

    Raises:
        OSError: as in `open_new`.
    """
    descriptor = open_new(path)
    try_lock(descriptor)
    return descriptor


def remove_abandoned(path: Path) -> None:
    """Remove temporary files of ``path`` that killed processes left.

    A file that a living process writes is locked, and stays. A file system without locks keeps each
    file for a day.
    """
    name = glob.escape(path.name[:_SHOWN_OF_NAME])
    for left in path.parent.glob(f".{name}.tmp-{'[0-9a-f]' * _RANDOM_DIGITS}"):
        with suppress(OSError):  # it is gone, or belongs to another user
            descriptor = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                locked = try_lock(descriptor)
                old = time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_SECONDS
                if locked or (locked is None and old):
                    os.unlink(left)
            finally:
                os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock a file; return False if another process holds its lock, None if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name ``path`` when the block ends without an error.

    Readers see the previous file or the complete new file. A link at ``path`` is replaced and not
    followed; for a path that a user gave, pass the result of `resolve_output`.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    temporary = temporary_path(path)
    try:
        with os.fdopen(open_temporary(temporary), "w+b") as file:
            yield file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a small file with `replacing`.

    Args:
        durable: flush the data to the disk before the file gets its name.
    Raises:
        OSError: as in `replacing`.
    """
    with replacing(path) as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def resolve_output(path: str | os.PathLike[str]) -> Path:
    """Return the file that a user's path names, through all links; it may be missing.

    Raises:
        OSError: links form a loop, or the path names a device, a pipe, a file of the kernel or a
            standard stream of this process. A rename would remove its name from the machine, or
            separate the stream from its file.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)  # raises if links form a loop, which realpath ignores
    if _is_device(path):
        raise OSError(
            errno.EINVAL, "it names a device, a pipe or a standard stream, not a file", str(path)
        )
    return Path(os.path.realpath(path))


def _is_device(path: str | os.PathLike[str]) -> bool:
    """Return True if a path names a device, a pipe, a file of the kernel or a standard stream."""
    named, resolved = os.path.abspath(path), os.path.realpath(path)
    if any(_is_of_kernel(place) for place in (named, resolved)):
        return True
    try:
        status = os.stat(resolved)
    except OSError:
        return False
    if stat.S_ISDIR(status.st_mode):
        return False
    return not stat.S_ISREG(status.st_mode) or any(_is_stream(status, number) for number in (1, 2))


def _is_of_kernel(path: str) -> bool:
    in_memory = os.path.commonpath((path, _MEMORY_FOLDER)) == _MEMORY_FOLDER
    return not in_memory and any(
        os.path.commonpath((path, folder)) == folder for folder in _KERNEL_FOLDERS
    )


def _is_stream(status: os.stat_result, descriptor: int) -> bool:
    try:
        return os.path.samestat(status, os.fstat(descriptor))
    except OSError:  # the stream is closed
        return False
