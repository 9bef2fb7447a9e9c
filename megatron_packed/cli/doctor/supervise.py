"""Supervisor of probes in a separate process: a library that crashes or hangs at import affects
only its own line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        module: module that is run with ``python -m``.
    """
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < len(names):
        waiting = list(names[len(answers) :])
        with tempfile.TemporaryFile() as said:
            for name, answer in _one_process(waiting, seconds, begins, module, said):
                answers[name] = answer
    return answers


def _one_process(
    names: Sequence[str], seconds: float, begins: Callable[[str], None], module: str, said: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    # Triton must not store what it tunes on the small packs of probes, because runs have large
    # packs.
    environ = {**assembler_variables(), **os.environ, "TRITON_CACHE_AUTOTUNING": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *names],
        stdout=subprocess.PIPE,
        stderr=said,
        start_new_session=True,
        env=environ,
    )
    assert process.stdout is not None
    try:
        received = b""
        for name in names:
            begins(name)
            line, received = _line(process.stdout.fileno(), received, time.monotonic() + seconds)
            if line is None:
                os.killpg(process.pid, signal.SIGKILL)
                yield name, {"error": f"no answer in {seconds:.0f} s"}
                return
            if not line:
                yield name, {"error": _how_it_ended(process.wait(), said)}
                return
            answer = json.loads(line)
            yield name, answer
            if answer.get("last"):  # the process has lost its GPU context
                return
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _line(descriptor: int, received: bytes, until: float) -> tuple[bytes | None, bytes]:
    """Return the next line and the bytes after it. The line is empty at the end of the stream, and
    None if the time is up.
    """
    while b"\n" not in received:
        ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return None, received
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return b"", b""
        received += chunk
    line, _, received = received.partition(b"\n")
    return line, received


def _how_it_ended(code: int, said: Any) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"the process was {how}{last}" if code < 0 else f"the process {how}{last}"
