"""Finding about the system-call filter of processes that read files of downloads."""

from __future__ import annotations

import subprocess
import sys

from megatron_packed.cli.doctor.findings import Finding, State

_PROGRAM = "from megatron_packed.data.tokenizers.system_call_filter import restrict_process; print(restrict_process())"


def system_call_finding() -> Finding:
    """Return whether the kernel permits the filter of `system_call_filter`, by a try in a child."""
    name = "system-call filter"
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    reason = ran.stdout.strip()
    if ran.returncode == 0 and not reason:
        probes = "seccomp: no files, network, programs or signals"
        return Finding(name, State.WORKS, probes)
    lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
    return Finding(
        name,
        State.ABSENT,
        detail=reason or lines[-1],
        instead="jinja2's sandbox and limits of time and memory",
    )
