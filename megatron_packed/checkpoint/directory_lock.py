"""Locks of a directory of checkpoints: one is held during a save, one during a whole run.

The lock of the run is taken before training starts. So a directory that cannot be written is an error
at once, and not at the first save hours later. The lock also prevents two runs with the same
``--save``. They would publish their checkpoints in turns, and the newest could belong to either run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_packed.checkpoint.directory import PROBE, remove_leftovers, temporary_name
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.rank_agreement import Ranks, on_rank_0
from megatron_packed.checkpoint.sealed_json import Json
from megatron_packed.config import flag_names as flags
from megatron_packed.files.regular_files import StrPath
from megatron_packed.files.written_files import open_new

LOCK = ".lock"
RUN_LOCK = ".run.lock"


class RootLock:
    """Lock that excludes other processes from a root; ``close`` or the end of the process frees it.

    The file ``LOCK`` is locked during a save, the file ``RUN_LOCK`` during a run.
    """

    def __init__(self, root: Path, name: str = LOCK) -> None:
        """Open and lock the file ``name`` in ``root``.

        Raises:
            CheckpointError: another process holds the lock.
        """
        self.path = path = root / name
        self.descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        self.warning: str | None = None
        """Message if the file system does not support locks, else None."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self.descriptor)
                raise CheckpointError(
                    "another process is saving a checkpoint in this directory"
                    if name == LOCK
                    else "another run writes its checkpoints to this directory",
                    path=root,
                    expected="one job per checkpoint directory",
                    found=f"{path.name} is locked",
                    cure=f"give each job its own {flags.SAVE} directory",
                ) from None
            self.warning = (
                f"{path} cannot be locked ({error.strerror}); files of killed saves are not removed"
            )

    def check(self) -> None:
        """Check that the locked file still exists under its path.

        Raises:
            CheckpointError: the path is missing or names another file, so the lock no longer
                excludes other runs.
        """
        held = os.fstat(self.descriptor)
        try:
            status = os.stat(self.path, follow_symlinks=False)
            actual = "another file"
        except OSError as error:
            status, actual = None, error.strerror or str(error)
        if status is None or not os.path.samestat(held, status):
            raise CheckpointError(
                "this is no longer the directory that this run locked; it was moved or replaced during the run",
                path=self.path.parent,
                expected=f"the file {self.path.name} of this run",
                found=actual,
                cure=f"restart the run with {flags.SAVE} and {flags.LOAD} set to the directory's new path",
            )

    def close(self) -> None:
        os.close(self.descriptor)


def claim_directory(
    root: StrPath,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    patience: float = 5.0,
) -> RootLock | None:
    """Create ``root`` if necessary, and lock it for this run until the process of rank 0 ends.

    A collective of all ranks. Files of killed saves are removed from ``root``. On a file system
    without locks, other runs are not excluded and these files are not removed.

    Args:
        patience: seconds to wait for the lock of a previous run, and on other ranks for files of
            rank 0. A killed process holds its lock until the process is gone.
    Returns:
        The lock on rank 0, None on other ranks.
    Raises:
        CheckpointError: on all ranks: the directory cannot be written, another run uses it, or it
            is another directory on one of the ranks.
    """
    held: list[RootLock] = []
    agree = partial(
        Ranks(rank=rank, world_size=world_size, group=group).agree,
        what=f"preparing {root} for checkpoints",
        cure="training did not start",
    )
    try:
        agree(on_rank_0(rank, lambda: held.append(_lock(Path(root), patience))))
        if world_size > 1:
            _check_shared(Path(root), rank, agree, patience)
    except CheckpointError:
        for lock in held:
            lock.close()
        raise
    return held[0] if held else None


def _check_shared(
    root: Path, rank: int, agree: Callable[[Callable[[], Json]], list[Json]], patience: float
) -> None:
    """Check that all ranks see one directory, by a file with a random name that rank 0 creates.

    A checkpoint is complete only if all ranks write to one directory. Without the check, machines
    with folders of their own would train up to the first save.
    """
    probe = root / temporary_name(PROBE, uuid.uuid4().hex[:12])
    try:
        name = agree(on_rank_0(rank, lambda: _create_probe(probe)))[0]
        agree(lambda: _find(root, str(name), patience))
    finally:
        if rank == 0:
            with suppress(OSError):
                probe.unlink()


def _create_probe(probe: Path) -> str:
    os.close(open_new(probe, mode=0o644))
    return probe.name


def _find(root: Path, name: str, patience: float) -> None:
    # A network file system may show a directory and its files some seconds late. An attempt to
    # create the directory makes it ask its server.
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    while not os.path.lexists(root / name):
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"on {socket.gethostname()} this is not the directory of rank 0",
                path=root.absolute(),
                cure=f"give {flags.SAVE} a directory on a file system that all machines share",
            )
        time.sleep(0.1)


def _lock(root: Path, patience: float) -> RootLock:
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    while True:
        try:
            lock = RootLock(root, RUN_LOCK)
            break
        except CheckpointError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)
    # If a tool is saving to this directory, the tool holds the lock and removes leftovers itself.
    with suppress(CheckpointError), closing(RootLock(root)) as saving:
        if saving.warning is None:
            remove_leftovers(root)
    return lock
