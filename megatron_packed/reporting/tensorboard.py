"""TensorBoard events of a run: their folder, and their writer.

TensorBoard hides earlier events of a folder from the step on at which a later writer begins. So each
run needs a folder of its own. The file ``run.json`` in it has the identity of the run.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from megatron_packed.config.flag_names import TENSORBOARD_DIR
from megatron_packed.files.written_files import open_new
from megatron_packed.reporting.log_file import RunIdentity
from megatron_packed.reporting.metric_names import answers_text, tracked

_OWNER = "run.json"


def events_folder(requested: str, mine: RunIdentity, *, resumed: bool) -> Path:
    """Return the folder of this run's events: the given one, or ``run_2``, ``run_3``, ... in it if
    other runs have used the given one.

    Args:
        requested: value of ``--tensorboard-dir``.
        mine: identity of this run.
        resumed: True if the run continues from a checkpoint. It then also continues events of an
            earlier version, which have no owner.
    Raises:
        OSError: no folder can be created.
    """
    for number in count(1):
        place = Path(requested) if number == 1 else Path(requested) / f"run_{number}"
        place.mkdir(parents=True, exist_ok=True)
        if _claim(place, mine, resumed):
            return place
    raise AssertionError("unreachable")


def _claim(place: Path, mine: RunIdentity, resumed: bool) -> bool:
    """Return True if a folder is this run's now."""
    owner = place / _OWNER
    if not owner.exists() and not resumed and any(place.glob("*tfevents*")):
        return False
    try:
        with os.fdopen(open_new(owner), "w") as file:
            json.dump({"id": mine.run_id, "folder": mine.folder}, file)
        return True
    except FileExistsError:
        return _is_of(owner, mine)


def _is_of(owner: Path, mine: RunIdentity) -> bool:
    try:
        stored = json.loads(owner.read_bytes())
        run_id, folder = stored["id"], stored["folder"]
    except (OSError, ValueError, TypeError, KeyError):  # damaged: it may be of any run
        return False
    if run_id != mine.run_id:
        return False
    # Two runs with one id go on from the same checkpoint, but not if the folder was moved.
    return mine.shares_folder(folder) or not os.path.isdir(folder)


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
            self._add_text("flags", "\n".join(flags), first_iteration)

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
