"""Print each flag that Megatron-LM's hybrid examples and functional tests pass, one per line, with
its first values.

    python tools/megatron_script_flags.py MEGATRON_CHECKOUT > megatron_hybrid_flags.txt

If a value is a variable of a script, its name is printed. The tests of `tests/unit/config/megatron` read the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDERS = (
    "examples/mamba",
    "examples/hybrid",
    "examples/post_training/modelopt/conf/nvidia",
    "tests/functional_tests/test_cases/hybrid",
)
FILES = ("examples/post_training/modelopt/finetune.sh",)
_FLAG = re.compile(r"--[a-z][\w-]*")
_END_OF_FLAGS = re.compile(r"[\"')\\]*$")
LAUNCHERS = {
    "--nproc-per-node",
    "--nproc_per_node",
    "--nnodes",
    "--node-rank",
    "--node_rank",
    "--master-addr",
    "--master_addr",
    "--master-port",
    "--master_port",
    "--no-sync",
    "--ntasks",
    "--ntasks-per-node",
    "--kill-on-bad-exit",
    "--container-image",
    "--container-mounts",
    "--container-workdir",
}


def collect(checkout: Path) -> dict[str, str]:
    """Return each flag with its values as one text, empty for a switch."""
    found: dict[str, str] = {}
    paths = [path for folder in FOLDERS for path in sorted((checkout / folder).rglob("*"))]
    for path in [*paths, *(checkout / name for name in FILES)]:
        if path.suffix == ".yaml":
            pairs = from_yaml(path)
        elif path.suffix == ".sh":
            pairs = from_shell(path.read_text())
        else:
            continue
        for flag, value in pairs:
            found.setdefault(flag, value)
    return {flag: found[flag] for flag in sorted(found)}


def from_yaml(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a functional test. The value ``true`` marks a switch, and a list in
    brackets is several values.
    """
    arguments = yaml.load(path.read_text(), Loader=yaml.BaseLoader).get("MODEL_ARGS") or {}
    for flag, value in arguments.items():
        yield flag, "" if value == "true" else " ".join(value.strip("[]").split())


def from_shell(text: str) -> Iterator[tuple[str, str]]:
    """Yield all flags of a shell script, each with the words after it on its line."""
    for line in text.splitlines():
        words = (
            line.split("#", 1)[0].split()
            if line.lstrip().startswith(("#", "--", "-"))
            else line.split()
        )
        for number, word in enumerate(words):
            if not _FLAG.fullmatch(word) or word in LAUNCHERS:
                continue
            values = []
            for other in words[number + 1 :]:
                if other.startswith("--") or other in ("\\", "#"):
                    break
                values.append(_END_OF_FLAGS.sub("", other).strip("\"'"))
            yield word, " ".join(value for value in values if value)


if __name__ == "__main__":
    for flag, value in collect(Path(sys.argv[1])).items():
        print(f"{flag} {value}".rstrip())
