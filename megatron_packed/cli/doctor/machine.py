"""Findings about the limits that the operating system sets for a process; needs only the standard
library.
"""

from __future__ import annotations

import ctypes
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megatron_packed.cli.doctor.findings import Finding, State

_GIB = 2**30
SHARED_MEMORY = 1 * _GIB
"""Minimum bytes of /dev/shm, which NCCL uses between the ranks of one host. Containers have 64 MiB
by default.
"""
LOCKED_MEMORY = 64 * _GIB
"""Minimum bytes of the limit on locked memory. InfiniBand registers its buffers under this limit;
CUDA's page-locked memory is not counted.
"""
FILES = 4096
"""Minimum limit of open files: each peer of a rank needs some, and so does each shard of a data set
or checkpoint.
"""
_FILTER_PROGRAM = (
    "from megatron_packed.data.tokenizers.system_call_filter import restrict_process; "
    "print(restrict_process())"
)
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)


def machine_findings() -> list[Finding]:
    """Return findings about shared memory, limits, the clock and the filter of system calls."""
    checks = (_driver, _shared_memory, _locked_memory, _open_files, _clock, _system_calls)
    return [check() for check in checks]


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    try:
        version_line = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return Finding(
            "NVIDIA driver",
            State.ABSENT,
            detail="the operating system has loaded no driver",
            instead="the CPU",
        )
    version = next((word for word in version_line if word[0].isdigit() and "." in word), "unknown")
    return Finding("NVIDIA driver", State.FOUND, version)


def _shared_memory(path: str = "/dev/shm") -> Finding:  # noqa: S108
    name = "shared memory"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(name, State.SLOW, detail=f"{path}: {error.strerror}")
    sizes = f"{usage.total / _GIB:.3g} GiB, {usage.free / _GIB:.3g} free"
    if usage.total >= SHARED_MEMORY:
        return Finding(name, State.WORKS, sizes)
    return Finding(
        name,
        State.SLOW,
        sizes,
        fix=f"mount -o remount,size=16G {path}",
        detail="NCCL needs more shared memory between the GPUs of a host; start a container with "
        "docker run --shm-size=16g",
    )


def _limit(name: str, kind: int, least: int, unit: int, suffix: str, why: str, fix: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    unlimited = resource.RLIM_INFINITY

    def shown(value: int) -> str:
        if value == unlimited:
            return "unlimited"
        return f"{value / unit:,.3g}{suffix}" if unit > 1 else f"{value:,}"

    limits = f"{shown(soft)} (at most {shown(hard)})"
    if soft == unlimited or soft >= least:
        return Finding(name, State.WORKS, limits)
    return Finding(
        name,
        State.SLOW,
        limits,
        detail=why,
        fix=fix,
    )


def _locked_memory() -> Finding:
    return _limit(
        "locked memory",
        resource.RLIMIT_MEMLOCK,
        LOCKED_MEMORY,
        _GIB,
        " GiB",
        "InfiniBand registers its buffers under this limit; it does not matter on a single host",
        "ulimit -l unlimited",
    )


def _open_files() -> Finding:
    return _limit(
        "open files",
        resource.RLIMIT_NOFILE,
        FILES,
        1,
        "",
        "many ranks, shards and workers need more",
        "ulimit -n 65536",
    )


def _clock() -> Finding:
    """Return a finding about the clock: its resolution, and whether the clock is synchronised, so
    that logs of several machines can be ordered.
    """
    name, utc_time = "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    resolution = f"monotonic to {time.get_clock_info('monotonic').resolution * 1e9:.0f} ns"
    timex = (ctypes.c_byte * 256)()  # a struct timex of zeros reads the clock and changes nothing
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Finding(
            name,
            State.FOUND,
            utc_time,
            detail=f"{resolution}; the operating system does not report whether the clock is "
            "synchronised",
        )
    status = ctypes.c_int.from_buffer(timex, _STATUS_OFFSET).value
    if status & _UNSYNCHRONISED:
        return Finding(
            name,
            State.SLOW,
            utc_time,
            detail=f"{resolution}; not synchronised, so logs of several machines cannot be "
            "ordered by time",
            fix="timedatectl set-ntp true",
        )
    return Finding(name, State.WORKS, utc_time, detail=f"{resolution}, synchronised")


_STATUS_OFFSET = 5 * ctypes.sizeof(ctypes.c_long)
"""Offset of ``int status`` in struct timex. The fields before it are modes (padded to a long),
offset, freq, maxerror and esterror.
"""


def _system_calls() -> Finding:
    """Return whether the kernel permits the filter of `system_call_filter`, by a try in a child.

    Processes that read files of downloads use it.
    """
    name = "system-call filter"
    ran = subprocess.run([sys.executable, "-c", _FILTER_PROGRAM], capture_output=True, text=True)
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
