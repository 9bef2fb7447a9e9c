"""Programs that the server of processes starts end as in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

THREAD = """\
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()
"""
POOL = """\
import time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("from a pool")))
"""


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("print('done')", 0, "done\n"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit(True)", 1, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import atexit; atexit.register(print, 'at the exit')", 0, "at the exit\n"),
        ("import sys; sys.stdout.write('no end of line')", 0, "no end of line"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        (THREAD, 0, "from a thread\n"),
        (POOL, 0, "from a pool\n"),
    ],
)
def test_programs_end_as_in_a_fresh_interpreter(
    program: str, code: int, said: str, quick_programs: Path
) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    for python in (sys.executable, quick_programs / "python"):
        ended = subprocess.run(
            [python, "-c", program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (ended.returncode, ended.stdout) == (code, said), python


def test_an_error_is_reported(quick_programs: Path) -> None:
    command = [quick_programs / "python", "-c", "1 / 0"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
