"""How much of the machine's memory is left, for who pins some: where there is none, Linux ends a
process that takes it, and no call fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

KEPT_FREE = 4 * 2**30
"""Bytes that pinning leaves to everybody else, the other ranks of the machine included."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """What processes of this one's control groups may still take, page cache counted as free; None
    where nobody says.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(min(found), 0) if found else None


def _of_machine(meminfo: Path) -> Iterator[int]:
    values = _numbers(meminfo)
    if "MemAvailable:" in values:
        yield values["MemAvailable:"] * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Of every control group that this process is in, of version 1 or 2, as far as it sees them."""
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
        for group in (inner, *inner.parents):
            if not group.is_relative_to(folder):
                break
            limit, used = ("".join(_lines(group / name)) for name in names)
            if limit.isdecimal() and used.isdecimal():
                cache = _numbers(group / "memory.stat")
                free = sum(cache.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(limit) - int(used) + free


def _numbers(path: Path) -> dict[str, int]:
    """``name number`` in each line; what is not of that form is left out."""
    words = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
