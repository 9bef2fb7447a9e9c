"""Processes of a run on one machine: their environment, output, signals and exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import megatron_packed
from megatron_packed.config.environment_variables import STORE_SOCKET
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.files.written_files import open_new
from megatron_packed.training.under_launcher import LAUNCHER, REPORT_FOLDER, reported_lost

PYTHON_EXEC = "PYTHON_EXEC"
"""Variable of torchrun with a program that takes the place of Python."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PROGRAM = (
    # The package of the launcher, also if another version of it is installed.
    f"import sys; sys.path.insert(0, {str(Path(megatron_packed.__file__).parents[1])!r}); "
    "import megatron_packed; sys.path.append(sys.path.pop(0)); sys.path[:] = filter(None, sys.path); "
    "from megatron_packed.training.worker import launched; launched()"
)
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SHOW_WARNINGS = (_LOG_LEVEL, "LOGLEVEL", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG")
"""Variables with which a user asks for the log of torch or of NCCL."""
_COPY_SECONDS = 2.0
"""Seconds to copy the last output of a rank; processes that the rank started may hold its pipe."""
SHUTDOWN_SECONDS = 1800.0
"""Default of ``--shutdown-timeout``."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Number and place of the processes of a run."""

    processes: int = 1
    """Processes on this machine."""
    min_nodes: int = 1
    """Fewest machines with which the run starts."""
    max_nodes: int = 1
    """Largest number of machines."""
    node_rank: int | None = None
    """Number of this machine, from 0; the static rendezvous needs it."""
    rdzv_backend: str = "static"
    """Rendezvous of torch through which machines meet: static, c10d, etcd or etcd-v2."""
    rdzv_endpoint: str = ""
    """HOST:PORT of the rendezvous; with one machine and no endpoint, there is no rendezvous."""
    rdzv_id: str = "none"
    """Name of the run, the same on all machines."""
    rdzv_conf: tuple[tuple[str, str], ...] = ()
    """Further options of the rendezvous."""
    max_restarts: int = 0
    """Largest number of restarts after a process was killed, hung or lost its connection."""
    shutdown_timeout: float = SHUTDOWN_SECONDS
    """Seconds after the first signal until processes that still run are killed."""
    log_dir: str | None = None
    """Folder for a copy of the output of each rank."""
    refusal: str | None = None
    """Reason for which this machine takes no part, found before its command line was read."""
    shared_console: bool = False
    """True if all machines write to one console, as under srun."""

    @property
    def speaks(self) -> bool:
        """True if this machine prints the facts that all machines share."""
        return not self.shared_console or not self.node_rank


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Place of this machine's processes in the run."""

    first_rank: int = 0
    world_size: int
    node: int = 0
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    store_socket: socket.socket | None = None
    """Bound socket of ``master_port`` for rank 0's store; None if a launcher hosts the store."""
    hosted_store: bool = False
    """True if a launcher hosts the store of torch.distributed; otherwise rank 0 hosts it."""
    run_id: str = "none"
    restarts: int = 0
    """Restarts of the run so far."""
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """First failure of a run, as a launcher sees it."""

    exit_code: int
    lost: bool | None = None
    """True if a process was killed, hung or lost its connection: a restart helps. None if the rank
    has reported no reason, for example because another rank ended it.
    """
    sentence: str = ""
    """Reason that only the launcher can print; empty if the rank has printed it."""


class LocalRanks:
    """Processes of one attempt on this machine, as a context manager that ends with all of them.

    Args:
        placement: ranks of the processes.
        count: number of processes.
        arguments: flags of the run.
        log_dir: folder for a copy of the output of each rank; None copies nothing.
    """

    def __init__(
        self, placement: Placement, count: int, arguments: Sequence[str], log_dir: str | None
    ) -> None:
        self._first_rank = placement.first_rank
        self._reports = Path(tempfile.mkdtemp(prefix="megatron_packed_"))
        self._killed = False
        self._copies: list[threading.Thread] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        program = [os.environ.get(PYTHON_EXEC, sys.executable), "-u", "-c", _PROGRAM]
        environment = _environment(placement, count) | {REPORT_FOLDER: str(self._reports)}
        sys.stdout.flush()
        # A new process must not receive a signal before its handler exists. It inherits the mask
        # and unblocks the signals itself.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            for local_rank in range(count):
                store = placement.store_socket if local_rank == 0 else None
                descriptors = () if store is None else (store.fileno(),)
                self._processes[local_rank] = subprocess.Popen(
                    [*program, *arguments],
                    env=environment | _own_variables(placement, local_rank),
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=None if log_dir is None else subprocess.PIPE,
                    stderr=None if log_dir is None else subprocess.PIPE,
                    # Ctrl-C in a terminal then signals the launcher only, which forwards it once.
                    start_new_session=True,
                )
                if log_dir is not None:
                    self._copy_output(local_rank, Path(log_dir) / f"attempt_{placement.restarts}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if placement.store_socket is not None:
                # Rank 0 alone keeps it: when rank 0 is gone, connections must be refused.
                placement.store_socket.close()
        self._running = dict(self._processes)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self._processes.values():
            process.wait()
        for thread in self._copies:
            thread.join(_COPY_SECONDS)
        shutil.rmtree(self._reports, ignore_errors=True)

    @property
    def running(self) -> bool:
        """True if a process runs that `poll` has not seen end."""
        return bool(self._running)

    def poll(self) -> RankFailure | None:
        """Look which processes have ended; return the first failure among these."""
        ended = {
            local_rank: code
            for local_rank, process in self._running.items()
            if (code := process.poll()) is not None
        }
        for local_rank in ended:
            del self._running[local_rank]
        # An exit code of the run explains more than the signal that ended another process.
        failed = sorted((rank for rank in ended if ended[rank]), key=lambda rank: ended[rank] < 0)
        return self._failure(failed[0], ended[failed[0]]) if failed else None

    def signal(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes, with the processes that they have started."""
        for process in self._running.values():
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _failure(self, local_rank: int, code: int) -> RankFailure:
        rank = self._first_rank + local_rank
        if code > 0:
            return RankFailure(exit_code=code, lost=reported_lost(self._reports, rank))
        if self._killed:
            return RankFailure(exit_code=ExitCode.UNFORESEEN)
        name = signal.Signals(-code).name
        hint = (
            "; the kernel does so if the memory of the host runs out, and dmesg then lists it"
            if -code == signal.SIGKILL
            else ""
        )
        process = self._processes[local_rank].pid
        sentence = f"rank {rank} (process {process}) was ended by {name}{hint}."
        return RankFailure(exit_code=ExitCode.UNFORESEEN, lost=True, sentence=sentence)

    def _copy_output(self, local_rank: int, folder: Path) -> None:
        """Start threads that copy the output of a rank to the console and to a file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{self._first_rank + local_rank}.log"
        # A new file, so that a link or another name of an old file is not written through.
        path.unlink(missing_ok=True)
        file = os.fdopen(open_new(path), "wb", buffering=0)
        process = self._processes[local_rank]
        for source, console in ((process.stdout, 1), (process.stderr, 2)):
            thread = threading.Thread(target=_copy, args=(source, console, file), daemon=True)
            thread.start()
            self._copies.append(thread)


def _copy(source: BinaryIO, console: int, file: BinaryIO) -> None:
    while chunk := os.read(source.fileno(), 1 << 16):
        # A closed console or a full disk must not stop the run, which writes into this pipe.
        with suppress(OSError):
            file.write(chunk)
        with suppress(OSError):
            os.write(console, chunk)


def _environment(placement: Placement, count: int) -> dict[str, str]:
    """Return the variables that torchrun sets for all processes of a machine."""
    threads = {}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Without this limit, every process would start a thread on every core.
        threads["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // count, 1))
    return {
        **os.environ,
        **threads,
        LAUNCHER: str(os.getpid()),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "LOCAL_WORLD_SIZE": str(count),
        "WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(placement.hosted_store),
        "TORCHELASTIC_RESTART_COUNT": str(placement.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(placement.max_restarts),
        "TORCHELASTIC_RUN_ID": placement.run_id,
        **_log_level(),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _log_level() -> dict[str, str]:
    """Hide warnings of torch's C++ code, unless the user looks for a fault of the connections.

    If the host of the store is gone, each rank would print four backtraces as warnings (torch 2.13).
    """
    if any(name in os.environ for name in _SHOW_WARNINGS):
        return {}
    return {_LOG_LEVEL: "ERROR"}


def _own_variables(placement: Placement, local_rank: int) -> dict[str, str]:
    """Return the variables in which the processes of a machine differ."""
    ranks = {"RANK": str(placement.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
    if placement.store_socket is None:
        return ranks
    descriptor = str(placement.store_socket.fileno()) if local_rank == 0 else ""
    return {**ranks, STORE_SOCKET: descriptor}
