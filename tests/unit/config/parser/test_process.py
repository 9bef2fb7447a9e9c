"""The parser in a process: exit code, output and run time of wrong command lines, and printed
answers.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.command_lines import argv_of

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys
from megatron_packed.config.parser.parse import parse_or_exit
try:
    config = parse_or_exit()
finally:
    print("imported:", sorted({"torch", "numpy", "transformers"} & set(sys.modules)), file=sys.stderr)
print("ran", config.model.num_layers)
"""
WRONG = shlex.split("--hidden-size 0 --lr abc --data-path absent.jsonl --fp16 --sequence-lenght 5")


def start(
    argv: list[str], cwd: Path, program: str = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    env = {key: value for key, value in os.environ.items() if key not in launch}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_a_wrong_command_line_ends_with_code_2_at_once_and_without_a_traceback(tmp_path) -> None:
    times = []
    for _ in range(3):
        begun = time.monotonic()
        done = start(WRONG, tmp_path)
        times.append(time.monotonic() - begun)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "imported: []" in done.stderr
    report = done.stderr.partition("imported:")[0]
    assert re.match(r"\d+ problems in the configuration; nothing was started\.\n", report)
    for option in (
        "--hidden-size 0",
        "--lr 'abc'",
        "--data-path absent.jsonl",
        "--fp16",
        "--sequence-lenght 5",
    ):
        assert option in report
    assert report.count("rule: ") == report.count("cure: ") == int(report.split()[0])
    assert min(times) < 1.5


def test_only_rank_0_speaks(tmp_path) -> None:
    silent = start(WRONG, tmp_path, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert silent.returncode == 2
    assert silent.stderr == "imported: []\n"
    assert start(["--help"], tmp_path, RANK="1", WORLD_SIZE="2").stdout == ""


def test_a_silent_rank_that_the_launcher_stops_has_not_failed(tmp_path) -> None:
    """A silent rank that is stopped exits with code 0, so that torchrun's report shows only rank 0."""
    stopped = (
        "import os, signal, time\ntime.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGTERM)\n"
        + PROGRAM
    )
    assert start(WRONG, tmp_path, stopped, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2").returncode == 0


@pytest.mark.parametrize(("ranks_here", "seconds"), [("2", 60.0), ("1", 3.0)])
def test_silent_ranks_beside_rank_0_wait_for_its_report(
    ranks_here: str, seconds: float, tmp_path
) -> None:
    """On a busy machine rank 0 is slow; a silent rank that ends first would end it unheard."""
    shown = "import sys, time\ntime.sleep = lambda seconds: print('waits', seconds)\n" + PROGRAM
    here = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": ranks_here, "WORLD_SIZE": "2", "RANK": "1"}
    done = start(WRONG, tmp_path, shown, TORCHELASTIC_ERROR_FILE="error.json", **here)
    assert done.stdout == f"waits {seconds}\n" and done.returncode == 2


def test_the_first_rank_of_another_machine_tells_of_paths_alone(tmp_path) -> None:
    far = start(WRONG, tmp_path, RANK="8", LOCAL_RANK="0", GROUP_RANK="1", WORLD_SIZE="16")
    assert far.returncode == 2
    assert "absent.jsonl" in far.stderr
    assert "--lr" not in far.stderr
    assert far.stderr.startswith("On ")


def test_a_right_command_line_runs(right, tmp_path) -> None:
    argv = argv_of(right)
    done = start([*argv, "--hybrid-override-pattern=M*-M"][2:], tmp_path)
    assert done.stdout == "ran 4\n"
    assert (
        "warning: --hybrid-override-pattern is deprecated; write --hybrid-layer-pattern."
        in done.stderr
    )


def test_version_and_printed_configuration(right, tmp_path) -> None:
    assert re.fullmatch(r"megatron_packed \d+\.\d+\.\d+\n", start(["--version"], tmp_path).stdout)
    argv = argv_of(right)
    done = start([*argv, "--print-config", "--bf16", "--is-hybrid-model"], tmp_path)
    assert done.returncode == 0
    assert "\nran " not in done.stdout
    assert re.search(r"^  bf16: true +# flag --bf16$", done.stdout, re.MULTILINE)
    assert "--is-hybrid-model: every model is a hybrid stack" in done.stdout
    assert start(["--print-config"], tmp_path).returncode == 2
