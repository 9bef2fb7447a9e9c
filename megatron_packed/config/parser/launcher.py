"""End of a refused command line under a launcher that starts several ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

_SILENT_SECONDS = 3.0
"""Seconds that a silent rank waits before it exits. A launcher kills all processes when the first
one ends, so silent ranks wait until rank 0 has reported.
"""
SILENT_BESIDE_RANK_0_SECONDS = 60.0
"""The same beside rank 0 under torchrun, which surely ends the silent ranks when rank 0 ends.

On a busy machine rank 0 may report seconds later than the others are ready.
"""


def report_to_launcher(sentence: str, environ: Mapping[str, str]) -> None:
    """Write the cause that torchrun's own report shows, in the file and format of torch's
    ``ErrorHandler``.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        report = {
            "message": sentence,
            "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))},
        }
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": report}, file)


def wait_for_rank_0(environ: Mapping[str, str]) -> None:
    """Wait, as a silent rank, until rank 0 has reported and the launcher ends this process."""
    # torchrun stops this rank because rank 0 failed. Exit with code 0, so that torchrun does not
    # report this rank as a failure too.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    under_torchrun = "TORCHELASTIC_ERROR_FILE" in environ
    time.sleep(SILENT_BESIDE_RANK_0_SECONDS if one_host and under_torchrun else _SILENT_SECONDS)
