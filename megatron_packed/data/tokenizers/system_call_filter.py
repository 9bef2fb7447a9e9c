"""Filter of system calls (seccomp) for a child process that runs code or reads files of a download.

With the filter, a process can compute, read its standard input and write its standard output and
error. It cannot open, list or remove files, start programs or processes, use the network, send
signals to other processes, or reach their memory. So code that escapes from a sandbox inside Python
finds nothing to read and no way out, except for the pipe of answers.

The filter names the system calls that stay allowed. Any other call fails with EPERM, as if the user
had no permission, so a library that makes a needless call goes on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import NamedTuple

_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "readv": (19, 65),
    "writev": (20, 66),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}
"""Name of an allowed system call -> its number on x86-64 and on 64-bit Arm."""


class _Processor(NamedTuple):
    """Numbers of one processor architecture."""

    column: int
    """Column of `_ALLOWED`."""
    audit_arch: int
    """Name of the architecture in the kernel (``AUDIT_ARCH_*``)."""
    seccomp: int
    clone: int
    tgkill: int


_MACHINES = {
    "x86_64": _Processor(0, 0xC000003E, 317, 56, 234),
    "aarch64": _Processor(1, 0xC00000B7, 277, 220, 131),
}
_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
"""First number of the calls of the x32 interface, which share the architecture's name."""

# Numbers of <linux/seccomp.h>, <linux/bpf_common.h> and <linux/prctl.h>.
_SET_MODE_FILTER, _ALL_THREADS, _NO_NEW_PRIVILEGES = 1, 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``; of the argument, the lower half on a little-endian machine."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict_process() -> str:
    """Forbid this process and its threads, until their end, all that the module's text lists.

    Environment variables are removed, too, except those that limit threads.

    Returns:
        Empty, or the reason why the kernel does not permit the filter; the process is unchanged
        then, except for its environment.
    """
    for name in set(os.environ) - _KEPT:
        del os.environ[name]
    machine = _MACHINES.get(platform.machine())
    if not sys.platform.startswith("linux") or machine is None:
        return f"no filter of system calls for {sys.platform} on {platform.machine()}"
    instructions = _filter(machine, os.getpid())
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    unused = (ctypes.c_ulong(0),) * 3
    # Without it, only root may install a filter.
    libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), *unused)
    failed = libc.syscall(
        ctypes.c_long(machine.seccomp),
        ctypes.c_ulong(_SET_MODE_FILTER),
        ctypes.c_ulong(_ALL_THREADS),
        ctypes.byref(program),
    )
    if failed:
        reason = os.strerror(ctypes.get_errno()) if failed == -1 else "a thread has another filter"
        return f"the kernel permits no filter of system calls ({reason})"
    return ""


_KEPT = frozenset(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
    )
)
"""Environment variables that libraries read when they first encode a text."""


def _filter(machine: _Processor, process: int) -> list[tuple[int, int, int, int]]:
    """Return the instructions of the filter: (code, steps if true, steps if false, number).

    Args:
        process: number of this process, the only process that gets signals from it.
    """
    fail = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.audit_arch),
        fail,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        fail,
    ]
    for numbers in _ALLOWED.values():
        instructions += [(_EQUAL, 0, 1, numbers[machine.column]), allow]
    # The flags of clone3 are in memory, which a filter cannot read. Without it, libc uses clone.
    instructions += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    # A thread may start, a process may not.
    instructions += [
        (_EQUAL, 0, 4, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        allow,
        fail,
    ]
    # abort() sends a signal to its own process.
    instructions += [
        (_EQUAL, 0, 3, machine.tgkill),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, process),
        allow,
    ]
    return [*instructions, fail]
