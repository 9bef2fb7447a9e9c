"""Make one defect at a time in a copy of the repository, and run the tests that must notice it.

`mutations.json` has for each file of the package the names of its mutations. Each replaces the text
``from``, which occurs once in the file, by ``to``, so that one of the tests ``fails``. If the file is
gone, the only file of the package with the text replaces it. A mutation is *killed* if a test failed.
It *survived* if all passed. It is *stale* if the code has changed, so that the text is missing or
occurs several times, and *untested* if pytest could not run a test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import REPOSITORY

ROWS = Path(__file__).with_name("mutations.json")
PACKAGE = "megatron_packed"
OUTCOMES = {0: "survived", 1: "killed"}
"""Outcomes of the exit codes of pytest; other codes are those of tests that did not run."""


class Mutation(NamedTuple):
    """One defect: a row of `mutations.json`."""

    name: str
    file: str
    """Path in the repository."""
    text: str
    replacement: str
    tests: list[str]
    """Arguments of pytest."""

    def place(self, repository: Path) -> Path | None:
        """Return the file with the text: the named one, or the only one after a move."""
        named = repository / self.file
        files = (repository / PACKAGE).rglob("*.py")
        found = [path for path in files if path.read_text().count(self.text) == 1]
        if named in found:
            return named
        return found[0] if len(found) == 1 and not named.exists() else None


def read_mutations(path: Path = ROWS) -> list[Mutation]:
    """Return all rows, in the order of the file."""
    return [
        Mutation(
            name,
            f"{PACKAGE}/{file}",
            row["from"],
            row["to"],
            [f"tests/{test}" for test in row["fails"]],
        )
        for file, rows in json.loads(path.read_text()).items()
        for name, row in rows.items()
    ]


def copy_repository(repository: Path, copy: Path) -> None:
    """Copy all files that git does not ignore, with changes that are not committed."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=repository, check=True, capture_output=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (repository / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, copy / name)


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Return the exit code of pytest, and its last line about a test that failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}",
        # Bytecode is chosen by the size and the second of the last change of its source.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "--tb=line", *tests], cwd=copy, env=environment, capture_output=True, text=True
    )
    failed = re.findall(r"^(?:FAILED|ERROR).*$", ended.stdout + ended.stderr, re.M)
    return ended.returncode, failed[-1][:200] if failed else ""


def outcome(mutation: Mutation, copy: Path) -> tuple[str, str]:
    """Run the tests of a mutation in the copy; return the outcome and the test that failed."""
    path = mutation.place(copy)
    if path is None:
        return "stale", mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.text, mutation.replacement))
    try:
        code, failed = run_tests(copy, mutation.tests)
    finally:
        path.write_text(text)
    return OUTCOMES.get(code, "untested"), failed


def main(mutations: Sequence[Mutation], repository: Path = REPOSITORY) -> int:
    """Return the exit code: 0 if all mutations are killed, and their tests pass without them."""
    killed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        copy_repository(repository, copy)
        fresh = [mutation for mutation in mutations if mutation.place(copy)]
        tests = list(dict.fromkeys(test for mutation in fresh for test in mutation.tests))
        code, failed = run_tests(copy, tests) if tests else (0, "")
        print(f"without a mutation: exit code {code} of pytest {failed}", flush=True)
        for mutation in mutations:
            started = time.monotonic()
            found, failed = outcome(mutation, copy)
            killed += found == "killed"
            seconds = time.monotonic() - started
            print(f"{found:9}{mutation.name:18}{seconds:4.0f} s  {failed}", flush=True)
    print(f"{killed} of {len(mutations)}")
    return int(code != 0 or killed != len(mutations))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="run these mutations; without names, all of them")
    parser.add_argument("--stale", action="store_true", help="only print the names of stale ones")
    given = parser.parse_args()
    chosen = [row for row in read_mutations() if not given.name or row.name in given.name]
    if given.stale:
        stale = [row.name for row in chosen if row.place(REPOSITORY) is None]
        print(f"{' '.join(stale)}\n{len(chosen) - len(stale)} of {len(chosen)}")
        sys.exit(bool(stale))
    sys.exit(main(chosen))
