"""Run ``pip install`` and show its progress: one updating line in a terminal, else plain lines.

python .ci/install.py PYTHON PIP_ARGUMENT ...

PYTHON is the interpreter of the environment that receives the packages. If pip fails, its complete
output is printed. The script needs only Python 3.10.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

DOWNLOADING = re.compile(
    r"(?:Downloading|Using cached) \S*?([^/\s]+?)-(\d[^-\s]*)\S* \(([\d.]+) (\w+)\)"
)
LOCAL = re.compile(r"Processing (\S*/([^/\s]+?)-(\d[^-\s]*)\S*\.whl)")
BYTES = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
LARGE = 5e6
"""Bytes from which a package gets a line where no terminal shows the updating line."""
REFRESH_SECONDS = 0.5


class Progress:
    """Progress of one run of pip."""

    def __init__(self, terminal: bool) -> None:
        self.packages = 0
        self.bytes = 0.0
        self.action = "looking for packages"
        self.terminal = terminal
        self.started = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> Progress:
        if self.terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.terminal:
            self._thread.join()
            print("\r\033[K", end="", flush=True)

    def read(self, line: str) -> None:
        """Take one line of pip's output into account."""
        if found := DOWNLOADING.search(line):
            self._add(found[1], found[2], float(found[3]) * BYTES.get(found[4], 1))
        elif found := LOCAL.search(line):
            self._add(found[2], found[3], os.path.getsize(found[1]))
        elif line.startswith("Installing collected packages:"):
            self._show(f"unpacking {line.count(',') + 1} packages")
        elif line.startswith("Building wheel"):
            self.action = "preparing megatron_packed"

    def summary(self) -> str:
        """Return the number of packages, their size and the time."""
        seconds = time.monotonic() - self.started
        return f"{self.packages} packages, {self.bytes / 1e6:,.0f} MB, {seconds:.0f} s"

    def _add(self, name: str, version: str, size: float) -> None:
        self.packages += 1
        self.bytes += size
        action = f"{name.replace('_', '-')} {version.split('+')[0]} ({size / 1e6:.1f} MB)"
        if size >= LARGE:
            self._show(action)
        else:
            self.action = action

    def _show(self, action: str) -> None:
        self.action = action
        if not self.terminal:
            print(f"  {action}", flush=True)

    def _refresh(self) -> None:
        while not self._done.wait(REFRESH_SECONDS):
            print(f"\r\033[K  {self.summary()}: {self.action}", end="", flush=True)


def main() -> int:
    python, *arguments = sys.argv[1:]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    output: list[str] = []
    with (
        Progress(sys.stdout.isatty()) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            progress.read(line.strip())
    if pip.returncode:
        print("".join(output), file=sys.stderr)
        print(f"pip could not install the packages (exit code {pip.returncode}).", file=sys.stderr)
        return 1
    print(f"  installed: {progress.summary()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
