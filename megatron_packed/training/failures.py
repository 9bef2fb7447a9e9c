"""Reports of failed runs: a sentence on standard error, STATUS.json, tracebacks of unexpected errors."""

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
from megatron_packed.checkpoint.errors import CheckpointError, printable_message
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.data.errors import DataError
from megatron_packed.distributed.failure_watch import Failure
from megatron_packed.distributed.hang_detection import DeviceHangError
from megatron_packed.files.written_files import open_new
from megatron_packed.resume.callback_state import CallbackError
from megatron_packed.training.under_launcher import report_failure_to_launcher

STATUS = "STATUS.json"
_LOST = "another process was lost"
_REPLICAS = "replicas"
_GPU_FAILED = ("uncorrectable ECC error", "uncorrectable NVLink error", "hardware stack error")
"""Texts of CUDA for errors of the hardware; another error of CUDA may be a defect of a kernel."""
_GLOO_IS_CUT_OFF = ("gloo/transport", "Application timeout caused pair closure")
"""Texts in errors of gloo: its source directory, and a timeout of another operation.

A collective gets the second text when another operation has closed the shared connection.
"""


class IsolationLeak(RuntimeError):
    """Error: the kernels in use let documents of a pack influence each other."""


def failure_of(error: Exception, *, rank: int | None, step: int | None) -> Failure:
    """Return the exit code and the sentence for the error that ended this rank.

    Args:
        rank: rank of this process; None if there is only one process.
        step: number of the current step, from 1; None before the first step.
    """
    code, kind, cure = _kind(error)
    if isinstance(error, CheckpointError) or kind == _REPLICAS:
        rank = None  # raised on all ranks with the same text, which names the ranks that failed
    text = str(error) or "the error has no message"
    if kind == _LOST:
        # The first sentence is the error. Libraries then guess a cause, often a wrong one; the
        # reports of the other ranks name the true one.
        text = text.split(". ")[0]
    where = ("" if rank is None else f" on rank {rank}") + (
        "" if step is None else f" in step {step}"
    )
    return Failure(
        exit_code=code, rank=rank, step=step, reason=f"{kind}{where}: {text.rstrip('.')}{cure}."
    )


def _kind(error: Exception) -> tuple[ExitCode, str, str]:
    """Return the exit code, the name and the cure of an error."""
    # A run that does not fail, and has no graphs and checks of replicas, imports none of these.
    from megatron_packed.cuda_graphs.audit import AuditMismatchError
    from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
    from megatron_packed.reporting.out_of_memory import CURE, is_out_of_memory
    from megatron_packed.training.replica_checks import ReplicaMismatchError

    error = _cause_of(error)
    named: dict[type[Exception], tuple[ExitCode, str]] = {
        ConfigError: (ExitCode.USAGE, "configuration error"),
        DataError: (ExitCode.DATA, "data error"),
        CheckpointError: (ExitCode.CHECKPOINT, "checkpoint error"),
        IsolationLeak: (ExitCode.LEAK, "isolation error"),
        GraphFallbackError: (ExitCode.FALLBACK, "CUDA graph fallback"),
        AuditMismatchError: (ExitCode.AUDIT, "audit"),
        ReplicaMismatchError: (ExitCode.AUDIT, _REPLICAS),
    }
    for kind, (code, name) in named.items():
        if isinstance(error, kind):
            return code, name, ""
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY, "out of memory", CURE
    if is_failed_gpu(error):
        return ExitCode.UNFORESEEN, "a GPU failed", ""
    if is_lost_connection(error):
        # `FailureWatch` adds the cause later: it collects the states of the other ranks.
        return ExitCode.UNFORESEEN, _LOST, ""
    return ExitCode.UNFORESEEN, f"unexpected {type(error).__name__}", ""


def is_lost_connection(error: Exception) -> bool:
    """Return True if the error means that another process has ended or hangs."""
    error = _cause_of(error)
    # Gloo raises plain RuntimeError; only the text, which holds a source path, identifies it.
    if isinstance(error, (dist.DistError, DeviceHangError)):
        return True
    return isinstance(error, RuntimeError) and any(
        fragment in str(error) for fragment in _GLOO_IS_CUT_OFF
    )


def _cause_of(error: Exception) -> Exception:
    """Return the error; for one of a callback, the error that the callback has raised."""
    if isinstance(error, CallbackError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def is_failed_gpu(error: Exception) -> bool:
    """Return True if CUDA reports a failure of the hardware."""
    error = _cause_of(error)
    return isinstance(error, RuntimeError) and any(
        fragment in str(error) for fragment in _GPU_FAILED
    )


def speak(error: Exception, status_folder: StatusFolder | None, failure: Failure) -> None:
    """Write the reason for the end of the run to standard error and ``STATUS.json``."""
    if failure.exit_code == ExitCode.UNFORESEEN and not is_lost_connection(error):
        traceback.print_exception(error)
    print(printable_message(failure.reason), file=sys.stderr, flush=True)
    write_status(status_folder, asdict(failure))
    report_failure_to_launcher(lost=is_lost_connection(error) or is_failed_gpu(error))


class StatusFolder:
    """Checkpoint directory, held open so that ``STATUS.json`` is written to it even if it is moved.

    After a move, another run's directory may have the old path; nothing is written there.
    """

    def __init__(self, path: str) -> None:
        """Open the directory, and create it if it does not exist.

        Raises:
            OSError: the directory cannot be created or opened.
        """
        # Every rank creates it: on a shared file system, a directory that rank 0 has created may
        # become visible to other machines only later.
        os.makedirs(path, exist_ok=True)
        self.path = Path(path) / STATUS
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def clear(self) -> None:
        """Remove the ``STATUS.json`` of the previous run.

        If this run is killed without writing the file, the old one would be taken for its result.

        Raises:
            CheckpointError: the file cannot be removed, for example because it is a folder.
        """
        try:
            os.unlink(STATUS, dir_fd=self.descriptor)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CheckpointError(
                f"the run cannot write its result there ({error.strerror})",
                path=self.path,
                cure="remove it, or give --save another folder",
            ) from None

    def close(self) -> None:
        os.close(self.descriptor)

    def write(self, text: str) -> None:
        """Replace ``STATUS.json`` atomically; links are not followed.

        Raises:
            OSError: the directory is gone, full or not writable.
        """
        # Write a temporary file and rename it: a reader sees the old file or the new file, never
        # half of a file.
        part = temporary_name(STATUS, uuid.uuid4().hex[:12])
        try:
            with os.fdopen(open_new(part, mode=0o644, dir_fd=self.descriptor), "w") as file:
                file.write(text)
            os.replace(part, STATUS, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with suppress(OSError):
                os.unlink(part, dir_fd=self.descriptor)
            raise


def mark_loss(save: str, exit_code: int, reason: str) -> None:
    """Write to ``STATUS.json`` of ``save`` that the run would go on after another start.

    A scheduler reads it. A launcher calls this, because rank 0 itself may have been killed.

    Args:
        save: folder of the run's checkpoints.
        exit_code: exit code of the job.
        reason: reason for its end, if no rank has written one.
    """
    folder = StatusFolder(save)
    try:
        status = json.loads(folder.path.read_text())
    except (OSError, ValueError):
        status = {"reason": reason}
    write_status(folder, {**status, "exit_code": exit_code, "lost": True})


def write_status(folder: StatusFolder | None, status: dict[str, object]) -> None:
    """Write ``STATUS.json`` to the checkpoint directory; if that fails, print the error.

    Args:
        folder: the checkpoint directory; None writes nothing.
        status: content of the file.
    """
    if folder is None:
        return
    try:
        folder.write(json.dumps(status) + "\n")
    except OSError as error:
        print(
            printable_message(f"{folder.path} cannot be written: {error}"),
            file=sys.stderr,
            flush=True,
        )
