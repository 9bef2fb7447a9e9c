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
from contextlib import suppress
from pathlib import Path

from megatron_packed.cli.doctor.findings import ABSENT, FOUND, SLOW, WORKS
from megatron_packed.explain.capability import Capability

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


def machine_findings() -> list[Capability]:
    """Return findings about shared memory, limits, the clock and the filter of system calls."""
    locked = (
        "InfiniBand registers its buffers under this limit; it does not matter on a single host"
    )
    low = Capability("locked memory", SLOW, locked, "ulimit -l unlimited")
    few = Capability(
        "open files", SLOW, "many ranks, shards and workers need more", "ulimit -n 65536"
    )
    return [
        _driver(),
        _shared_memory(),
        _limit(low, resource.RLIMIT_MEMLOCK, LOCKED_MEMORY, _GIB, " GiB"),
        _limit(few, resource.RLIMIT_NOFILE, FILES),
        _clock(),
        _system_calls(),
    ]


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> Capability:
    name = "NVIDIA driver"
    try:
        version_line = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        detail = "the operating system has loaded no driver"
        return Capability(name, ABSENT, detail, instead="the CPU")
    version = next((word for word in version_line if word[0].isdigit() and "." in word), "unknown")
    return Capability(name, FOUND, found=version)


def _shared_memory(path: str = "/dev/shm") -> Capability:  # noqa: S108
    name = "shared memory"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Capability(name, SLOW, f"{path}: {error.strerror}")
    sizes = f"{usage.total / _GIB:.3g} GiB, {usage.free / _GIB:.3g} free"
    if usage.total >= SHARED_MEMORY:
        return Capability(name, WORKS, found=sizes)
    detail = (
        "NCCL needs more shared memory between the GPUs of a host; start a container with "
        "docker run --shm-size=16g"
    )
    return Capability(name, SLOW, detail, f"mount -o remount,size=16G {path}", sizes)


def _limit(low: Capability, kind: int, least: int, unit: int = 1, suffix: str = "") -> Capability:
    """Return a finding about a limit of processes; ``low`` if it is below ``least``."""
    soft, hard = resource.getrlimit(kind)
    unlimited = resource.RLIM_INFINITY

    def shown(value: int) -> str:
        if value == unlimited:
            return "unlimited"
        return f"{value / unit:,.3g}{suffix}" if unit > 1 else f"{value:,}"

    limits = f"{shown(soft)} (at most {shown(hard)})"
    if soft == unlimited or soft >= least:
        return Capability(low.name, WORKS, found=limits)
    return low._replace(found=limits)


def _clock() -> Capability:
    """Return a finding about the clock: its resolution, and whether the clock is synchronised, so
    that logs of several machines can be ordered.
    """
    state, fix = FOUND, ""
    synchronised = "; the operating system does not report whether the clock is synchronised"
    timex = (ctypes.c_byte * 256)()  # a struct timex of zeros reads the clock and changes nothing
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) >= 0:
            state, synchronised = WORKS, ", synchronised"
            if ctypes.c_int.from_buffer(timex, _STATUS_OFFSET).value & _UNSYNCHRONISED:
                state, fix = SLOW, "timedatectl set-ntp true"
                synchronised = (
                    "; not synchronised, so logs of several machines cannot be ordered by time"
                )
    resolution = f"monotonic to {time.get_clock_info('monotonic').resolution * 1e9:.0f} ns"
    utc_time = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Capability("clock", state, resolution + synchronised, fix, utc_time)


_STATUS_OFFSET = 5 * ctypes.sizeof(ctypes.c_long)
"""Offset of ``int status`` in struct timex. The fields before it are modes (padded to a long),
offset, freq, maxerror and esterror.
"""


def _system_calls() -> Capability:
    """Return whether the kernel permits the filter of `system_call_filter`, by a try in a child.

    Processes that read files of downloads use it.
    """
    name = "system-call filter"
    ran = subprocess.run([sys.executable, "-c", _FILTER_PROGRAM], capture_output=True, text=True)
    reason = ran.stdout.strip()
    if ran.returncode == 0 and not reason:
        return Capability(name, WORKS, found="seccomp: no files, network, programs or signals")
    lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
    instead = "jinja2's sandbox and limits of time and memory"
    return Capability(name, ABSENT, reason or lines[-1], instead=instead)
