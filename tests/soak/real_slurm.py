"""Run the SLURM templates on a real SLURM: controller and two nodes on this machine.

    apt-get install -y slurm-wlm munge
    python tests/soak/real_slurm.py

It needs root and about six minutes on two cores. Each case prints a line; the exit code is 1 if a case
fails and 77 if a package of SLURM is missing. All daemons end with the script.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = "examples/slurm/pretrain.sbatch"
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
SKIPPED = 77
FLAGS = [
    "--device",
    "cpu",
    "--mock-data",
    "--hybrid-layer-pattern",
    "M*-",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "2",
    "--mamba-num-groups",
    "1",
    "--seq-length",
    "64",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "2",
    "--lr",
    "1e-3",
    "--save-interval",
    "10",
    "--log-interval",
    "1",
]
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cpus} RealMemory=1000
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs={cpus} RealMemory=1000
PartitionName=all Nodes=127.0.0.[1-2] Default=YES State=UP MaxTime=INFINITE
"""
"""Two nodes on one machine. Their names must have addresses, because the ranks connect to them."""


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Start munged, slurmctld and two slurmd; end them afterwards."""
    for name in ("munge", "state"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().split(".")[0]
    ports = dict(zip(("port", "first", "second"), range(26817, 26820), strict=True))
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(host=host, folder=folder, cpus=os.cpu_count(), **ports)
    )
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [
        f"--{name}={folder}/munge/{file}"
        for name, file in (
            ("key-file", "key"),
            ("socket", "socket"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    daemons = [subprocess.Popen(["munged", "--foreground", "--force", *munge])]
    try:
        wait_until(lambda: (folder / "munge" / "socket").exists(), 20, "munged does not start")
        daemons.append(subprocess.Popen(["slurmctld", "-D", "-c"], stderr=subprocess.DEVNULL))
        for node in ("127.0.0.1", "127.0.0.2"):
            command = ["slurmd", "-D", "-N", node]
            daemons.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        wait_until(
            lambda: (
                said("sinfo", "--noheader", "--Format=nodes,statecompact").split() == ["2", "idle"]
            ),
            60,
            "the nodes do not become idle",
        )
        yield
    finally:
        subprocess.run(
            ["scancel", "--user=root", "--signal=KILL", "--full"], stderr=subprocess.DEVNULL
        )
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_until(holds: Callable[[], object], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.2)


class Job:
    """Job of two nodes with one process each, in a folder of its own."""

    def __init__(
        self, folder: Path, flags: list[str], run: Path | None = None, **variables: str
    ) -> None:
        folder.mkdir()
        self.run = run or folder / "run"
        self._output = folder / "slurm.out"
        self._turns = 1
        options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=1"]
        environment = {
            **os.environ,
            "PATH": f"{commands(folder)}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "PROCESSES_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        self.number = subprocess.run(
            [
                "sbatch",
                *options,
                f"--output={self._output}",
                TEMPLATE,
                str(self.run),
                *FLAGS,
                *flags,
            ],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def field(self, name: str) -> str:
        shown = re.search(rf"\b{name}=(\S+)", said("scontrol", "show", "job", self.number))
        return shown[1] if shown else ""

    def wait_for(self, words: str, seconds: float = 90) -> None:
        wait_until(lambda: words in self.output, seconds, f"no {words!r} in:\n{self.output}")

    def wait_for_step(self, step: int) -> None:
        log = self.run / "log.jsonl"
        wait_until(
            lambda: log.exists() and log.read_text().count('"lm_loss"') >= step, 90, self.output
        )

    def wait_for_state(self, state: str, seconds: float = 90) -> None:
        wait_until(
            lambda: self.field("JobState") == state,
            seconds,
            f"{self.field('JobState')} instead of {state}:\n{self.output}",
        )

    def start_next_turn(self) -> None:
        """Start a requeued job now; SLURM would wait two minutes."""

        def starts() -> bool:
            # Repeated: the end of the previous turn sets the time once more.
            said("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            turns = self.output.count(f" of job {self.number}: ")
            return turns > self._turns

        wait_until(starts, 90, f"the next turn does not start:\n{self.output}")
        self._turns += 1


def commands(folder: Path) -> Path:
    """Return a folder with a `megatron-packed` that the cases can change by variables."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "megatron-packed").write_text(
        "#!/bin/bash\n"
        f'if [ -n "$NO_SCONTROL" ]; then PATH={bin_folder}/none:$PATH; fi\n'
        '[ "$SLURM_NODEID" != 1 ] || set -- "$@" $WRONG\n'
        f'exec {sys.executable} -m megatron_packed "$@"\n'
    )
    (bin_folder / "none").mkdir()
    (bin_folder / "none" / "scontrol").write_text("#!/bin/sh\nexit 127\n")
    for path in (bin_folder / "megatron-packed", bin_folder / "none" / "scontrol"):
        path.chmod(0o755)
    return bin_folder


def start(folder: Path) -> None:
    """A job trains to its end, also where the step has no scontrol."""
    for name in ("with", "without"):
        variables = {"NO_SCONTROL": "1"} if name == "without" else {}
        job = Job(folder / name, ["--train-iters", "12"], **variables)
        job.wait_for_state("COMPLETED", 120)


def stop(folder: Path) -> None:
    """USR1 saves and requeues; the next turn resumes. Another job on the folder is refused.

    scancel saves and does not requeue.
    """
    job = Job(folder / "job", ["--train-iters", "1200"], NO_SCONTROL="1")
    job.wait_for_step(3)
    second = Job(folder / "second", ["--train-iters", "12"], run=job.run)
    said("scancel", "--signal=USR1", job.number)
    job.wait_for("saved before the end of turn 0")
    second.wait_for_state("FAILED")
    assert f"job {job.number} uses" in second.output, second.output
    job.start_next_turn()
    job.wait_for("resuming from")
    said("scancel", job.number)
    job.wait_for("the job was cancelled and is not queued again")
    job.wait_for_state("CANCELLED")


def requeue(folder: Path) -> None:
    """A requeue by an administrator saves, says that the job waits, and resumes."""
    job = Job(folder / "job", ["--train-iters", "100000"])
    job.wait_for_step(3)
    said("scontrol", "requeue", job.number)
    job.wait_for("queued it; otherwise submit")
    job.start_next_turn()
    job.wait_for("resuming from")
    said("scancel", job.number)


def kill(folder: Path) -> None:
    """A killed rank restarts the run in the job; the second one gives the job another turn."""
    job = Job(folder / "job", ["--train-iters", "100000"])
    job.wait_for("saved ")
    for loss in (1, 2):
        kill_rank(folder)
        if loss == 1:
            job.wait_for("restart 1 of 1")
            job.wait_for("resuming from")
    job.wait_for("a process was lost in turn 0")
    assert (job.run / "losses").read_text() == f"job {job.number} turn 0\n"
    job.start_next_turn()
    job.wait_for("turn 1 of job")
    said("scancel", job.number)


def kill_rank(folder: Path) -> None:
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        if environment.get("RANK") == "1" and str(folder) in environment.get("PATH", ""):
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError("rank 1 does not run")


def wrong_machine(folder: Path) -> None:
    """A machine with a wrong flag ends the job with code 2 within a minute."""
    begun = time.monotonic()
    job = Job(folder / "job", ["--train-iters", "12"], WRONG="--sequence-lenght 8")
    job.wait_for_state("FAILED")
    assert job.field("ExitCode") == "2:0", job.output
    assert "machine 1" in job.output and "--sequence-lenght 8: is not a flag" in job.output
    assert time.monotonic() - begun < 60, time.monotonic() - begun


CASES = (start, stop, requeue, kill, wrong_machine)


def no_job_is_left() -> bool:
    """Cancel all jobs, also those that queue themselves again; return True if there are none."""
    said("scancel", "--user=root")
    return not said("squeue", "--noheader")


def missing() -> str:
    """Return the sentence that says what this machine lacks; empty if the cases can run."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not installed; apt-get install slurm-wlm munge."
    return "" if os.geteuid() == 0 else "slurmd needs root."


def main(names: Sequence[str]) -> int:
    """Run the cases with these names, without names all cases; return the exit code."""
    if missing():
        print(f"skipped: {missing()}")
        return SKIPPED
    cases = [case for case in CASES if not names or case.__name__ in names]
    passed = 0
    with tempfile.TemporaryDirectory(prefix="slurm_") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munged refuses folders that others could not pass
        with cluster(folder):
            for case in cases:
                begun = time.monotonic()
                (folder / case.__name__).mkdir()
                try:
                    case(folder / case.__name__)
                    passed, outcome = passed + 1, "passed"
                except AssertionError as error:
                    outcome = f"FAILED: {error}"
                print(f"{case.__name__}: {outcome} in {time.monotonic() - begun:.0f} s", flush=True)
                wait_until(no_job_is_left, 90, "jobs do not end")
    print(f"{passed} of {len(cases)}")
    return int(passed < len(cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
