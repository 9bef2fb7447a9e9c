"""Supervisor of probes in a separate process: a library that crashes or hangs at import affects
only its own line.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from megatron_packed.config.environment_variables import assembler_variables

MODULE = "megatron_packed.cli.doctor.probe"


def run_probes(
    names: Sequence[str],
    seconds: float,
    begins: Callable[[str], None] = lambda name: None,
    module: str = MODULE,
) -> dict[str, dict[str, Any]]:
    """Return the answers of all probes by name, in their order.

    A probe that ends its process, or exceeds the time limit, gets ``{"error": ...}``. The probes
    after it run in a new process.

    Args:
        names: probes, as the module ``probe`` defines them.
        seconds: time limit of one probe, including the start of the process.
        begins: called with the name of each probe before it runs.
        module: module that is run with ``python -m``, the descriptor of its pipe, and the names.
    """
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < len(names):
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            answers |= _one_process(names[len(answers) :], seconds, begins, module, output)
    return answers


def _one_process(
    names: Sequence[str],
    seconds: float,
    begins: Callable[[str], None],
    module: str,
    output: IO[str],
) -> dict[str, dict[str, Any]]:
    """Return the answers of a process until its end, which is an answer, too."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pipe = sender.fileno()
    # Triton must not store what it tunes on the small packs of probes, because runs have large
    # packs.
    environ = {**assembler_variables(), **os.environ, "TRITON_CACHE_AUTOTUNING": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(pipe), *names],
        stdout=output,
        stderr=output,
        start_new_session=True,
        env=environ,
        pass_fds=[pipe],
    )
    sender.close()
    answers: dict[str, dict[str, Any]] = {}
    try:
        for name in names:
            begins(name)
            try:
                late = {"error": f"no answer in {seconds:.0f} s", "last": True}
                answer = receiver.recv() if receiver.poll(seconds) else late
            except EOFError:
                answer = {"error": _how_it_ended(process.wait(), output), "last": True}
            answers[name] = answer
            if answer.get("last"):  # the process has ended, hangs, or has lost its GPU context
                break
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        receiver.close()
    return answers


def _how_it_ended(code: int, output: IO[str]) -> str:
    output.seek(0)
    lines = output.read().strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"the process {how}{last}"
