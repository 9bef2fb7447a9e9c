"""The directory of a run's checkpoints: names, durable writes, scanning, removal, locks.

The directory contains:

- ``step_00000010/``: a checkpoint (``manifest.json``, ``rank_00000.safetensors``, ..., and attached
  files such as ``tokenizer.json``)
- ``step_00000020.tmp-<id>/``: an unfinished save, running or killed; never read
- ``step_00000010.replaced-<id>/``: the previous checkpoint of a step that was saved again
- ``step_00000010.deleting-<id>/``: a checkpoint that is being removed; never read
- ``latest``: the name of the newest checkpoint (`latest_hint.py`)
- ``shared.tmp-<id>``: shows at the start of a run that all ranks see the directory
- ``.lock``: locked (flock) by rank 0 during a save (`RootLock`)
- ``.run.lock``: locked by rank 0 until its process ends

The lock of the run is taken before training starts. So a directory that cannot be written is an error
at once, and not at the first save hours later. The lock also prevents two runs with the same
``--save``. They would publish their checkpoints in turns, and the newest could belong to either run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_packed.checkpoint.rank_agreement import ONE_PROCESS, Ranks, on_rank_0
from megatron_packed.checkpoint.sealed_json import Json
from megatron_packed.config import flag_names as flags
from megatron_packed.files.regular_files import StrPath
from megatron_packed.files.written_files import open_new, sync_path, write_all

LATEST = "latest"
PROBE = "shared"
"""Beginning of the name of a file by which all ranks check that they see the same directory."""

_SHARED = "use a shared file system on which all ranks have write permission and enough free space"
_WRONG_SIZE = "the file is missing or has another size than in the manifest"
_RESTORE = "use another checkpoint, or restore the file"
_ID = r"[0-9a-f]{12}"
_CHECKPOINT = re.compile(rf"step_(\d{{8,18}})(?:\.replaced-{_ID})?")
_LEFTOVER = re.compile(
    rf"(?:step_\d{{8,18}}|{LATEST}|STATUS\.json|{PROBE})\.(?:tmp|deleting)-{_ID}"
)


def step_name(step: int) -> str:
    """Return the directory name of a step: ``"step_00000010"`` for ``10``."""
    return f"step_{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None


def temporary_name(name: str, save_id: str) -> str:
    return f"{name}.tmp-{save_id}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Directory with a checkpoint's name: its ``manifest``, or the ``problem`` that makes it unusable."""

    path: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def named_step(self) -> int:
        """Step in the name of the directory; -1 if it has another name."""
        match = _CHECKPOINT.fullmatch(self.path.name)
        return -1 if match is None else int(match[1])

    @property
    def age(self) -> tuple[int, int, str]:
        """Sort key, highest for the newest checkpoint and lowest without a manifest."""
        if self.manifest is None:
            return (-1, -1, self.path.name)
        return (self.manifest.sequence, self.manifest.step, self.path.name)


def scan(root: Path) -> list[Candidate]:
    """List the directories under ``root`` that have a checkpoint's name, last published first.

    Only manifests are read. The order is that of publication, not of steps. After training resumes
    from an earlier checkpoint, abandoned checkpoints have higher steps but are older.
    """
    try:
        names = [entry.name for entry in os.scandir(root) if _CHECKPOINT.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            "the directory cannot be listed",
            path=root,
            expected="a directory of checkpoints",
            found=error.strerror or str(error),
            cure="check the path and its permissions",
        ) from None
    return sorted(
        (read_candidate(root / name) for name in names),
        key=lambda candidate: candidate.age,
        reverse=True,
    )


def read_candidate(path: Path) -> Candidate:
    """Read the manifest of one directory, and compare its step with the directory's name."""
    try:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(
                "this path is not a checkpoint",
                path=path,
                expected="a directory",
                found="a symbolic link" if path.is_symlink() else "no directory",
                cure="pass the directory itself",
            )
        manifest = read_manifest(path)
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None and int(match[1]) != manifest.step:
            raise CheckpointError(
                "the step in the manifest differs from the step in the directory's name",
                path=path / MANIFEST,
                expected=f"step {int(match[1])}",
                found=f"step {manifest.step}",
                cure="restore the directory's original name",
            )
    except (CheckpointError, OSError) as error:
        return Candidate(path=path, manifest=None, problem=str(error))
    return Candidate(path=path, manifest=manifest, problem=None)


def check_sizes(directory: Path, manifest: Manifest, *, saves: bool = False) -> None:
    """Compare the sizes of all files with the manifest, to find missing or truncated files.

    The comparison reads no file and takes milliseconds.

    Args:
        saves: True if all ranks have just written the files, for the words of the error.
    Raises:
        CheckpointError: a file is missing, is not a regular file, or has another size.
    """
    owners = {record.name: f"the file of rank {record.rank}" for record in manifest.files}
    for record in manifest.all_files:
        path = directory / record.name
        try:
            status = os.stat(path, follow_symlinks=False)
            size = f"{status.st_size} bytes"
        except OSError as error:
            status, size = None, error.strerror or str(error)
        if (
            status is None
            or status.st_size != record.size
            or path.is_symlink()
            or not path.is_file()
        ):
            owner = owners.get(record.name, record.name)
            raise CheckpointError(
                f"rank 0 finds {owner} missing or with another size" if saves else _WRONG_SIZE,
                path=path,
                expected=f"{record.size} bytes",
                found=size,
                cure=_SHARED if saves else _RESTORE,
            )


def write_durably(
    path: Path, data: bytes, save_id: str, on_site: Callable[[str], None], site: str
) -> None:
    """Write ``data`` to ``path`` atomically and durably.

    The data goes to a temporary file, which is synced and then renamed. The directory is synced
    last.
    """
    temporary = path.with_name(temporary_name(path.name, save_id))
    try:
        descriptor = open_new(temporary, mode=0o644)
        try:
            write_all(descriptor, data)
            on_site(f"{site}.written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        on_site(f"{site}.synced")
        os.rename(temporary, path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise
    on_site(f"{site}.renamed")
    sync_path(path.parent)
    on_site(f"{site}.durable")


def remove_leftovers(root: Path) -> None:
    """Remove the files of saves and deletions that were killed.

    The caller must hold the lock of the directory, so that no other process is writing there.
    """
    for entry in os.scandir(root):
        if _LEFTOVER.fullmatch(entry.name):
            _remove_tree(root / entry.name)


def remove_checkpoint(path: Path, save_id: str) -> None:
    """Rename a checkpoint to a temporary name, then delete it.

    A crash during the deletion leaves files to clean up, but no damaged checkpoint.
    """
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None, path
    doomed = path.with_name(f"step_{match[1]}.deleting-{save_id}")
    os.rename(path, doomed)
    sync_path(path.parent)
    _remove_tree(doomed)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


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
    ranks: Ranks = ONE_PROCESS,
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
    rank, held = ranks.rank, list[RootLock]()
    agree = partial(
        ranks.agree,
        what=f"preparing {root} for checkpoints",
        cure="training did not start",
    )
    try:
        agree(on_rank_0(rank, lambda: held.append(_lock(Path(root), patience))))
        if ranks.world_size > 1:
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
