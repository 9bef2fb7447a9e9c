"""``progress.txt`` in the checkpoint folder, in Megatron-LM's format: starts of jobs, and saves.

Tabs separate the fields of a line: time, ``Job ID``, ``# GPUs`` (processes) and the event. The line
of a save adds the iteration, throughput, FLOPs and tokens. FLOPs follow from the lengths of real
documents, and padding tokens are not counted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from megatron_packed.checkpoint.run_metadata import RunProgress

FILE_NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_FLOPS = "Floating-point operations: "


class ProgressLog:
    """Writer of ``progress.txt``, used by one process only.

    If a line cannot be written, the run prints a warning and continues.

    Args:
        folder: existing folder of checkpoints.
        world_size: processes of this job.
        begun: progress of the run before this job.
        warn: called with the text of a warning.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        world_size: int,
        begun: RunProgress,
        warn: Callable[[str], None],
    ) -> None:
        self._path = Path(folder) / FILE_NAME
        self._world_size = world_size
        self._warn = warn
        self._flops_before = begun.flops
        self._started = datetime.now()
        self._failed = False
        self._append("Starting job")
        self._first_started, self._flops_at_first = self._first_job()

    def saved(self, progress: RunProgress, *, beside: bool) -> None:
        """Append a line for a saved checkpoint.

        Args:
            progress: progress of the run at the checkpoint.
            beside: the checkpoint is not complete yet; a background thread begins to write it.
        """
        job = self._throughput(progress.flops - self._flops_before, self._started)
        cumulative = self._throughput(progress.flops - self._flops_at_first, self._first_started)
        self._append(
            "Saving async checkpoint" if beside else "Saved checkpoint",
            f"Iteration: {progress.iteration}",
            f"Job throughput: {job:.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU",
            f"{_FLOPS}{progress.flops:.2e}",
            f"Tokens (in billions): {progress.consumed_tokens / 1e9:.2f}",
        )

    def published(self, iteration: int) -> None:
        """Append a line: the background thread has completed a checkpoint."""
        self._append("Saved async checkpoint", f"Iteration: {iteration}")

    def _throughput(self, flops: float, since: datetime) -> float:
        """Return TFLOP/s per process since a time; pauses between jobs count as time."""
        return flops / max((datetime.now() - since).total_seconds(), 1e-9) / 1e12 / self._world_size

    def _append(self, *fields: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        head = (datetime.now().strftime(_TIME), f"Job ID: {job}", f"# GPUs: {self._world_size}")
        try:
            with open(self._path, "a", encoding="utf-8", opener=_open_plain) as file:
                file.write("\t".join((*head, *fields)) + "\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._warn(
                    f"{self._path} cannot be written: {error}; the run continues without this file."
                )

    def _first_job(self) -> tuple[datetime, float]:
        """Return the start of the period for cumulative throughput, and the run's FLOPs before it.

        The period begins with the oldest job after which no job had another number of processes.
        """
        first, flops = None, 0.0
        try:
            with open(self._path, encoding="utf-8", errors="replace", opener=_open_plain) as file:
                lines = file.read().splitlines()
        except OSError:  # the file could not be written either, and a warning was printed
            lines = []
        for line in lines:
            fields = line.split("\t")
            try:
                began = datetime.strptime(fields[0], _TIME)
                flops = next(
                    (float(part[len(_FLOPS) :]) for part in fields if part.startswith(_FLOPS)),
                    flops,
                )
            except ValueError:  # a line that a killed job cut off
                continue
            if f"# GPUs: {self._world_size}" not in fields:
                first = None
            elif fields[-1] == "Starting job" and first is None:
                first = (began, flops)
        return first or (self._started, self._flops_before)


def _open_plain(path: str, flags: int) -> int:
    """Open a file that is no link and no pipe.

    Raises:
        OSError: the path is a link or no regular file.
    """
    # Other users may write to the folder: a link would redirect the job's output to another file,
    # and opening a pipe would hang the job.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor
