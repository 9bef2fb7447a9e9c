"""The directory of a run's checkpoints: names, durable writes, scanning, removal.

The directory contains:

- ``step_00000010/``: a checkpoint (``manifest.json``, ``rank_00000.safetensors``, ..., and attached
  files such as ``tokenizer.json``)
- ``step_00000020.tmp-<id>/``: an unfinished save, running or killed; never read
- ``step_00000010.replaced-<id>/``: the previous checkpoint of a step that was saved again
- ``step_00000010.deleting-<id>/``: a checkpoint that is being removed; never read
- ``latest``: the name of the newest checkpoint (`latest_hint.py`)
- ``shared.tmp-<id>``: shows at the start of a run that all ranks see the directory
- ``.lock``: locked (flock) by rank 0 during a save (`directory_lock.py`)
- ``.run.lock``: locked by rank 0 until its process ends
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import MANIFEST, Manifest, read_manifest
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
