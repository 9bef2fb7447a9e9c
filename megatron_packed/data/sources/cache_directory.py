"""Cache directory that one process builds once and any number of processes and nodes then read.

[Note: publication of a cache directory]
1. The process that holds the lock (``flock`` on ``<name>.lock``) builds into a temporary directory
   next to the final directory. The other processes wait. The kernel releases the lock if its owner
   dies.
2. The builder flushes files and directories to the disk, then renames the temporary directory. A
   directory with the final name is therefore complete, even if a builder was killed.
3. If locks do not work (another node on a file system without locks), two processes may build at
   once. The rename of the second process fails, and the second process uses the directory of the
   first. The lock only saves work; correctness does not depend on the lock.
4. A build that fails because of the data writes its message to ``<name>.failed``. The waiting
   processes raise the same message instead of building one after the other. A later run tries
   again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import DataError, printable
from megatron_packed.files.written_files import remove_abandoned, sync_path, write_file

_T = TypeVar("_T")
_STALE_SECONDS = 24 * 3600.0
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
_SAY_EVERY = 30.0
_RANK_0_FIRST = 0.3
"""Seconds for which other ranks let rank 0 take the lock, because rank 0 prints the progress."""


def opened(directory: Path, kind: Callable[[Path], _T]) -> _T | None:
    """Open a cache directory; return None if it is missing or invalid."""
    try:
        return kind(directory)
    except DataError:
        return None


def open_or_build(
    final: Path,
    kind: Callable[[Path], _T],
    *,
    build: Callable[[Path], None],
    log: Callable[[str], None],
) -> _T:
    """Open the directory ``final``. If it is missing or invalid, build it first, or wait until another
    process has built it.

    See [Note: publication of a cache directory].

    Args:
        kind: opens a directory. It raises `DataError` if the directory is missing or invalid.
        build: fills an empty directory. If it raises `DataError`, all waiting processes raise the
            same message.
        log: receives a line when this process waits or builds a damaged cache again.
    Raises:
        DataError: ``build`` failed in this process or in the process that built the directory, or
            the cache cannot be written.
    """
    if (content := opened(final, kind)) is not None:
        return content
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{final.parent} cannot be created: {error.strerror}; set {flags.DATA_CACHE_PATH} to another directory."
        ) from None
    failure_before = _failure(final)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_RANK_0_FIRST)
    wait, said = _FIRST_WAIT, time.monotonic()
    while True:
        with _try_lock(final) as owned:
            if owned:
                if (content := opened(final, kind)) is not None:
                    return content
                _build_and_publish(final, kind, build, log)
                return kind(final)
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
        failure = _failure(final)
        if failure is not None and failure != failure_before:
            raise DataError(failure[1])
        if time.monotonic() - said > _SAY_EVERY:
            log(f"waiting for {_owner(final)} to build {final}")
            said = time.monotonic()


def _build_and_publish(
    final: Path,
    kind: Callable[[Path], object],
    build: Callable[[Path], None],
    log: Callable[[str], None],
) -> None:
    _remove_stale(final)
    if final.exists():
        log(f"{final} is damaged or was written by another version; building it again")
    temporary = final.with_name(
        f".{final.name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    )
    try:
        temporary.mkdir()
        build(temporary)
        for file in temporary.iterdir():
            sync_path(file)
        sync_path(temporary)
        _publish(temporary, final, kind)
    except DataError as error:
        # Without the file, waiting processes build too, and raise the same error.
        with suppress(OSError):
            write_file(
                _beside(final, "failed"),
                f"{uuid.uuid4().hex}\n{error}".encode(),
                durable=True,
            )
        raise
    except OSError as error:
        raise DataError(
            f"{final} cannot be written: {error.strerror or error}; free disk space or set {flags.DATA_CACHE_PATH} to "
            "another directory."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _beside(final, "failed").unlink(missing_ok=True)


def _publish(temporary: Path, final: Path, kind: Callable[[Path], object]) -> None:
    for _ in range(3):
        try:
            os.rename(temporary, final)
            sync_path(final.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if opened(final, kind) is not None:  # another node published a valid directory first
            return
        aside = final.with_name(f".{final.name}.bad-{uuid.uuid4().hex[:8]}")
        os.rename(final, aside)
        shutil.rmtree(aside, ignore_errors=True)
    raise DataError(
        f"{final} keeps changing while it is being replaced; give each run its own {flags.DATA_CACHE_PATH}."
    )


def _remove_stale(final: Path) -> None:
    """Remove temporary files and directories of killed builders.

    This process holds the lock, so a live builder can only be on another node. Directories of other
    nodes are removed after 24 hours.
    """
    for left in final.parent.glob(f".{final.name}.tmp-*"):
        host, pid, _ = ["", "", *left.name.split(".tmp-", 1)[1].rsplit("-", 2)][-3:]
        try:
            old = time.time() - left.stat().st_mtime > _STALE_SECONDS
        except OSError:
            continue
        if old or (host == socket.gethostname() and pid.isdigit() and not _is_alive(int(pid))):
            shutil.rmtree(left, ignore_errors=True)
    for aside in final.parent.glob(f".{final.name}.bad-*"):  # see `_publish`
        shutil.rmtree(aside, ignore_errors=True)
    remove_abandoned(_beside(final, "failed"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _try_lock(final: Path) -> Iterator[bool]:
    """Yield whether this process may build; True also on file systems without locks."""
    path = _beside(final, "lock")
    try:
        # Groups share the folder: a link under this name would let the owner be written through it.
        opening = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, opening, 0o666)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}; set {flags.DATA_CACHE_PATH} to another directory."
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # the file system has no locks; see point 3 of the note above
        owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        # Only messages name the owner, so a full disk does not end the run here.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner, 0)
        yield True
    finally:
        os.close(descriptor)


def _owner(final: Path) -> str:
    try:
        owner = json.loads(_beside(final, "lock").read_bytes())
        return printable(f"process {owner['pid']} on {owner['host']}")
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(f"{final.name}.{suffix}")


def _failure(final: Path) -> tuple[str, str] | None:
    """Return ``(token, message)`` of the last failed build; each failure has another random token."""
    try:
        token, _, sentence = _beside(final, "failed").read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return token, sentence
