"""Duties of a process that ``megatron-packed train`` has started: end with the launcher, and report
a failure to the launcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

LAUNCHER = "MEGATRON_PACKED_LAUNCHER"
"""Environment variable with the process number of the launcher."""
REPORT_FOLDER = "MEGATRON_PACKED_REPORTS"
"""Environment variable with the folder in which the launcher expects reports of failed ranks."""
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Let the kernel kill this process when the launcher ends, however the launcher ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have ended before the call above. A program of PYTHON_EXEC may stand between
    # the launcher and this process, so another parent alone proves nothing.
    launcher = int(os.environ[LAUNCHER])
    if os.getppid() != launcher and not _runs(launcher):
        os._exit(1)


def _runs(process: int) -> bool:
    """Return True if a process runs. An ended process keeps its number until it is reaped."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def report_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank_{rank}.json"


def report_failure_to_launcher(*, lost: bool) -> None:
    """Report a failure to the launcher, if a launcher started this process.

    Args:
        lost: True if the failure only shows that another process is gone or hangs. A restart of
            the run then helps.
    """
    folder = os.environ.get(REPORT_FOLDER)
    if folder is None:
        return
    with suppress(OSError):  # without the report, the launcher does not restart the run
        report_file(folder, int(os.environ["RANK"])).write_text(json.dumps({"lost": lost}))


def reported_lost(folder: str | Path, rank: int) -> bool | None:
    """Return whether a failed rank has lost another process; None if the rank reported nothing."""
    try:
        return bool(json.loads(report_file(folder, rank).read_text())["lost"])
    except (OSError, ValueError):
        return None
