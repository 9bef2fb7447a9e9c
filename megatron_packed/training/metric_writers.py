"""Writers of a run's numbers: JSONL, and TensorBoard when a folder is given.

Services are in ``experiment_trackers.py``.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

_LARGEST_LOSS = 20.0
"""Nats per token; perplexities are shown up to e to the power of it."""


class Writer(Protocol):
    def write(self, record: dict[str, object]) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


def _finite(value: object) -> object:
    """JSON has no NaN: a non-finite number becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class JsonlWriter:
    """Appends one object per line, each in a single write, so that a killed run leaves whole lines.

    Args:
        path: the file; its folder is made. A line cut off by a killed run is removed before the
        first write.
        first_iteration: lines of this step and later are from a run that was killed after its last
            checkpoint; they are dropped, so that a resumed run's file reads like the file of a run
            that was never stopped.
        opening: what the first line has beside the numbers of its step, where the lines that are
            kept do not say the same.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        first_iteration: int,
        opening: Mapping[str, object] | None = None,
    ) -> None:
        self._path = Path(path)
        self._opening = json.loads(json.dumps(dict(opening or {})))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_lines_before(first_iteration)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  one write per line, no buffer

    def _keep_lines_before(self, first_iteration: int) -> None:
        if not self._path.exists():
            return
        kept = []
        said: dict[str, object] = {}
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line)
                iteration = record["iteration"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if line.endswith(b"\n") and iteration < first_iteration:
                kept.append(line)
                said |= {name: record[name] for name in self._opening if name in record}
        self._opening = {
            name: value for name, value in self._opening.items() if said.get(name) != value
        }
        # Replaced in one step: a run that is killed here must not lose its log.
        part = self._path.with_name(self._path.name + ".part")
        part.write_bytes(b"".join(kept))
        os.replace(part, self._path)

    def write(self, record: dict[str, object]) -> None:
        """
        Raises:
            OSError: the line could not be written; the file holds whole lines still.
        """
        # Asked before the write, to cut off half a line when the disk is full.
        size = os.fstat(self._file.fileno()).st_size
        whole = {**record, **self._opening}
        line = (
            json.dumps(
                {key: _finite(value) for key, value in whole.items()}, allow_nan=False
            ).encode()
            + b"\n"
        )
        written = self._file.write(line)
        if written != len(line):  # a disk that has just become full takes what fits
            os.ftruncate(self._file.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        # Said once: the reader takes it from any line.
        self._opening = {}

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard.

    Args:
        first_iteration: what the folder holds of this step and later is no longer shown, as in
        `JsonlWriter`.
    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: str, first_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir {folder} needs TensorBoard: pip install 'megatron-packed[log]' ({error})."
            ) from error
        # Steps that the run does again would be drawn twice.
        self._writer = SummaryWriter(folder, purge_step=first_iteration)

    def write(self, record: dict[str, object]) -> None:
        step = int(record["iteration"])  # type: ignore[call-overload]
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "iteration":
                self._writer.add_scalar(name, value, step)
        for name in ("valid", "test"):
            if isinstance(loss := record.get(f"{name}_loss"), float):
                self._writer.add_scalar(
                    f"{name}_perplexity", math.exp(min(loss, _LARGEST_LOSS)), step
                )

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()
