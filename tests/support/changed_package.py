"""Copies of the package with new files and edits, in which tests of their own run.

Such a test proves what a change of the project needs: a new kind of layer only new files, a new
option edits of few files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.runs import REPOSITORY

PACKAGE = "megatron_packed"
TESTS = REPOSITORY / "tests"
NEW_KIND = TESTS / "data" / "new_kind"
"""Files of the gated short convolution, in folders as in the package."""
TIMEOUT = 300.0
"""Seconds after which the tests of a copy count as hanging."""


class Edit(NamedTuple):
    """Text of a file of the package that occurs once, and the text that replaces it."""

    file: str
    old: str
    new: str


def changed_package(
    folder: Path, *, new_files: Mapping[str, Path] | None = None, edits: tuple[Edit, ...] = ()
) -> Path:
    """Copy the package into ``folder`` and change it.

    The compiled modules are copied too. Python compiles a changed file again, because its time of
    change differs.

    Args:
        new_files: path in the package -> file with its text; the package must not have the path.
        edits: replaced texts.
    """
    copy = folder / PACKAGE
    # Another process may write a compiled module under a temporary name.
    shutil.copytree(REPOSITORY / PACKAGE, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, source in (new_files or {}).items():
        assert not (copy / name).exists(), f"{name} is not new"
        shutil.copyfile(source, copy / name)
    for edit in edits:
        path = copy / edit.file
        text = path.read_text()
        assert text.count(edit.old) == 1, (
            f"{edit.file} has {edit.old!r} {text.count(edit.old)} times"
        )
        path.write_text(text.replace(edit.old, edit.new))
    return folder


def new_files(folder: Path) -> dict[str, Path]:
    """Return path in the package -> file, for all files of ``folder``."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}


def run_tests(folder: Path, *files: Path, only: str = "") -> None:
    """Run files of tests with the package in ``folder``; fail with their output if one fails.

    Args:
        only: part of the names of the tests to run; all when empty.
    """
    path = os.pathsep.join((str(folder), str(TESTS)))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", only]
    words = ["-P", "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
