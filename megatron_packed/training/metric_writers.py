"""Writers of a run's metrics to a JSONL file and to TensorBoard.

Writers to tracking services are in ``experiment_trackers.py``.
"""

from __future__ import annotations

import errno
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_packed.training.metric_names import answers_text, tracked

STARTS = "starts"
"""Field of the log: one entry for each start of the run, with the step before it and the time."""


class Writer(Protocol):
    def write(self, record: dict[str, object]) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


def _finite(value: object) -> object:
    """Return a value for JSON: a non-finite number becomes text, since JSON cannot express it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class JsonlWriter:
    """Writer of a JSONL file: one object per line, each line by a single write.

    Single writes keep lines complete if the run is killed.

    Args:
        path: the file; its folder is created. A line that a killed run has cut off is removed
            before the first write.
        first_iteration: existing lines of this step and later are dropped. They are from a run that
            was killed after its last checkpoint, and this run repeats their steps.
        opening: additional fields of the first line that is written. Fields whose values are already
            in the existing lines are left out. The entries of `STARTS` follow those of the existing
            lines, dropped lines included.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        first_iteration: int,
        opening: Mapping[str, object] | None = None,
    ) -> None:
        self._path = Path(path)
        self._has_metrics = False
        self._opening = json.loads(json.dumps(dict(opening or {})))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_lines_before(first_iteration)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  one write per line, no buffer

    def _keep_lines_before(self, first_iteration: int) -> None:
        if not self._path.exists():
            return
        kept = []
        said: dict[str, object] = {}
        starts: list[object] = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line)
                iteration = record["iteration"]
                starts = record.get(STARTS, starts)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if line.endswith(b"\n") and iteration < first_iteration:
                kept.append(line)
                said |= {name: record[name] for name in self._opening if name in record}
        if STARTS in self._opening:
            self._opening[STARTS] = [*starts, *self._opening[STARTS]]
        self._opening = {
            name: value for name, value in self._opening.items() if said.get(name) != value
        }
        # Replace the file by a rename: if the run is killed here, the old log must remain.
        part = self._path.with_name(self._path.name + ".part")
        part.write_bytes(b"".join(kept))
        os.replace(part, self._path)

    def write(self, record: dict[str, object]) -> None:
        """Append a record of a step or an evaluation as one line.

        Raises:
            OSError: the line could not be written; the file still has only complete lines.
        """
        self._has_metrics = True
        self._append(record)

    def note(self, record: dict[str, object]) -> None:
        """Append a record that holds no metrics, for example that of a saved checkpoint.

        Before the first metrics nothing is written, so that a finished run that is started again
        does not change its log.

        Raises:
            OSError: as in `write`.
        """
        if self._has_metrics:
            self._append(record)

    def _append(self, record: dict[str, object]) -> None:
        # Note the size before the write, to cut off a partial line if the disk is full.
        size = os.fstat(self._file.fileno()).st_size
        whole = {**record, **self._opening}
        line = (
            json.dumps(
                {key: _finite(value) for key, value in whole.items()}, allow_nan=False
            ).encode()
            + b"\n"
        )
        written = self._file.write(line)
        if written != len(line):  # the disk has become full and has taken only a part of the line
            os.ftruncate(self._file.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        # Written only once: readers accept these fields in any line.
        self._opening = {}

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


class TensorBoardWriter:
    """Writer of scalars to TensorBoard.

    Args:
        folder: folder of the event files.
        first_iteration: existing values of this step and later are no longer shown, as in
            `JsonlWriter`.
        flags: flags of the run, which TensorBoard shows as a text.
    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: str, first_iteration: int, flags: Sequence[str] = ()) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir {folder} needs TensorBoard: pip install 'megatron-packed[log]' ({error})."
            ) from error
        # Without a purge, steps that a resumed run repeats would be drawn twice.
        self._writer = SummaryWriter(folder, purge_step=first_iteration)
        if flags:
            # Markdown: four spaces mark a block of code, which keeps its lines.
            self._writer.add_text(
                "flags", "\n".join(f"    {flag}" for flag in flags), first_iteration
            )

    def write(self, record: dict[str, object]) -> None:
        step = int(record["iteration"])  # type: ignore[call-overload]
        for name, value in tracked(record).items():
            self._writer.add_scalar(name, value, step)
        if text := answers_text(record):
            self._add_text("answers", text, step)

    def _add_text(self, name: str, text: str, step: int) -> None:
        # Markdown: four spaces mark a block of code, which keeps its lines.
        self._writer.add_text(name, textwrap.indent(text, "    "), step)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()
