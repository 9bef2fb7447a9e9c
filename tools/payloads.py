"""Give hostile files to every command that reads foreign files, and count what happens.

A payload is *refused* if the command ends in time with an exit code and a short sentence. It is
*harmless* if its files may be valid, and nothing bad happened. It is *silent* if a hostile file was
taken, and *executed* if code ran, or if a secret or a file outside of the folder was touched. It is
*raw* if control characters reached the output. The other outcomes are *traceback*, *long*, *memory*
and *hang*.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.hostile_payloads import READERS, Payload, payloads
from common.hostile_text import SECRET_NAME, Canary, archive, pickles
from common.sound_files import copy_files, make_sound_files
from megatron_packed.data.sources.tokenized_dataset import DEFAULT_CACHE_NAME
from support.quick_python import quick_python

SECONDS = 60.0
"""Time after which a command counts as hanging, in seconds of an idle machine and of processor time."""
MOST_MEMORY = 4 << 30
"""Peak of the resident memory of a command's processes, in bytes, above which a payload counts."""
MOST_TEXT = 6000
"""Characters of an output; a sentence of an error, and the report of a small data set, are shorter."""
GOOD = ("refused", "harmless")
OUTCOMES = (*GOOD, "silent", "executed", "traceback", "raw", "long", "memory", "hang")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TRACE = re.compile(r"Traceback \(most recent|^thread '.*' panicked|Fatal Python error", re.M)
_PROGRAM = """
import atexit, os, resource, sys, traceback
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from megatron_packed.__main__ import run_program
try:
    code = run_program()
except SystemExit as end:
    code = end.code
except BaseException:
    traceback.print_exc()
    code = 1
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
with open(os.environ["PAYLOAD_PEAK"], "w") as file:
    used = [resource.getrusage(who) for who in both]
    memory = max(one.ru_maxrss for one in used) << 10
    file.write(str(memory) + " " + str(sum(one.ru_utime + one.ru_stime for one in used)))
os._exit(code)  # frees no modules, which takes ten times as long as most commands
"""
ADDRESSES = 20 << 30
"""Limit of the address space of a command, so that a payload cannot fill the machine."""


class Ended(NamedTuple):
    """End of a command."""

    code: int | None
    """Exit code; None if the command took too long."""
    text: str
    """Standard output and standard error."""
    peak: int
    """Largest resident memory of the command or of one of its children, in bytes."""
    processor: float
    """Processor time of the command and its children, in seconds."""


def run(words: list[str], folder: Path, commands: Path, canary: Canary, patience: float) -> Ended:
    """Run a command of megatron-packed in a folder, with a secret in its environment."""
    peak = folder.with_name("peak")
    environment = {**os.environ, SECRET_NAME: canary.secret, "PAYLOAD_PEAK": str(peak)}
    program = [str(commands / "python"), "-c", _PROGRAM.format(limit=ADDRESSES), *words]
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(
            program,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = started.wait(patience)
        except subprocess.TimeoutExpired:
            code = None
            started.kill()
            started.wait()
        output.seek(0)
        text = output.read(1 << 20).decode(errors="backslashreplace")
    memory, processor = peak.read_text().split() if peak.exists() else ("0", "0")
    peak.unlink(missing_ok=True)
    return Ended(code, text, int(memory), float(processor))


def outcome(payload: Payload, ended: Ended, canary: Canary, before: object, folder: Path) -> str:
    """Return one of `OUTCOMES`.

    Args:
        before: what `outside_state` returned before the command.
    """
    was_run = canary.file.exists() or any(folder.rglob("was_run"))
    if was_run or outside_state(canary) != before or leaked(ended, canary, folder):
        return "executed"
    if ended.code is None or ended.processor > SECONDS:
        return "hang"
    if _TRACE.search(ended.text) or ended.code < 0:
        return "traceback"
    if _CONTROL.search(ended.text):
        return "raw"
    if ended.peak > MOST_MEMORY:
        return "memory"
    if len(ended.text) > MOST_TEXT:
        return "long"
    if ended.code == 0:
        return "harmless" if payload.harmless else "silent"
    return "refused"


def leaked(ended: Ended, canary: Canary, folder: Path) -> bool:
    """Return whether the secret is in the output or in a file that the command wrote."""
    if canary.secret in ended.text:
        return True
    written = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return any(
        canary.secret.encode() in path.read_bytes()
        for path in written
        if path.stat().st_size < 1 << 26
    )


def outside_state(canary: Canary) -> object:
    """Return the names and contents outside of the folder of a case."""
    # The cache of a data set, which the payload names by a path, is beside its file by design.
    return sorted(
        (str(path), path.read_bytes() if path.is_file() else b"")
        for path in canary.outside.rglob("*")
        if DEFAULT_CACHE_NAME not in path.parts
    )


def case(
    payload: Payload, sound: Path, folder: Path, commands: Path, patience: float = SECONDS
) -> tuple[str, Ended]:
    """Make the hostile files in a new folder, run their reader, and return the outcome."""
    reader = READERS[payload.reader]
    outside = folder.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    outside.mkdir()
    canary = Canary(folder.parent / "was_run", outside, f"secret-{secrets.token_hex(8)}")
    canary.file.unlink(missing_ok=True)
    (outside / "secret.txt").write_text(canary.secret)
    (outside / "pickle.pt").write_bytes(archive(pickles(canary)["os.system"]))
    copy_files(sound, reader.files, folder)
    payload.make(folder, canary)
    before = outside_state(canary)
    ended = run(reader.words.split(), folder, commands, canary, patience)
    return outcome(payload, ended, canary, before, folder), ended


def rows(
    chosen: list[Payload], sound: Path | None = None, patience: float = SECONDS
) -> Iterator[dict[str, object]]:
    """Yield the outcome of each payload, after a check that its reader takes the sound files.

    Args:
        sound: folder of the sound files; they are made if it does not exist.
        patience: seconds after which a command counts as hanging.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        commands, sound = root / "commands", sound or root / "sound"
        commands.mkdir()
        stack.enter_context(quick_python(commands))
        if not sound.exists():
            sound.mkdir()
            make_sound_files(sound, commands)
        checked = set()
        for payload in chosen:
            if payload.reader not in checked:
                checked.add(payload.reader)
                unchanged = payload._replace(make=lambda folder, canary: None, harmless=True)
                found, ended = case(unchanged, sound, root / "case", commands, patience)
                assert found == "harmless", f"{payload.reader}: {found}\n{ended.text}"
                shutil.rmtree(root / "case")
            started = time.monotonic()
            found, ended = case(payload, sound, root / "case", commands, patience)
            yield {
                "reader": payload.reader,
                "name": payload.name,
                "outcome": found,
                "code": ended.code,
                "seconds": round(time.monotonic() - started, 1),
                "processor_seconds": round(ended.processor, 1),
                "peak_mib": ended.peak >> 20,
                "text": ended.text[-2000:].replace(f"{root}/", ""),
            }
            shutil.rmtree(root / "case")


def table(found: list[dict[str, object]]) -> str:
    """Return the number of each outcome for each reader."""
    counted: dict[str, Counter[str]] = {}
    for row in found:
        counted.setdefault(str(row["reader"]), Counter())[str(row["outcome"])] += 1
    lines = [" | ".join(["", *OUTCOMES])]
    for reader, numbers in counted.items():
        lines.append(" | ".join([reader, *(str(numbers[kind]) for kind in OUTCOMES)]))
    return "\n".join(lines)


def main(
    readers: list[str],
    every: int = 1,
    first: int = 0,
    out: Path | None = None,
    sound: Path | None = None,
    patience: float = SECONDS,
) -> int:
    """Return the exit code.

    Args:
        readers: names of `READERS`.
        every, first: of the payloads of these readers, run each ``every``-th from ``first`` on.
        out: JSON Lines file for the outcomes.
        sound, patience: see `rows`.
    """
    chosen = [payload for payload in payloads() if payload.reader in readers][first::every]
    found = []
    with open(out, "w") if out else contextlib.nullcontext() as lines:
        for row in rows(chosen, sound, patience):
            found.append(row)
            if lines is not None:
                lines.write(json.dumps(row) + "\n")
                lines.flush()
            if row["outcome"] not in GOOD:
                print(json.dumps(row), flush=True)
    good = sum(row["outcome"] in GOOD for row in found)
    print(f"{table(found)}\n{good} of {len(found)}")
    return int(good != len(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", action="append", choices=READERS, help="may be repeated")
    parser.add_argument("--every", type=int, default=1, help="run each N-th payload")
    parser.add_argument("--first", type=int, default=0, help="payload to begin with, from 0")
    parser.add_argument("--out", type=Path, help="JSON Lines file with every outcome")
    parser.add_argument("--sound", type=Path, help="folder of sound files; made if it is missing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="patience for a command")
    given = parser.parse_args()
    chosen = given.reader or list(READERS)
    sys.exit(main(chosen, given.every, given.first, given.out, given.sound, given.seconds))
