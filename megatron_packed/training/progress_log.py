"""``progress.txt`` in the folder of checkpoints, as Megatron-LM writes it: when jobs began, what
each save had reached.

Fields of a line are separated by tabs: time, ``Job ID``, ``# GPUs`` (processes), what happened, and
of a save how far the run was and how fast. Operations are counted from the lengths of real
documents, and tokens are real ones.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from megatron_packed.training.checkpoint_metadata import RunProgress

FILE_NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_FLOPS = "Floating-point operations: "


class ProgressLog:
    """Appends lines; one process alone uses it. Lines that cannot be written cost a warning, not
    the run.

    Args:
        folder: of checkpoints, which exists.
        world_size: processes of this job.
        begun: how far the run was before this job.
        warn: takes a sentence.
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
        """A checkpoint is there, or (``beside``) begins to be written beside training."""
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
        """A checkpoint that was written beside training is there."""
        self._append("Saved async checkpoint", f"Iteration: {iteration}")

    def _throughput(self, flops: float, since: datetime) -> float:
        """TFLOP/s of each process; time between jobs counts."""
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
                self._warn(f"{self._path} cannot be written: {error}; the run goes on without it.")

    def _first_job(self) -> tuple[datetime, float]:
        """When the first of the last jobs of this size began, and the FLOPs of the run before it."""
        first, flops = None, 0.0
        try:
            with open(self._path, encoding="utf-8", errors="replace", opener=_open_plain) as file:
                lines = file.read().splitlines()
        except OSError:  # what could not be written, of which there was a warning
            lines = []
        for line in lines:
            fields = line.split("\t")
            try:
                began = datetime.strptime(fields[0], _TIME)
                flops = next(
                    (float(one[len(_FLOPS) :]) for one in fields if one.startswith(_FLOPS)), flops
                )
            except ValueError:  # a line that a killed job cut off
                continue
            if f"# GPUs: {self._world_size}" not in fields:
                first = None
            elif fields[-1] == "Starting job" and first is None:
                first = (began, flops)
        return first or (self._started, self._flops_before)


def _open_plain(path: str, flags: int) -> int:
    """Open a regular file, through no link and without waiting for a pipe."""
    # The folder may be shared: a link could lead the job to write elsewhere, a pipe would hang it.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor
