"""Folders of compiled kernels in pytest's cache, which stay from one run of the tests to the next.

Each change of a kernel adds a folder, so those that were not used for longest are removed at the end
of a run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("triton_kernels", "triton_kernels_without_code")
MOST_BYTES = 256 * 2**20
"""Most bytes of each folder; the kernels of one run have 45 and 38 MiB."""


def folder_of(cache: pytest.Cache, name: str) -> Path:
    assert name in FOLDERS, name
    return cache.mkdir(name)


def with_time_of_use(start: Callable[..., None]) -> Callable[..., None]:
    """Return the start of Triton's `FileCacheManager` that also dates the folder of its kernel."""

    def dated(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        os.utime(self.cache_dir)

    return dated


def remove_unused(folder: Path, most: int = MOST_BYTES) -> None:
    """Remove the kernels that were not used for longest, until ``most`` bytes remain."""
    kernels = [each for each in folder.glob("*") if each.is_dir()]
    kept = 0
    for kernel in sorted(kernels, key=lambda each: each.stat().st_mtime, reverse=True):
        kept += sum(file.stat().st_size for file in kernel.rglob("*") if file.is_file())
        if kept > most:
            shutil.rmtree(kernel, ignore_errors=True)
