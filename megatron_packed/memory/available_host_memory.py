"""Free memory of the machine, which is checked before host memory is pinned.

When memory runs out, Linux does not fail the call but kills a process. So the free memory must be
known before the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

KEPT_FREE = 4 * 2**30
"""Bytes that pinning leaves to other processes, including other ranks on the machine."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate; None if Linux does not report them.

    The result is the smallest of the machine's free memory and the free memory of the process's
    control groups. Page cache counts as free.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(min(limits), 0) if limits else None


def _of_machine(meminfo: Path) -> Iterator[int]:
    values = _numbers(meminfo)
    if "MemAvailable:" in values:
        yield values["MemAvailable:"] * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of every control group of this process, of version 1 or 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, prefix, names = root / "sys/fs/cgroup", "", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, prefix = root / "sys/fs/cgroup/memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = folder / path.strip("/")
        # Limits of outer groups apply too: SLURM and Kubernetes set their limit on an outer group.
        for group in (inner, *inner.parents):
            if not group.is_relative_to(folder):
                break
            limit, used = ("".join(_lines(group / name)) for name in names)
            if limit.isdecimal() and used.isdecimal():
                # The kernel drops page cache before it kills a process, so page cache counts as free.
                cache = _numbers(group / "memory.stat")
                free = sum(cache.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(limit) - int(used) + free


def _numbers(path: Path) -> dict[str, int]:
    """Return the ``name number`` pairs of a file; skip lines of any other form."""
    fields = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in fields if len(pair) > 1 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
