"""Finding about the walls around processes that read files from downloads."""

from __future__ import annotations

import subprocess
import sys

from megatron_packed.cli.doctor.findings import Finding, State

_PROGRAM = (
    "from megatron_packed.data.tokenizers.process_walls import close_walls; print(close_walls())"
)


def walls_finding() -> Finding:
    """Return whether this machine permits the walls of `process_walls`, by closing them in a child."""
    name = "walls of templates"
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    reason = ran.stdout.strip()
    if ran.returncode == 0 and not reason:
        found = "seccomp: no files, network, programs or signals"
        return Finding(name=name, state=State.WORKS, found=found)
    lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
    return Finding(
        name=name,
        state=State.ABSENT,
        detail=reason or lines[-1],
        instead="jinja2's sandbox and limits of time and memory",
    )
