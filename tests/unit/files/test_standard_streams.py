"""Standard output and error that are closed, full, or connected to a process that has exited."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from megatron_packed.files.standard_streams import guard_standard_streams
guard_standard_streams()
file = open(sys.argv[1], "w")
file.write(f"descriptor {min(file.fileno(), 3)}\\n"); file.flush()
for number in range(3000):
    print("a line of output \\u2713", number, flush=True)
    print("a line of errors \\u2713", number, file=sys.stderr, flush=True)
os.write(1, b"a library's line\\n") if sys.argv[2] == "closed" else None
file.write(f"{sys.stdout.isatty()} done\\n"); file.flush()
os._exit(0)
"""


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_nothing_and_no_file_takes_their_place(streams, tmp_path):
    done = run(f'"{sys.executable}" -c "$PROGRAM" {tmp_path}/file closed {streams}')
    assert done.returncode == 0, done
    assert (tmp_path / "file").read_text() == "descriptor 3\nFalse done\n"


@pytest.mark.parametrize("streams", ["> /dev/full", "2> /dev/full", "> /dev/full 2>&1"])
def test_a_full_disk_ends_nothing_and_is_said_once(streams, tmp_path):
    done = run(f'"{sys.executable}" -c "$PROGRAM" {tmp_path}/file full {streams}')
    assert done.returncode == 0, done
    assert (tmp_path / "file").read_text().endswith("False done\n")
    said = done.stdout + done.stderr
    both = streams.endswith("2>&1")
    assert said.count(
        "cannot be written ([Errno 28] No space left on device); the run continues"
    ) == (0 if both else 1)
    assert both or "2999" in said


def test_a_reader_that_dies_ends_nothing(tmp_path):
    done = run(f'"{sys.executable}" -c "$PROGRAM" {tmp_path}/file pipe 2>&1 | head -2')
    assert done.returncode == 0 and (tmp_path / "file").read_text().endswith("False done\n")


@pytest.mark.parametrize(("streams", "code"), [("> /dev/full", 1), ("| true", 0), (">&-", 0)])
def test_an_answer_that_a_full_disk_loses_is_no_success(streams, code):
    done = run(f'"{sys.executable}" pretrain_hybrid.py --help-all {streams}')
    assert done.returncode == code and "Traceback" not in done.stderr, done


def run(command):
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "PROGRAM": PROGRAM, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
