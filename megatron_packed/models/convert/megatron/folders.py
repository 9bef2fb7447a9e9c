"""Folders of checkpoints that Megatron, NeMo and Megatron-Bridge write, and their formats."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.files.regular_files import open_regular

METADATA_FILE, COMMON_FILE, BACKEND_FILE = ".metadata", "common.pt", "metadata.json"
TRAIN_STATE_FILE = "train_state.pt"
"""File of Megatron-Bridge with the iteration and the samples so far."""
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "torch_dist"
_WRITE_AGAIN = "load it with Megatron, and save it in the format torch_dist"
_EXPORT = f"export it as a Hugging Face model, and give that to convert {flags.FROM_HF}"


def find(directory: Path, iteration: int | None = None) -> Path:
    """Return the folder with ``.metadata`` under ``directory``.

    Raises:
        CheckpointError: there is none, or it has another format.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "is not a directory", path=directory, cure="name the folder that Megatron saved to"
        )
    chosen = _iteration_folder(directory, iteration)
    if (chosen / "weights").is_dir():  # NeMo and Megatron-Bridge
        chosen = chosen / "weights"
    _check_format(chosen)
    return chosen


def _iteration_folder(directory: Path, iteration: int | None) -> Path:
    tracker = directory / TRACKER
    if iteration is None and tracker.exists():
        text = _first_bytes(tracker, 32).decode("ascii", "replace").strip()
        if text != "release" and not text.isdecimal():
            raise CheckpointError(
                "names no iteration",
                path=tracker,
                cure=f"give the iteration with {flags.CKPT_STEP}",
            )
        name = text if text == "release" else f"iter_{int(text):07d}"
        return directory / name
    if iteration is not None:
        return directory / f"iter_{iteration:07d}"
    folders = sorted(path for path in directory.glob("iter_*") if path.is_dir())
    has_own = (directory / METADATA_FILE).exists() or (directory / "weights").is_dir()
    return directory if has_own or not folders else folders[-1]


def _check_format(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError("is missing", path=folder, cure="copy the folder again")
    names = sorted(path.name for path in folder.iterdir())
    backend = folder / BACKEND_FILE
    if any(name.startswith("mp_rank_") for name in names):
        raise CheckpointError("has the format torch", path=folder, cure=_WRITE_AGAIN)
    if "modelopt_state" in names:
        raise CheckpointError(
            "has modelopt_state, so its weights are quantised, pruned or distilled",
            path=folder,
            cure="save the checkpoint without ModelOpt",
        )
    # A checkpoint in the format zarr has no .metadata, so the name of the format comes first.
    if backend.exists():
        with damaged(backend):
            kind = str(json.loads(_first_bytes(backend, 65536))["sharded_backend"])[:40]
        kind = " ".join(kind.split())
        if kind != FORMAT:
            raise CheckpointError(f"has the format {kind}", path=folder, cure=_WRITE_AGAIN)
    if METADATA_FILE not in names:
        cure = "name the folder that Megatron saved to"
        raise CheckpointError(f"has no {METADATA_FILE}", path=folder, cure=cure)
    if not backend.exists():
        problem = f"has no {BACKEND_FILE}, so its format is fsdp_dtensor or torch_dcp"
        raise CheckpointError(problem, path=folder, cure=_EXPORT)


def open_plain(path: Path) -> IO[bytes]:
    """Open a plain file for reading; a link to one counts, as downloads consist of such links.

    Raises:
        CheckpointError: it is missing, or a pipe, a device or a directory, which may never end.
    """
    try:
        return open_regular(path)
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
        if error.errno == errno.ENOENT:
            problem = "is missing"
        elif error.errno == errno.EINVAL:
            problem = "is a directory, pipe or device, not a file"
        raise CheckpointError(problem, path=path, cure="copy the checkpoint again") from None


def _first_bytes(path: Path, count: int) -> bytes:
    with open_plain(path) as opened:
        return opened.read(count)


@contextmanager
def damaged(path: Path, name: str = "") -> Iterator[None]:
    """Report errors of reading damaged data as one sentence."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # damaged bytes make zipfile, json and torch fail in many ways
        raise damage(path, f"{name}: {error}" if name else str(error)) from None


def damage(path: Path, reason: str) -> CheckpointError:
    first = " ".join(reason.split())[:300]
    return CheckpointError(f"is damaged ({first})", path=path, cure="copy the checkpoint again")
