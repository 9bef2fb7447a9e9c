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
from typing import Protocol

from megatron_packed.config.flag_names import TENSORBOARD_DIR
from megatron_packed.reporting.log_file import NO_LINES, STARTS, EarlierLines, LogFile
from megatron_packed.reporting.metric_names import answers_text, tracked


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
        file: the log, which the run has begun (`LogFile.begin`).
        opening: additional fields of the first line that is written. Fields whose values are already
            in the earlier lines are left out. The entries of `STARTS` follow those of earlier lines.
        earlier: the lines that this run continues.
    """

    def __init__(
        self,
        file: LogFile,
        opening: Mapping[str, object] | None = None,
        earlier: EarlierLines = NO_LINES,
    ) -> None:
        self._file = file
        self._has_metrics = False
        new = json.loads(json.dumps(dict(opening or {})))
        said: dict[str, object] = {}
        for record in earlier.records:
            said |= {name: record[name] for name in new if name in record}
        if STARTS in new:
            new[STARTS] = [*earlier.starts, *new[STARTS]]
        self._opening = {name: value for name, value in new.items() if said.get(name) != value}

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
        complete = {**record, **self._opening}
        line = (
            json.dumps(
                {key: _finite(value) for key, value in complete.items()}, allow_nan=False
            ).encode()
            + b"\n"
        )
        if not self._file.append(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.path))
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
                f"{TENSORBOARD_DIR} {folder} needs TensorBoard: pip install 'megatron-packed[log]' ({error})."
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
