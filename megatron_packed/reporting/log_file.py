"""File of ``--log-jsonl``: which run it belongs to, its lock, the lines that a run continues, writer.

[Note: whose log it is]
The field ``run`` of a log has the ``id`` of the run, which all its checkpoints share. It also has
the ``folder`` of the checkpoints and the path of the ``log``. A run that finds lines in its log does
one of three things:

- It resumes from a checkpoint with the log's id: the lines up to the checkpoint stay, and later
  lines go, since the run repeats their steps. If another folder still holds checkpoints of the
  log's run, the later lines are the only record of their steps, and the run is refused. A copy of
  a log, for example in a copied folder, is shortened.
- It has another id, and the log has the same folder or none: a job that was killed before its
  first save was started again. The log gets a numbered name and the run begins a new one.
- Otherwise it is the log of another run, and the run is refused.

Logs of earlier versions have no id. The lines of the checkpoint's step decide: see
`OldLines.matches`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.directory import scan
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.run import RunConfig
from megatron_packed.files.written_files import open_new, replacing, resolve_output, try_lock

STARTS = "starts"
"""Field of the log: one entry for each start of the run, with the step before it and the time."""


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run."""

    run_id: str
    folder: str | None
    """Resolved folder of ``--save``; None without it."""
    log: str | None = None
    """Resolved file of ``--log-jsonl``; None without it."""

    @classmethod
    def from_config(cls, run_id: str, config: RunConfig) -> RunIdentity:
        """Build the identity of a run with these options."""
        save, log = (
            None if path is None else os.path.realpath(path)
            for path in (config.checkpoint.save, config.logging.log_jsonl)
        )
        return cls(run_id, save, log)

    def shares_folder(self, folder: str | None) -> bool:
        """Return True if a run with this folder may be an earlier start of this run."""
        return folder is None or (self.folder is not None and _is_same(folder, self.folder))

    def copied(self, original: RunIdentity) -> bool:
        """Return True if this run's log is a copy of a file that still exists."""
        if self.log is None or original.log is None:
            return False
        return os.path.exists(original.log) and not _is_same(original.log, self.log)


def _is_same(place: str, other: str) -> bool:
    """Return True for equal paths, and for two paths of one file or folder, as of two mounts."""
    with suppress(OSError):
        return place == other or os.path.samefile(place, other)
    return False


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Checkpoint from which a run continues."""

    iteration: int
    consumed_tokens: int


class Action(Enum):
    """Treatment of the lines of a log by a run that finds them."""

    CONTINUE = auto()
    """Keep the lines up to the checkpoint."""
    SET_ASIDE = auto()
    """Give the file a numbered name, and begin a new log."""
    REFUSE = auto()
    """End before training: the lines belong to another run."""


@dataclass(frozen=True)
class LogLine:
    """Complete line of a log."""

    data: bytes
    record: dict[str, Any]

    @property
    def iteration(self) -> int:
        return int(self.record["iteration"])


@dataclass(frozen=True)
class OldLines:
    """Lines of a log before this run writes to it."""

    lines: tuple[LogLine, ...] = ()
    damaged: int = 0
    """Number of complete lines that are no records of a run."""

    @classmethod
    def parse(cls, data: bytes) -> OldLines:
        """Read the lines of a log. A line that a killed run has cut off is left out."""
        lines = []
        damaged = 0
        for line in data.splitlines(keepends=True):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            complete = line.endswith(b"\n")
            if complete and isinstance(record, dict) and type(record.get("iteration")) is int:
                lines.append(LogLine(line, record))
            elif complete:
                damaged += 1
        return cls(tuple(lines), damaged)

    @property
    def is_empty(self) -> bool:
        """True if nothing would be lost with the file."""
        return not self.lines and not self.damaged

    @property
    def run(self) -> Mapping[str, Any]:
        """Facts about the run at its last start; empty if the log has none."""
        runs = [line.record["run"] for line in self.lines if "run" in line.record]
        return runs[-1] if runs and isinstance(runs[-1], dict) else {}

    @property
    def identity(self) -> RunIdentity | None:
        """Identity of the log's run; None for a log of an earlier version."""
        run_id, *places = (self.run.get(name) for name in ("id", "folder", "log"))
        if not isinstance(run_id, str):
            return None
        return RunIdentity(run_id, *(str(place) if place else None for place in places))

    @property
    def starts(self) -> list[Any]:
        """Entries of `STARTS`, of all starts of the log's run."""
        lists = [line.record.get(STARTS) for line in self.lines]
        return next((starts for starts in reversed(lists) if isinstance(starts, list)), [])

    def before(self, first_iteration: int) -> list[LogLine]:
        return [line for line in self.lines if line.iteration < first_iteration]

    def loses(self, first_iteration: int) -> bool:
        """Return True if the log has steps that a run from ``first_iteration`` repeats."""
        return any(line.iteration >= first_iteration for line in self.lines)

    def matches(self, origin: Origin) -> bool:
        """Return True if the log has the step of a checkpoint, with the same number of tokens."""
        return any(
            line.iteration == origin.iteration
            and line.record.get("consumed_tokens") == origin.consumed_tokens
            for line in self.lines
        )


def action_for(
    old: OldLines, mine: RunIdentity, origin: Origin | None, save: str | None = None
) -> Action:
    """Return what a run does with the lines of its log; see [Note: whose log it is].

    Args:
        old: lines of the log.
        mine: identity of the run.
        origin: the checkpoint from which the run continues; None for a run that begins at step 0.
        save: ``--save`` as given, which logs of earlier versions have.
    """
    if old.is_empty:
        return Action.CONTINUE
    # A resumed run repeats the steps after its checkpoint, so only these lines may go.
    owner = old.identity
    first = 1 if origin is None else origin.iteration + 1
    if owner is None:
        checkpoints = old.run.get("checkpoints")
        saved_to = checkpoints.get("save") if isinstance(checkpoints, dict) else save
        same = origin is not None and old.matches(origin)
        if same and (saved_to == save or not old.loses(first)):
            return Action.CONTINUE
        return Action.SET_ASIDE
    if origin is not None and owner.run_id == mine.run_id:
        only_record = (
            old.loses(first) and not mine.shares_folder(owner.folder) and not mine.copied(owner)
        )
        return Action.REFUSE if only_record and _still_holds(owner) else Action.CONTINUE
    return Action.SET_ASIDE if mine.shares_folder(owner.folder) else Action.REFUSE


def _still_holds(owner: RunIdentity) -> bool:
    """Return whether the folder of a run has checkpoints of the run, so it was not moved."""
    assert owner.folder is not None
    try:
        checkpoints = scan(Path(owner.folder))
    except CheckpointError:  # the folder cannot be read, but it exists
        return True
    return any(
        each.manifest is not None and each.manifest.run_id == owner.run_id for each in checkpoints
    )


@dataclass(frozen=True, kw_only=True)
class EarlierLines:
    """Part of an old log that a run continues."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """Records that the file keeps."""
    starts: list[Any] = field(default_factory=list)
    """Entries of `STARTS`, also of lines that the file does not keep."""
    sentence: str | None = None
    """Sentence for the console about a file that got another name."""


NO_LINES = EarlierLines()
"""Earlier lines of a new log."""


class LogFile:
    """The file of ``--log-jsonl``, locked by this run until it is closed.

    An existing file is locked at once, so that a second run ends before its data is read. A new
    file is created by `begin`.

    Args:
        path: the file; a link is followed.
        patience: seconds to wait for the lock of a previous run. A killed process holds its lock
            until the process is gone.
    Raises:
        ConfigError: another process writes the log.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience: float = 5.0) -> None:
        self._given = str(path)
        self.path = resolve_output(path)
        self._descriptor: int | None = None
        self.old = OldLines()
        deadline = time.monotonic() + patience
        while not self._lock_existing():
            if time.monotonic() >= deadline:
                raise self._in_use()
            time.sleep(0.1)

    def _lock_existing(self) -> bool:
        """Lock the file if it exists, and read its lines; return False if it is locked."""
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return True
        if try_lock(descriptor) is False:
            os.close(descriptor)
            return False
        # Another run may have replaced the file between the open and the lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                # The lines are read under the lock, so no other run can add to them.
                self._descriptor = descriptor
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    self.old = OldLines.parse(file.read())
                return True
        os.close(descriptor)
        return False

    def refuse(
        self, mine: RunIdentity, resumable: Callable[[], Collection[str]] = frozenset
    ) -> None:
        """Refuse a log that belongs to a run with another folder.

        Args:
            mine: identity of this run.
            resumable: returns the ids of runs that this run may resume.
        Raises:
            ConfigError: the log belongs to another run.
        """
        owner = self.old.identity
        if owner is None or mine.shares_folder(owner.folder):
            return
        # Called only here, since it reads the manifests of a folder.
        if owner.run_id not in resumable():
            raise self._of_another_run(owner, mine)

    def begin(
        self, mine: RunIdentity, origin: Origin | None, *, save: str | None = None
    ) -> EarlierLines:
        """Prepare the file for the first line of this run.

        Args:
            mine, origin, save: as for `action_for`.
        Raises:
            ConfigError: the log belongs to another run, or another process writes it.
            OSError: the file cannot be written.
        """
        owner = self.old.identity
        action = action_for(self.old, mine, origin, save)
        if action is Action.REFUSE:
            assert owner is not None
            raise self._of_another_run(owner, mine, origin)
        if self._descriptor is None:
            self._create()
            return NO_LINES
        # From here on the file changes. All refusals came before.
        if action is Action.SET_ASIDE:
            sentence = (
                f"{self._given}: the log of an earlier start, which this run does not continue, is "
                f"now {self._set_aside()}"
            )
            # The report counts starts that were killed before their first checkpoint.
            again = origin is None and owner is not None and owner.folder == mine.folder is not None
            return EarlierLines(starts=self.old.starts if again else [], sentence=sentence)
        return self._keep(self.old.before(1 if origin is None else origin.iteration + 1))

    def _keep(self, lines: list[LogLine]) -> EarlierLines:
        """Shorten the file to lines of this run."""
        assert self._descriptor is not None
        sentence = None
        mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        if self.old.damaged:
            sentence = (
                f"{self._given}: {self.old.damaged:,} damaged line(s) are left out; the file with "
                f"them is now {self._set_aside()}"
            )
        data = b"".join(line.data for line in lines)
        if len(data) != os.fstat(self._descriptor).st_size:
            self._replace(data, mode)
        records = [line.record for line in lines]
        return EarlierLines(records=records, starts=self.old.starts, sentence=sentence)

    def _replace(self, data: bytes, mode: int) -> None:
        # A rename: if the run is killed here, the old log must remain. The new file is locked
        # before it gets the name, so that no other run takes it.
        with replacing(self.path) as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            descriptor = os.dup(file.fileno())
            try_lock(descriptor)
        self.close()
        self._descriptor = descriptor

    def _set_aside(self) -> Path:
        """Rename the file to a free numbered name and create a new one; return the new name.

        Example:
            ``log.jsonl`` becomes ``log.1.jsonl``, or ``log.2.jsonl`` if that exists.
        """
        for number in count(1):
            aside = self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")
            # Take the name before the rename, which would replace a file of another process.
            try:
                os.close(open_new(aside))
            except FileExistsError:
                continue
            break
        os.replace(self.path, aside)
        self.close()
        self._create()
        return aside

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_new(self.path)
        except FileExistsError:
            raise self._in_use() from None
        if try_lock(descriptor) is False:
            os.close(descriptor)
            raise self._in_use()
        self._descriptor = descriptor

    def append(self, line: bytes) -> bool:
        """Append a line by a single write; return False if the disk took only a part of it.

        The file then still has only complete lines.
        """
        assert self._descriptor is not None
        # Note the size before the write, to cut off a partial line if the disk is full.
        size = os.fstat(self._descriptor).st_size
        if os.pwrite(self._descriptor, line, size) == len(line):
            return True
        os.ftruncate(self._descriptor, size)
        return False

    def close(self) -> None:
        """Release the lock and close the file; a closed file is left alone."""
        if self._descriptor is None:
            return
        # Child processes may have inherited the descriptor, and would hold the lock.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None

    def _in_use(self) -> ConfigError:
        return self._refusal(
            "is written by another process", "give each run its own log, or wait until it ends"
        )

    def _of_another_run(
        self, owner: RunIdentity, mine: RunIdentity, origin: Origin | None = None
    ) -> ConfigError:
        branches = origin is not None and owner.run_id == mine.run_id
        after = f", with steps after step {origin.iteration:,}" if origin and branches else ""
        return self._refusal(
            f"is the log of the run that saves to {owner.folder}{after}",
            f"give another file, or resume that run with {flags.LOAD} and {flags.SAVE} "
            f"{owner.folder}",
        )

    def _refusal(self, rule: str, cure: str) -> ConfigError:
        return ConfigError([Problem(flags.LOG_JSONL, self._given, rule, cure, node_dependent=True)])


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


def _finite(value: object) -> object:
    """Return a value for JSON: a non-finite number becomes text, since JSON cannot express it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
