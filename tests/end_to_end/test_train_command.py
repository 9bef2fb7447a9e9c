"""`megatron-packed train` ends with the exit code and the sentence of the run, and nothing else.

Two nodes are tested in `test_slurm.py`, and the launcher without training in
`tests/unit/launch/test_launcher.py`.
"""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.quick_python import quick_python
from support.runs import (
    TIMEOUT,
    Data,
    assert_only_ours,
    command_line,
    in_folder,
    losses,
    saved_steps,
    tiny_options,
)
from support.slurm_jobs import job_number

USAGE, PREEMPTED = 2, 75
STOPPED = "Stopped on request. Run the same command again to resume."


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return an environment in which ranks start with torch already imported.

    The launcher is a real process, because it does not import torch on one machine.
    """
    folder = tmp_path_factory.mktemp("commands")
    with quick_python(folder):
        yield {
            **os.environ,
            "PYTHON_EXEC": str(folder / "python"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }


def train(options: dict[str, Any], *launch: str) -> list[str]:
    module = [sys.executable, "-m", "megatron_packed", "train", "--nproc-per-node", "2"]
    return [*module, *launch, *command_line(options)]


def wait_for_steps(log: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not (log.exists() and len(losses(log)) >= count):
        assert time.monotonic() < deadline, "the run does not train"
        time.sleep(0.01)


def test_a_wrong_flag_is_reported_before_torch_is_imported(data: Data, tmp_path: Path) -> None:
    """The launcher reports all problems once, ends with code 2, and creates no folder."""
    wrong = tiny_options(
        data, train_iters=2, lr_warmup_iters=0, sequence_lenght=8, save=tmp_path / "new"
    )
    module = [sys.executable, "-X", "importtime", *train(wrong)[1:]]
    done = subprocess.run(module, capture_output=True, text=True, timeout=60)
    imported, said = [], []
    for line in done.stderr.splitlines():
        (imported if line.startswith("import time:") else said).append(line)
    assert done.returncode == USAGE, said
    assert said[0] == "1 problem in the configuration; nothing was started."
    assert said[1].split() == ["1.", "--sequence-lenght", "8"]
    assert len(said) == 4 and done.stdout == ""
    assert not any(line.split("|")[-1].strip() == "torch" for line in imported)
    assert not (tmp_path / "new").exists()


def test_a_killed_rank_restarts_the_run_and_sigterm_saves(
    data: Data, quick: dict[str, str], tmp_path: Path
) -> None:
    """The run resumes from its checkpoint after rank 1 was killed; SIGTERM ends it with code 75."""
    options = tiny_options(data, train_iters=2000, save_interval=2, **in_folder(tmp_path))
    log, console = tmp_path / "log.jsonl", tmp_path / "console.txt"
    with console.open("w") as file:
        launcher = subprocess.Popen(
            train(options, "--max-restarts", "1"), env=quick, stdout=file, stderr=file
        )
    wait_for_steps(log, 3)
    rank_1 = psutil.Process(launcher.pid).children()[1]
    rank_1.kill()
    while "restart 1 of 1" not in console.read_text():
        assert launcher.poll() is None, console.read_text()
        time.sleep(0.05)
    wait_for_steps(log, len(losses(log)) + 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == PREEMPTED, console.read_text()
    said = console.read_text()
    killed = f"rank 1 (process {rank_1.pid}) was ended by SIGKILL"
    restart = f"restart 1 of 1: the run resumes from the newest checkpoint in --load {tmp_path}"
    for words in (killed, restart, "SIGTERM: the run will stop", STOPPED):
        assert said.count(words) == 1, (words, said)
    assert re.search(r"resuming from .* \(iteration \d+\)", said.partition(restart)[2]), said
    assert json.loads((tmp_path / "checkpoints/STATUS.json").read_text()) == {
        "exit_code": PREEMPTED
    }
    assert_only_ours(said)


def test_ctrl_c_in_a_terminal_saves(data: Data, quick: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C in a terminal ends the run with a checkpoint and exit code 75."""
    options = tiny_options(data, train_iters=2000, **in_folder(tmp_path))
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.execve(sys.executable, train(options), quick)
    said, pressed = "", False
    while True:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                said += os.read(terminal, 1 << 16).decode()
            except OSError:  # the last process of the terminal has ended
                break
        if not pressed and re.search(r"step +2/", said):
            os.write(terminal, b"\x03")
            pressed = True
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == PREEMPTED, said
    assert said.count("SIGINT: the run will stop") == said.count(STOPPED) == 1, said
    assert_only_ours(said)
    assert saved_steps(tmp_path)[0] >= 2


def start_machines(
    environment: dict[str, str], folder: Path, port: int, *flags: list[str]
) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start a launcher for each list of flags, as the machines of one run."""
    launched = []
    for node, own in enumerate(flags):
        place = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        words = [environment.get("PYTHON_EXEC", sys.executable), "-m", "megatron_packed", "train"]
        console = folder / f"machine_{node}.txt"
        with console.open("w") as file:
            command = [*words, "--nnodes", str(len(flags)), *place, *own]
            launched.append(
                (subprocess.Popen(command, env=environment, stdout=file, stderr=file), console)
            )
    return launched


@pytest.mark.parametrize(
    ("processes", "wrong", "sentence"),
    [
        ("1", ["--sequence-lenght", "8"], "--sequence-lenght 8: is not a flag; correct it"),
        (
            "gpu",
            [],
            "--nproc-per-node gpu: no GPU is visible on this machine; give a number or cpu.",
        ),
    ],
)
def test_a_machine_that_is_refused_ends_the_others(
    processes: str,
    wrong: list[str],
    sentence: str,
    data: Data,
    quick: dict[str, str],
    tmp_path: Path,
) -> None:
    """The other machine ends with the same exit code, and prints the reason."""
    flags = command_line(tiny_options(data, train_iters=2, lr_warmup_iters=0))
    begun = time.monotonic()
    machines = start_machines(
        {**quick, "CUDA_VISIBLE_DEVICES": ""},
        tmp_path,
        20000 + job_number(),
        ["--nproc-per-node", "1", *flags],
        ["--nproc-per-node", processes, *flags, *wrong],
    )
    assert [launcher.wait(60) for launcher, _ in machines] == [USAGE, USAGE]
    assert time.monotonic() - begun < 60
    said = machines[0][1].read_text()
    assert re.fullmatch(rf"machine 1 \(.*\) takes no part: {re.escape(sentence)}.*\n", said), said


@pytest.mark.parametrize(
    ("wrong_node", "wrong", "sentence"),
    [
        (1, "--nnodes x", r"machine 1 \(.*\) takes no part: --nnodes x: give a number of machines"),
        (
            1,
            "--nnodes 3",
            r"machine \d.* has --nnodes \d, and .* has --nnodes \d; give all machines",
        ),
        (
            0,
            "--nnodes 3",
            r"machine \d.* has --nnodes \d, and .* has --nnodes \d; give all machines",
        ),
        (1, "--nnodes 1", r"a machine \(.*\) takes no part: --node-rank 1: --nnodes is 1 on this"),
        (1, "--node-rank x", r"a machine \(.*\) takes no part: --node-rank x: give each of the 2"),
        (
            0,
            "--max-restarts x",
            r"machine 0 \(.*\) takes no part: --max-restarts x: give 0 or more",
        ),
    ],
)
def test_a_wrong_launcher_option_of_one_machine_ends_the_others(
    wrong_node: int,
    wrong: str,
    sentence: str,
    data: Data,
    quick: dict[str, str],
    tmp_path: Path,
) -> None:
    """The other machine prints the machine and its option, also if that machine has no number."""
    options = tiny_options(data, train_iters=2, lr_warmup_iters=0, global_batch_size=6)
    flags = ["--nproc-per-node", "1", *command_line(options)]
    machines = [flags, flags]
    machines[wrong_node] = [*flags, *wrong.split()]
    port = 20000 + job_number()
    launched = start_machines({**quick, "CUDA_VISIBLE_DEVICES": ""}, tmp_path, port, *machines)
    assert [launcher.wait(60) for launcher, _ in launched] == [USAGE, USAGE]
    said = launched[1 - wrong_node][1].read_text()
    # Torch was imported before the launcher could quieten it, and may warn of the closed store.
    assert re.search(f"^{sentence}", said, re.MULTILINE), said


def test_a_wrong_option_ends_machines_that_find_their_numbers(
    data: Data, quick: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{20000 + job_number()}"]
    flags += ["--nproc-per-node", "1", "--nnodes", "2"]
    flags += command_line(tiny_options(data, train_iters=2, lr_warmup_iters=0))
    machines = [flags, [*flags, "--nnodes", "x"]]
    launched = [
        subprocess.Popen(
            [quick["PYTHON_EXEC"], "-m", "megatron_packed", "train", *words],
            env={**quick, "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in machines
    ]
    said = [launcher.communicate(timeout=60)[1] for launcher in launched]
    assert [launcher.returncode for launcher in launched] == [USAGE, USAGE]
    assert re.search(r"^a machine \(.*\) takes no part: --nnodes x: give", said[0], re.M), said


def test_a_port_of_another_program_ends_all_machines(
    data: Data, quick: dict[str, str], tmp_path: Path
) -> None:
    """No machine waits longer than join_timeout for a program that never answers."""
    flags = command_line(tiny_options(data, train_iters=2, lr_warmup_iters=0))
    flags = ["--nproc-per-node", "1", "--rdzv-conf", "join_timeout=2", *flags]
    with socket.create_server(("", 0)) as silent:
        machines = start_machines(quick, tmp_path, silent.getsockname()[1], flags, flags)
        assert [launcher.wait(40) for launcher, _ in machines] == [1, 1]
    for _, console in machines:
        [line] = console.read_text().splitlines()
        assert line.startswith("the machines did not meet at 127.0.0.1:"), line


def test_the_loss_of_the_first_machine_is_reported_without_backtraces(
    data: Data, quick: dict[str, str], tmp_path: Path
) -> None:
    """The second machine ends soon after the first, which hosts all stores, was killed.

    Both start without ``quick``: torch reads its log level while it is imported.
    """
    environment = {name: value for name, value in quick.items() if name != "PYTHON_EXEC"}
    options = tiny_options(data, train_iters=2000, log_jsonl=tmp_path / "log.jsonl")
    flags = ["--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-conf", "join_timeout=4"]
    flags += command_line(options)
    first, second = start_machines(environment, tmp_path, 20000 + job_number(), flags, flags)
    wait_for_steps(tmp_path / "log.jsonl", 2)
    first[0].kill()
    assert second[0].wait(40) == 1
    said = second[1].read_text()
    assert "the machines did not meet" in said and "frame #" not in said, said


def test_no_machine_reads_the_store_of_one_machine(
    data: Data, quick: dict[str, str], tmp_path: Path
) -> None:
    """Every port on which a rank listens is a port of 127.0.0.1."""
    options = tiny_options(data, train_iters=2000, **in_folder(tmp_path))
    launcher = subprocess.Popen(train(options), env=quick, stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(tmp_path / "log.jsonl", 2)
        ranks = [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("MEGATRON_PACKED_LAUNCHER") == str(launcher.pid)
        ]
        listening = [
            connection.laddr.ip
            for process in ranks
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    assert listening and set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}, listening
