"""Locks of a directory of checkpoints: one while a process saves, one as long as a run lives.

Without the second, a directory that cannot be written would be found out at the first save, hours
later, and two runs with one ``--save`` would publish their checkpoints in turns: each save is
whole, and the newest is of either run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import closing, suppress
from pathlib import Path

import torch.distributed as dist

from megatron_packed.checkpoint.directory import remove_leftovers
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.rank_agreement import Ranks, on_rank_0
from megatron_packed.config import flag_names as flags

LOCK = ".lock"
RUN_LOCK = ".run.lock"


class RootLock:
    """Keeps a second process from the same root; released by ``close`` or by the process's end.

    There are two: ``LOCK`` is held while a process saves, ``RUN_LOCK`` as long as a run lives.
    """

    def __init__(self, root: Path, name: str = LOCK) -> None:
        """
        Raises:
            CheckpointError: another process holds it.
        """
        self.path = path = root / name
        self.descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        self.warning: str | None = None
        """Set where the file system cannot lock."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self.descriptor)
                raise CheckpointError(
                    "another process is saving here"
                    if name == LOCK
                    else "another run writes its checkpoints here",
                    path=root,
                    expected="one job per checkpoint directory",
                    found=f"{path.name} is locked",
                    cure=f"give each job its own {flags.SAVE} directory",
                ) from None
            self.warning = f"{path} cannot be locked ({error.strerror}); leftovers of dead saves are not removed"

    def check(self) -> None:
        """Compare the file that is locked with the one that has its name now.

        Raises:
            CheckpointError: it is another file, or there is none, so that the lock keeps no other
                run out.
        """
        held = os.fstat(self.descriptor)
        try:
            there = os.stat(self.path, follow_symlinks=False)
            found = "another file"
        except OSError as error:
            there, found = None, error.strerror or str(error)
        if there is None or not os.path.samestat(held, there):
            raise CheckpointError(
                "is no longer the directory that this run locked: it was moved or replaced while the run lasted",
                path=self.path.parent,
                expected=f"the file {self.path.name} of this run",
                found=found,
                cure=f"start the run again with {flags.SAVE} and {flags.LOAD} naming the directory where it is now",
            )

    def close(self) -> None:
        os.close(self.descriptor)


def claim_directory(
    root: str | os.PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    patience: float = 5.0,
) -> RootLock | None:
    """Make ``root`` if it is missing and keep other runs out of it until this process ends; a
    collective of all ranks.

    What dead saves left there is removed. A file system without locks keeps no run out, and keeps
    leftovers.

    Args:
        patience: seconds that a run waits for the one before it: a killed process lets go only when
        it is gone.
    Returns:
        What rank 0 holds; None elsewhere.
    Raises:
        CheckpointError: on all ranks: the directory cannot be written, or another run is at work in
            it.
    """
    held: list[RootLock] = []
    Ranks(rank=rank, world_size=world_size, group=group).agree(
        on_rank_0(rank, lambda: held.append(_lock(Path(root), patience))),
        f"preparing {root} for checkpoints",
        cure="nothing was trained",
    )
    return held[0] if held else None


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
    with (
        suppress(CheckpointError),
        closing(RootLock(root)) as saving,
    ):  # a tool that saves here cleans up itself
        if saving.warning is None:
            remove_leftovers(root)
    return lock
