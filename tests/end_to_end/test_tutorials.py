"""Every command of the tutorials runs in a shell, in a copy of the repository, with fewer steps."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.quick_python import quick_python
from support.runs import REPOSITORY
from support.slurm_jobs import job_number

TUTORIALS = REPOSITORY / "docs" / "tutorials"
PAGES = (
    "first_run",
    "sft",
    "published",
    "lora",
    "pretrain",
    "capacities",
    "multi_node",
    "fallback",
)
ON_THEIR_OWN = ("first_run", "sft", "pretrain")
FEWER = (
    "--train-iters 3 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --global-batch-size 2 "
    "--no-isolation-self-test"
)
"""Flags that are added to each training command. The tests check the commands, not the training."""
SAID = {
    "first_run": ["report: runs/quickstart/report.html", "PACKAGES"],
    "sft": [
        "200 lines in 1 file: 200 used (200 messages)",
        "5800 tokens, 1000 of them targets",
        "step 3/3",
        "runs/chat/plot.html",
    ],
    "published": [
        "200 lines in 1 file: 200 used (200 messages)",
        "step 3/3",
        "models/tuned: written",
        "model.safetensors differ",
        "transformers answers:",
    ],
    "lora": [
        "adapters of rank 16 (scale 2): ",
        "step 3/3",
        "runs/lora/plot.html",
        "adapter: written",
        "PEFT answers:",
        "model.safetensors differ",
    ],
    "pretrain": [
        "written: data/python_text_document.bin, .idx and .crc32c",
        "step 3/3",
        "runs/pretrain/plot.html",
    ],
    "capacities": [
        "--packing-method balanced --cuda-graph-impl local --cuda-graph-max-packed-seqs 16"
    ],
    "multi_node": ["step 3/3", "turn 0 of job", "2 process(es) on cpu", "runs/cluster/log.html"],
    "fallback": [
        "capacity 8 covers all but 11 of 12 packs",
        "44.8% full",
        "CUDA graphs need a GPU",
        "CUDA graph fallback",
    ],
}
"""Console output that a tutorial promises and that only its commands can print."""
SBATCH = """#!/usr/bin/env bash
# Fake of SLURM's sbatch: start a job of two nodes at once, on this machine
set -eu
[ "$1 $2" = "--nodes 2" ]
export FAKE_SLURM=$PWD SLURM_JOB_ID={number} SLURM_JOB_NODELIST="127.0.0.[1-2]" SLURM_JOB_NUM_NODES=2 PATH={fakes}:$PATH
exec bash "${{@:3}}"
"""
HF = f"""#!/usr/bin/env bash
# Fake of the Hugging Face CLI: a random model of the same family in place of a download
set -eu
[ "$1 $3" = "download --local-dir" ]
[[ $2 == *granite-4.0-h* ]]
exec "$(dirname "$0")/python" - "$4" <<'END'
import sys

sys.path[:0] = {[str(REPOSITORY), str(REPOSITORY / "tests")]}
from pathlib import Path

from support.served_models import write_base

write_base("granite", Path(sys.argv[1]))
END
"""


def blocks(page: str) -> list[str]:
    """Return the text of each shell block of a page."""
    return re.findall(
        r"^```sh\n(.*?)^```$", (TUTORIALS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )


def smaller(block: str) -> str:
    """Return a block whose commands train for fewer steps.

    The quickstart may end with exit code 1, because it learns nothing in these steps. A run that may
    not run eagerly ends with exit code 23.
    """
    commands = []
    for command in re.split(r"(?<!\\)\n", block):
        if command.startswith(("megatron-packed train", "sbatch")):
            typed, background, _ = command.partition(" &")
            command = f"{typed} {FEWER}{background}"
        elif command == "bash examples/quickstart/run.sh":
            command += f" {FEWER} --seq-length 256 || test $? = 1"
        if "--cuda-graph-strict" in command:
            command += " || test $? = 23"
        commands.append(command)
    return "\n".join(commands).replace("29555", str(20000 + job_number()))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a copy of the repository without the results of runs.

    Its `.venv` starts Python processes in which torch is already imported.
    """
    folder = tmp_path_factory.mktemp("checkout")
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("runs", "data", ".venv", ".git"):
            (folder / entry.name).symlink_to(entry)
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text(f'PATH="{commands}:$PATH"\n')
    (commands / "sbatch").write_text(
        SBATCH.format(number=job_number(), fakes=Path(__file__).parent / "fake_slurm")
    )
    (commands / "hf").write_text(HF)
    for fake in ("sbatch", "hf"):
        (commands / fake).chmod(0o755)
    stamp = hashlib.sha256(
        (REPOSITORY / "setup.cfg").read_bytes() + sys.version.encode()
    ).hexdigest()[:16]
    (folder / ".venv" / ".stamp").write_text(f"{stamp}\n")
    with quick_python(commands):
        yield folder


def type_into_shell(script: str, checkout: Path) -> str:
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(checkout),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHON_EXEC": str(checkout / ".venv" / "bin" / "python"),
        "LANG": "C.UTF-8",
    }
    done = subprocess.run(
        ["bash", "-evuo", "pipefail"],
        input=script,
        cwd=checkout,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_tutorial(page: str, checkout: Path) -> None:
    if page in ("published", "lora"):
        pytest.importorskip("transformers")
    if page == "lora":
        pytest.importorskip("peft")
    prepared = blocks("sft") if page not in ON_THEIR_OWN else []
    before = [block for block in prepared if block.startswith(("bash .ci", "mkdir", "cat >"))]
    typed = [smaller(block) for block in blocks(page)]
    said = type_into_shell("\n".join([*before, "pwd", *typed]), checkout)
    missing = [words for words in SAID[page] if words not in said]
    assert not missing, said


def test_the_pages_are_those_of_the_overview() -> None:
    linked = re.findall(r"\]\((\w+)\.md\)", (TUTORIALS / "README.md").read_text())
    assert tuple(linked) == PAGES
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {*PAGES, "README"}
