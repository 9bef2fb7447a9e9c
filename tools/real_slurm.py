"""Run the SLURM templates on a real SLURM: controller and two nodes on this machine.

    apt-get install -y slurm-wlm munge
    python tools/real_slurm.py

It needs root and about five minutes on two cores. Each case runs with and without scontrol in the step,
and prints a line. The exit code is 1 if a case fails and 77 if a package of SLURM is missing. All daemons
end with the script.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from common import REPOSITORY

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
    ports = free_ports("port", "first", "second")
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


def free_ports(*names: str) -> dict[str, int]:
    """Return a port of this machine for each name, which no program uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in names]
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}


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
        self,
        folder: Path,
        flags: list[str],
        run: Path | None = None,
        template: str = TEMPLATE,
        **variables: str,
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
                template,
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
        """Start a requeued job now. SLURM would wait two minutes, and does so if it is busy."""

        def starts() -> bool:
            # The end of the previous turn sets the time once more.
            if self.field("Reason") == "BeginTime":
                said("scontrol", "update", f"JobId={self.number}", "StartTime=now")
                time.sleep(1)
            return self.output.count(f" of job {self.number}: ") > self._turns

        try:
            wait_until(starts, 200, "the next turn does not start")
        except AssertionError as error:
            shown = said("scontrol", "show", "job", self.number)
            raise AssertionError(f"{error}:\n{shown}\n{self.output}") from None
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


def start(folder: Path, variables: dict[str, str]) -> None:
    """A job trains to its end."""
    job = Job(folder / "job", ["--train-iters", "12"], **variables)
    job.wait_for_state("COMPLETED", 120)


def stop(folder: Path, variables: dict[str, str]) -> None:
    """USR1 saves and requeues; the next turn resumes. Another job on the folder is refused.

    scancel saves and does not requeue.
    """
    job = Job(folder / "job", ["--train-iters", "1200"], **variables)
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


def requeue(folder: Path, variables: dict[str, str]) -> None:
    """A requeue by an administrator saves, says that the job waits, and resumes."""
    job = Job(folder / "job", ["--train-iters", "100000"], **variables)
    job.wait_for_step(3)
    said("scontrol", "requeue", job.number)
    job.wait_for("queued it; otherwise submit")
    job.start_next_turn()
    job.wait_for("resuming from")
    said("scancel", job.number)


def kill(folder: Path, variables: dict[str, str]) -> None:
    """A killed rank restarts the run in the job; the second one gives the job another turn."""
    job = Job(folder / "job", ["--train-iters", "100000"], **variables)
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


def wrong_machine(folder: Path, variables: dict[str, str]) -> None:
    """A machine with a wrong flag ends the job with code 2 within a minute."""
    refused = "machine 1", "--sequence-lenght 8: is not a flag"
    end_with_wrong_machine(folder / "job", "--sequence-lenght 8", refused, variables)


def wrong_launcher(folder: Path, variables: dict[str, str]) -> None:
    """So does a machine with a wrong option of the launcher, also in the number of machines."""
    wrong = {
        "--max-restarts x": "--max-restarts x: give 0 or more",
        "--nnodes x": "--nnodes x: give a number of machines",
        "--nnodes 3": "give all machines the same number",
        "--node-rank 7": "--node-rank 7: give each of the 2 machines its number",
    }
    for number, (option, sentence) in enumerate(wrong.items()):
        end_with_wrong_machine(folder / f"job_{number}", option, [sentence], variables)


def end_with_wrong_machine(
    folder: Path, wrong: str, sentences: Sequence[str], variables: dict[str, str]
) -> None:
    begun = time.monotonic()
    # A batch size for two and for three machines, so that only the given option is wrong.
    flags = ["--train-iters", "12", "--global-batch-size", "6"]
    job = Job(folder, flags, WRONG=wrong, **variables)
    job.wait_for_state("FAILED")
    assert job.field("ExitCode") == "2:0", job.output
    told = [line for line in job.output.splitlines() if line.startswith("0: ")]
    for sentence in sentences:
        assert any(sentence in line for line in told), job.output
    assert time.monotonic() - begun < 60, time.monotonic() - begun


STEPS = """#!/bin/bash
folder=$1
shift
for step in a b; do
  srun --overlap --mem=0 --label megatron-packed train --nnodes 2 --nproc-per-node 1 "$@" --save "$folder/$step" &
done
wait -n && wait -n
"""


def steps(folder: Path, variables: dict[str, str]) -> None:
    """Two steps of one job train at once."""
    template = folder / "steps.sbatch"
    template.write_text(STEPS)
    flags = ["--train-iters", "60"]
    job = Job(folder / "job", flags, template=str(template), **variables)
    job.wait_for_state("COMPLETED", 120)
    for step in ("a", "b"):
        assert (job.run / step / "step_00000060").is_dir(), job.output


CASES = (start, stop, requeue, kill, wrong_machine, wrong_launcher, steps)
SCONTROL: dict[str, dict[str, str]] = {"with": {}, "without": {"NO_SCONTROL": "1"}}
"""Variables of a job whose step has scontrol, and of one whose step has none."""


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
                for name, variables in SCONTROL.items():
                    begun = time.monotonic()
                    place = folder / case.__name__ / name
                    place.mkdir(parents=True)
                    try:
                        case(place, variables)
                        passed, outcome = passed + 1, "passed"
                    except AssertionError as error:
                        outcome = f"FAILED: {error}"
                    seconds = time.monotonic() - begun
                    print(
                        f"{case.__name__}, {name} scontrol: {outcome} in {seconds:.0f} s",
                        flush=True,
                    )
                    wait_until(no_job_is_left, 90, "jobs do not end")
    count = len(cases) * len(SCONTROL)
    print(f"{passed} of {count}")
    return int(passed < count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [case.__name__ for case in CASES]
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(known)} (default: all)")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.cases} - {*known}):
        parser.error(f"there is no case {', '.join(unknown)}; give some of {', '.join(known)}.")
    sys.exit(main(arguments.cases))
