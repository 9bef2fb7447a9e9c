"""Failures of a run: one sentence on standard error, STATUS.json, a traceback of unforeseen ones."""

from __future__ import annotations

import json
import os
import sys
import traceback
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_packed.checkpoint.directory import temporary_name
from megatron_packed.checkpoint.errors import CheckpointError, printable
from megatron_packed.config.errors import ConfigError
from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.data.errors import DataError
from megatron_packed.distributed.failure_watch import Failure
from megatron_packed.distributed.hang_detection import DeviceHangError
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.out_of_memory import CURE, is_out_of_memory
from megatron_packed.training.replica_checks import ReplicaMismatchError

STATUS = "STATUS.json"
_LOST = "another process was lost"
_GLOO_IS_CUT_OFF = ("gloo/transport", "Application timeout caused pair closure")
"""The source file of most errors, and what a collective is told whose connection another one gave
up.
"""


class IsolationLeak(RuntimeError):
    """Documents of a pack can see each other through the kernels in use."""


def failure_of(error: Exception, *, rank: int | None, step: int | None) -> Failure:
    """Exit code and sentence for what ended this rank.

    Args:
        rank: of this process; None where there is only one.
        step: the step under way, from 1; None before the first.
    """
    code, kind, cure = _kind(error)
    if isinstance(error, (CheckpointError, ReplicaMismatchError)):
        rank = None  # these end alike on all ranks, and name those that failed
    text = str(error) or "no message"
    if kind == _LOST:
        # What libraries guess about the cause is worth less than what is known here.
        text = text.split(". ")[0]
    where = ("" if rank is None else f" on rank {rank}") + (
        "" if step is None else f" in step {step}"
    )
    return Failure(
        exit_code=code, rank=rank, step=step, reason=f"{kind}{where}: {text.rstrip('.')}{cure}."
    )


def _kind(error: Exception) -> tuple[ExitCode, str, str]:
    """Exit code, name and cure of an error."""
    if isinstance(error, ConfigError):
        return ExitCode.USAGE, "configuration error", ""
    if isinstance(error, DataError):
        return ExitCode.DATA, "data error", ""
    if isinstance(error, CheckpointError):
        return ExitCode.CHECKPOINT, "checkpoint error", ""
    if isinstance(error, IsolationLeak):
        return ExitCode.LEAK, "isolation error", ""
    if isinstance(error, GraphFallbackError):
        return ExitCode.FALLBACK, "CUDA graph fallback", ""
    if isinstance(error, AuditMismatchError):
        return ExitCode.AUDIT, "audit", ""
    if isinstance(error, ReplicaMismatchError):
        return ExitCode.AUDIT, "replicas", ""
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY, "out of memory", CURE
    if is_lost_connection(error):
        # What is known of it is found out by asking the other ranks.
        return ExitCode.UNFORESEEN, _LOST, ""
    return ExitCode.UNFORESEEN, f"unforeseen {type(error).__name__}", ""


def is_lost_connection(error: Exception) -> bool:
    """Return whether another process is gone or hangs."""
    # Gloo's errors have no class of their own, but name its source file.
    if isinstance(error, (dist.DistError, DeviceHangError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _GLOO_IS_CUT_OFF
    )


def speak(error: Exception, status_folder: StatusFolder | None, failure: Failure) -> None:
    """Says on standard error, and in ``STATUS.json``, why the run ends here."""
    if failure.exit_code == ExitCode.UNFORESEEN and not is_lost_connection(error):
        traceback.print_exception(error)
    print(printable(failure.reason), file=sys.stderr, flush=True)
    write_status(status_folder, asdict(failure))


class StatusFolder:
    """A directory of checkpoints, held open for its ``STATUS.json``: the file stays with it if the
    directory is moved.

    What stands in its place by then is another run's.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            OSError: there is no such directory, and it cannot be made.
        """
        # On other machines a file system may show late what rank 0 has made.
        os.makedirs(path, exist_ok=True)
        self.path = Path(path) / STATUS
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def clear(self) -> None:
        """Remove what the run before wrote: a run that is killed must not seem to have ended as
        that one did.
        """
        with suppress(FileNotFoundError):
            os.unlink(STATUS, dir_fd=self.descriptor)

    def write(self, text: str) -> None:
        """Replace ``STATUS.json`` in one step, writing through no link.

        Raises:
            OSError: the directory is gone, full or not writable.
        """
        # A reader sees the old file or the new one, never half of one.
        part = temporary_name(STATUS, uuid.uuid4().hex[:12])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(part, flags, 0o644, dir_fd=self.descriptor), "w") as file:
                file.write(text)
            os.replace(part, STATUS, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with suppress(OSError):
                os.unlink(part, dir_fd=self.descriptor)
            raise


def write_status(folder: StatusFolder | None, status: dict[str, object]) -> None:
    """``STATUS.json`` beside the checkpoints (``folder`` None: nowhere); what is in its way is
    said, not raised.
    """
    if folder is None:
        return
    try:
        folder.write(json.dumps(status) + "\n")
    except OSError as error:
        print(f"{folder.path} cannot be written: {error}", file=sys.stderr, flush=True)
