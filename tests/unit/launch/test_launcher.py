"""The launcher of `megatron-packed train`, with small scripts in place of ranks."""

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_packed.cli import train
from megatron_packed.cli.command import UsageError
from megatron_packed.cli.slurm_first_host import first_host
from megatron_packed.launch import launcher as launch_module
from megatron_packed.launch.launcher import Launcher
from megatron_packed.launch.local_ranks import LaunchOptions
from megatron_packed.training.under_launcher import LAUNCHER, report_file

REPOSITORY = Path(__file__).parents[3]
SLEEP = "exec sleep 60"
FINISH = "exit 0"


@pytest.fixture
def rank_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the shell commands of ranks 0 and 1."""

    def write(*commands: str) -> None:
        script = tmp_path / "rank"
        cases = "\n".join(f"{rank}) {command} ;;" for rank, command in enumerate(commands))
        script.write_text(f"#!/usr/bin/env bash\ncase $RANK in\n{cases}\nesac\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PYTHON_EXEC", str(script))

    return write


def run(load: str | None = None, **options: object) -> int:
    config = SimpleNamespace(checkpoint=SimpleNamespace(load=load, save=None))
    return Launcher(LaunchOptions(processes=2, **options), [], config).run()  # type: ignore[arg-type]


def test_the_exit_code_is_that_of_the_first_rank_that_failed(
    rank_script: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that has refused the configuration ends the other rank after one second."""
    begun = time.monotonic()
    rank_script("sleep 0.2; exit 2", SLEEP)
    assert run() == 2
    assert 1.0 < time.monotonic() - begun < 10
    rank_script(FINISH, FINISH)
    assert run() == 0
    assert capfd.readouterr() == ("", "")  # ranks that the launcher killed are no reason


def test_ranks_that_hang_after_a_failure_are_killed(
    rank_script: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch_module, "_SECONDS_AFTER_FAILURE", 0.2)
    rank_script("trap '' TERM INT; while true; do sleep 0.1; done", "kill -SEGV $$")
    assert run() == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("rank 1 (process ")
    assert said[0].endswith(") was ended by SIGSEGV.")


REPORT = f"""echo '{{"lost": %s}}' > "$MEGATRON_PACKED_REPORTS/{report_file("", 0).name}"; exit 1"""


@pytest.mark.parametrize(
    ("command", "restarts"),
    [
        pytest.param("kill -KILL $$", 2, id="killed"),
        pytest.param(REPORT % "true", 2, id="lost"),
        pytest.param(REPORT % "false", 0, id="defect"),
        pytest.param("exit 1", 0, id="no-report"),
        pytest.param("exit 3", 0, id="data"),
        pytest.param("exit 20", 0, id="non-finite"),
        pytest.param("exit 75", 0, id="stopped"),
    ],
)
@pytest.mark.parametrize("load", [None, "runs/a"])
def test_only_a_lost_process_is_restarted(
    command: str,
    restarts: int,
    load: str | None,
    rank_script: Callable[..., None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    count = f"echo $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/starts; "
    rank_script(count + command, FINISH)
    assert run(load, max_restarts=2) == (
        int(command.rpartition(" ")[2]) if command[-1].isdecimal() else 1
    )
    assert (tmp_path / "starts").read_text().split() == [str(n) for n in range(restarts + 1)]
    said = capfd.readouterr().err
    how = (
        "begins again at step 1, because --load is not given"
        if load is None
        else "resumes from the newest checkpoint in --load runs/a"
    )
    expected = [f"restart {n} of 2: the run {how}." for n in range(1, restarts + 1)]
    assert [line for line in said.splitlines() if line.startswith("restart")] == expected


def test_a_loss_that_follows_from_a_defect_is_no_reason_for_a_restart(
    rank_script: Callable[..., None], tmp_path: Path
) -> None:
    """Rank 0 fails with a defect, and rank 1 then reports that it has lost rank 0."""
    number = tmp_path / "process"
    report = "MEGATRON_PACKED_REPORTS"
    defect = f"""echo '{{"lost": false}}' > "${report}/{report_file("", 0).name}"; exit 4"""
    lost = f"""echo '{{"lost": true}}' > "${report}/{report_file("", 1).name}"; exit 1"""
    # The process number is free only after the launcher has seen the end of rank 0.
    wait = f"until [ -s {number} ]; do sleep 0.02; done; rank=$(cat {number}); "
    wait += "while kill -0 $rank 2>/dev/null; do sleep 0.02; done; "
    rank_script(f"echo $$ > {number}; echo >> {tmp_path}/starts; {defect}", wait + lost)
    assert run(max_restarts=2) == 4
    assert (tmp_path / "starts").read_text() == "\n"


def test_a_stop_signal_between_two_attempts_starts_no_rank_again(
    rank_script: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if sentence.startswith("restart 1 of 2"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launch_module, "_say", say)
    rank_script(f"echo >> {tmp_path}/starts; kill -KILL $$", FINISH)
    assert run(max_restarts=2) == 75
    assert said[-2].startswith("restart 1 of 2") and said[-1] == ""
    assert (tmp_path / "starts").read_text() == "\n"


PROGRAM = """
import sys
from types import SimpleNamespace
from megatron_packed.launch.launcher import Launcher
from megatron_packed.launch.local_ranks import LaunchOptions
config = SimpleNamespace(checkpoint=SimpleNamespace(load=None, save=None))
options = LaunchOptions(processes=2, max_restarts=3, shutdown_timeout=float(sys.argv[1]))
sys.exit(Launcher(options, [], config).run())
"""
TRAPS = 'trap "echo $RANK got {name}; exit 75" {name}; echo up; while true; do sleep 0.05; done'


def start(shutdown_timeout: float, ranks: int = 2) -> subprocess.Popen[str]:
    """Start a launcher, and wait until its ranks are up."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(shutdown_timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        # A program that runs under nohup ignores SIGHUP, as do the programs that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(ranks)] == ["up\n"] * ranks
    return launcher


# A rank of the run unblocks the signals itself; Python does so in these scripts.
UNBLOCK = (
    f"{sys.executable} -c 'import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "os.execvp(sys.argv[1], sys.argv[1:])' bash -c "
)


@pytest.mark.parametrize(("sent", "received"), [("USR1", "USR1"), ("INT", "INT"), ("HUP", "TERM")])
def test_a_signal_is_forwarded_once(
    sent: str, received: str, rank_script: Callable[..., None]
) -> None:
    """Each rank gets the signal once; SIGHUP, which ranks do not handle, becomes SIGTERM."""
    rank = f"exec {UNBLOCK} '{TRAPS.format(name=received)}'"
    rank_script(rank, rank)
    launcher = start(60)
    launcher.send_signal(getattr(signal, f"SIG{sent}"))
    said = launcher.communicate(timeout=30)[0].splitlines()
    assert launcher.returncode == 75
    assert said[0].startswith(f"SIG{sent}: the run will stop after its next step")
    assert sorted(said[1:]) == [f"0 got {received}", f"1 got {received}"]


def test_a_second_signal_and_a_time_limit_end_a_run_that_does_not_stop(
    rank_script: Callable[..., None],
) -> None:
    deaf = "trap '' INT TERM; echo up; while true; do sleep 0.05; done"
    rank_script(deaf, deaf)
    launcher = start(60)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1.1)
    launcher.send_signal(signal.SIGINT)
    said = launcher.communicate(timeout=30)[0].splitlines()
    assert launcher.returncode == 128 + signal.SIGINT and len(said) == 1, said
    launcher = start(0.5)
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=30)[0].splitlines()
    assert launcher.returncode == 1 and len(said) == 2, said
    assert said[1].startswith("the run has not ended 0.5 s after SIGTERM: its processes are killed")


def test_ranks_end_with_a_launcher_that_is_killed(rank_script: Callable[..., None]) -> None:
    program = (
        "import os, sys, time; from megatron_packed.training.under_launcher import end_with_launcher; "
        'end_with_launcher(); print(os.getpid(), flush=True); print("up", flush=True); time.sleep(60)'
    )
    rank_script(f"exec {sys.executable} -c '{program}'", FINISH)
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "60"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    launcher.stdout.readline()
    assert launcher.stdout.readline() == ""  # the rank held the pipe until it ended
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            time.sleep(0.01)
            state = Path(f"/proc/{rank}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError


def test_a_rank_ends_if_its_launcher_has_ended_and_was_not_reaped(tmp_path: Path) -> None:
    """A launcher that was killed before the rank's first line leaves its number in the table."""
    launcher = subprocess.Popen(["true"])
    while Path(f"/proc/{launcher.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    program = (
        "from megatron_packed.training.under_launcher import end_with_launcher; "
        "end_with_launcher(); print('lives')"
    )
    variables = {"PYTHONPATH": str(REPOSITORY), LAUNCHER: str(launcher.pid)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")
    launcher.wait()
    # A program of PYTHON_EXEC stands between the launcher and the rank.
    variables[LAUNCHER] = str(os.getppid())
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"lives\n")


def test_the_output_of_each_rank_is_copied(
    rank_script: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank_script("echo one; echo two >&2", "echo three")
    assert run(log_dir=str(tmp_path / "logs")) == 0
    out, err = capfd.readouterr()
    assert sorted(out.split()) == ["one", "three"] and err == "two\n"
    logs = tmp_path / "logs" / "attempt_0"
    assert sorted((logs / "rank_0.log").read_text().split()) == ["one", "two"]
    assert (logs / "rank_1.log").read_text() == "three\n"


@pytest.mark.parametrize(
    ("variable", "level"),
    [
        (None, "ERROR"),
        ("TORCH_CPP_LOG_LEVEL=INFO", "INFO"),
        ("NCCL_DEBUG=WARN", ""),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", ""),
        ("LOGLEVEL=INFO", ""),
    ],
)
def test_warnings_of_torch_are_shown_to_a_user_who_asks_for_a_log(
    variable: str | None,
    level: str,
    rank_script: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("TORCH_CPP_LOG_LEVEL", "LOGLEVEL", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(*variable.split("="))
    rank_script(f"echo $TORCH_CPP_LOG_LEVEL > {tmp_path}/level", FINISH)
    assert run() == 0
    assert (tmp_path / "level").read_text().strip() == level


def test_a_link_under_the_name_of_a_rank_log_is_not_followed(
    rank_script: Callable[..., None], tmp_path: Path
) -> None:
    logs = tmp_path / "logs" / "attempt_0"
    logs.mkdir(parents=True)
    (tmp_path / "victim").write_text("precious")
    (logs / "rank_0.log").symlink_to(tmp_path / "victim")
    rank_script("echo one", FINISH)
    assert run(log_dir=str(tmp_path / "logs")) == 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert (logs / "rank_0.log").read_text() == "one\n"


def options_of(words: str, **environ: str) -> LaunchOptions:
    parser = argparse.ArgumentParser()
    train.train_command.add_arguments(parser)
    arguments, flags = parser.parse_known_args(words.split())
    return train.launch_options(arguments, flags, environ)


def test_a_log_folder_that_cannot_be_written_is_refused_before_a_rank_starts(
    rank_script: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A file in place of the folder ends the command with code 2 and one sentence."""
    monkeypatch.setattr(launch_module, "_read_flags", lambda *_: None)
    rank_script(f"touch {tmp_path}/started", FINISH)
    folder = tmp_path / "file" / "logs"
    folder.parent.touch()
    assert launch_module.launch(LaunchOptions(processes=2, log_dir=str(folder)), []) == 2
    said = f"--log-dir {folder} cannot be written: Not a directory; give another folder.\n"
    assert capfd.readouterr().err == said
    assert not (tmp_path / "started").exists()


def test_options_of_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of("--nproc_per_node 4 --max_restarts=2 --lr 1") == LaunchOptions(
        processes=4, max_restarts=2
    )
    assert options_of("--nproc-per-node cpu").processes == len(os.sched_getaffinity(0))
    assert options_of("--device cpu").processes == 1
    said = "1 process, because no GPU is used; --nproc-per-node sets another number.\n"
    assert capsys.readouterr().out == said


def test_options_of_several_machines() -> None:
    found = options_of("--nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr a")
    assert (found.min_nodes, found.max_nodes, found.node_rank) == (2, 2, 1)
    assert (found.rdzv_backend, found.rdzv_endpoint) == ("static", "a:29500") and found.speaks
    found = options_of("--nproc-per-node 8 --nnodes 2:4 --rdzv-endpoint a:1 --rdzv-conf x=1,y=2")
    assert (found.rdzv_backend, found.rdzv_endpoint, found.max_nodes) == ("c10d", "a:1", 4)
    assert found.rdzv_conf == (("x", "1"), ("y", "2"))


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "47000",
    "SLURM_JOB_NODELIST": "n[1-6]",
    "SLURM_STEP_NODELIST": "n[5-6]",
}


def test_slurm_gives_the_place_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the step suffice: no command of SLURM is needed."""
    monkeypatch.setenv("PATH", "")
    found = options_of("--nproc-per-node 8 --nnodes 2", **SLURM)
    assert (found.node_rank, found.rdzv_endpoint, found.rdzv_id) == (1, "n5:27000", "47000.0")
    assert found.shared_console and not found.speaks


def test_steps_of_slurm_on_one_machine_have_different_ports_and_names() -> None:
    """Steps of one job run at once; jobs that share a machine have numbers close together."""
    steps = [
        {**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job in range(39_990, 40_010)
        for step in range(30)
    ]
    found = [options_of("--nproc-per-node 8 --nnodes 2", **step) for step in steps]
    ports = {int(options.rdzv_endpoint.removeprefix("n5:")) for options in found}
    assert len(ports) == len({options.rdzv_id for options in found}) == len(steps)
    assert min(ports) >= 20_000 and max(ports) < 40_000


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[007-009,12],login1", "gpu007"),
        ("gpu[12,3-4]-ib.example.org", "gpu12-ib.example.org"),
        ("rack[2-3]node[00-07]", "rack2node00"),
        ("10.0.0.[5-6]", "10.0.0.5"),
        ("a,b[1-2]", "a"),
        ("", None),
        ("gpu[1-", None),
        ("gpu[x]", None),
        (",a", None),
    ],
)
def test_the_first_host_of_a_list_of_slurm(hosts: str, first: str | None) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("SLURM_NODEID", "x", "SLURM_NODEID is 'x', not a number"),
        ("SLURM_JOB_ID", "", "SLURM_JOB_ID is '', not a number"),
        ("SLURM_STEP_NODELIST", "n[5-", "names the hosts of this step 'n[5-'"),
    ],
)
def test_a_wrong_variable_of_slurm_is_named(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        options_of("--nproc-per-node 8 --nnodes 2", **{**SLURM, variable: value})
    assert sentence in str(refused.value)


def test_a_python_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_module, "_read_flags", lambda *_: None)
    monkeypatch.setenv("PYTHON_EXEC", "/nonexistent")
    assert launch_module.launch(LaunchOptions(processes=2), []) == 2
    said = capfd.readouterr().err
    assert (
        said.startswith("PYTHON_EXEC is '/nonexistent', which is no program")
        and said.count("\n") == 1
    )


def test_the_socket_of_the_store_is_bound_to_this_machine_alone(
    rank_script: Callable[..., None], tmp_path: Path
) -> None:
    """Rank 0 alone inherits a socket of 127.0.0.1; no other process keeps it open."""
    look = f"readlink /proc/self/fd/$MEGATRON_PACKED_STORE_SOCKET > {tmp_path}/$RANK"
    rank_script(look, f"sleep 1; {look}; ls /proc/$PPID/fd -l > {tmp_path}/launcher")
    assert run() == 0
    name = (tmp_path / "0").read_text().strip()
    assert name.startswith("socket:")
    assert (tmp_path / "1").read_text().strip() != name
    assert name not in (tmp_path / "launcher").read_text()


def test_a_loss_is_marked_for_the_scheduler(
    rank_script: Callable[..., None], tmp_path: Path
) -> None:
    """STATUS.json says that another start helps, if a rank was killed and no restart is left."""
    config = SimpleNamespace(checkpoint=SimpleNamespace(load=None, save=str(tmp_path)))
    for command, lost in (("kill -KILL $$", True), ("exit 3", None)):
        (tmp_path / "STATUS.json").write_text('{"exit_code": 1, "reason": "a"}')
        rank_script(command, FINISH)
        Launcher(LaunchOptions(processes=2), [], config).run()  # type: ignore[arg-type]
        status = json.loads((tmp_path / "STATUS.json").read_text())
        assert (status["exit_code"], status["reason"], status.get("lost")) == (1, "a", lost)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nproc-per-node 0", "--nproc-per-node 0: give a number from 1, gpu, cpu or auto."),
        ("--nproc-per-node 1 --nnodes 2:1", "--nnodes 2:1: give a number of machines"),
        ("--nproc-per-node 1 --nnodes 2", "--node-rank is missing: give each of the 2 machines"),
        ("--nproc-per-node 1 --nnodes 2 --node-rank 2", "--node-rank 2: give each of the 2"),
        ("--nproc-per-node 1 --nnodes 2 --node-rank 0", "--master-addr is missing"),
        ("--nproc-per-node 1 --nnodes 1:2 --node-rank 0", "needs --rdzv-backend c10d"),
        ("--nproc-per-node 1 --nnodes 2 --rdzv-backend c10d", "needs --rdzv-endpoint HOST:PORT."),
        ("--standalone --nnodes 2", "--standalone is for one machine"),
        ("--max-restarts -1", "--max-restarts -1: give 0 or more."),
        ("--nproc-per-node 1 --shutdown-timeout nan", "--shutdown-timeout nan: give a positive"),
        ("--max-restarts x", "--max-restarts x: give 0 or more."),
        ("--nnodes x", "--nnodes x: give a number of machines"),
    ],
)
def test_a_wrong_option_is_refused_with_a_cure(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        options_of(words)
    assert sentence in str(refused.value)


PLACE = "--nproc-per-node 1 --master-addr a"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{PLACE} --nnodes x --node-rank 1", "--nnodes x: give a number of machines"),
        (f"{PLACE} --node-rank 1", "--node-rank 1: --nnodes is 1 on this machine"),
        (f"{PLACE} --nnodes 2", "--node-rank is missing: give each of the 2 machines"),
        (f"{PLACE} --nnodes 2 --node-rank x", "--node-rank x: give each of the 2 machines"),
        (f"{PLACE} --nnodes 2:3 --node-rank 1", "needs --rdzv-backend c10d"),
        (f"{PLACE} --nnodes 2 --node-rank 1 --standalone", "--standalone is for one machine"),
        (f"{PLACE} --nnodes 2 --node-rank 1 --max-restarts x", "--max-restarts x: give 0 or more."),
        (f"{PLACE} --nnodes 2 --node-rank 1 --shutdown-timeout x", "--shutdown-timeout x: give a"),
        (f"{PLACE} --nnodes 2 --node-rank 1 --master-port x", "--master-port x: give a port"),
        (f"{PLACE} --nnodes 2 --node-rank 1 --rdzv-backend x", "--rdzv-backend x: give static or"),
        ("--nproc-per-node 1 --nnodes 2 --rdzv-endpoint a --rdzv-conf b", "give KEY=VALUE"),
        ("--nproc-per-node 1 --rdzv-endpoint a --rdzv-conf join_timeout=1.5", "whole seconds"),
        ("--nproc-per-node 0 --rdzv-endpoint a", "--nproc-per-node 0: give a number from 1"),
    ],
)
def test_a_wrong_option_of_one_of_several_machines_is_a_refusal(words: str, sentence: str) -> None:
    """The machine still knows where the others meet, so that it can inform them."""
    options = options_of(words)
    assert options.refusal is not None and sentence in options.refusal
    assert options.rdzv_endpoint in ("a", "a:29500")
