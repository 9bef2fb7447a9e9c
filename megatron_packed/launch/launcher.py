"""Launcher of a run: starts its processes on this machine, and returns one exit code.

The launcher reads the command line before a process starts. It imports torch only to meet other
machines. The exit code is that of the first process that failed on any machine. A restart helps
only if a process was killed, hung or lost its connection. Every other failure would occur again.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile

from megatron_packed.config.errors import printable
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.parse import RefusedCommandLine, parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.launch.local_ranks import (
    PYTHON_EXEC,
    LaunchOptions,
    LocalRanks,
    Placement,
    RankFailure,
)
from megatron_packed.launch.nodes_and_restarts import (
    LEAVE_SECONDS,
    Agreement,
    Leave,
    ManyNodes,
    NodesError,
    OneNode,
)
from megatron_packed.lazy_exports import lazy_function
from megatron_packed.resume.stored_options import stored_options
from megatron_packed.training.signals import SIGNALS, SignalFlag
from megatron_packed.training.worker import explain_report

_mark_loss_in_status = lazy_function("megatron_packed.training.failures", "mark_loss")
"""Imported at its call, because its module imports torch."""
POLL_SECONDS = 0.05
SECOND_SIGNAL_SECONDS = 3.0
"""Seconds after a second signal until the processes are killed."""
_SECONDS_AFTER: dict[int, float] = {
    # These runs ended in the same step on all ranks. Rank 0 may still close files.
    ExitCode.PREEMPTED: 120.0,
    ExitCode.NONFINITE: 120.0,
    # Refused before the ranks were connected: nothing can be saved.
    ExitCode.USAGE: 1.0,
}
_SECONDS_AFTER_FAILURE = 15.0
"""Seconds that other ranks may need to end after a failure with any other exit code.

The rank that reports the failure may first wait for answers of the other ranks, see
`distributed.failure_watch`.
"""


def launch(options: LaunchOptions, arguments: Sequence[str]) -> int:
    """Run a training job in new processes, and return its exit code.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP let the run save and end. A second signal ends the run at
    once, with exit code 128 plus the number of the signal. The kernel kills the processes if this
    process is killed.

    Args:
        options: processes and machines.
        arguments: flags of the run, as for ``pretrain_hybrid.py``.
    Returns:
        An `ExitCode`, or 128 plus the number of a second signal.
    Raises:
        RuntimeError: the caller is not the main thread, which receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("launch() was called in another thread; call it in the main thread.")
    config = None
    refusal = options.refusal
    if refusal is not None:
        _say(refusal)
    else:
        try:
            config = _read_flags(options, arguments)
        except RefusedCommandLine as refused:  # the problems were printed
            refusal = refused.first
        except SystemExit as answered:  # a flag such as --help was answered
            return int(answered.code or 0)
        if refusal is None:
            refusal = _log_dir_refusal(options.log_dir) or _python_refusal()
            _say(refusal or "")
    leaves = None if refusal is None else Leave(ExitCode.USAGE, refusal)
    return Launcher(options, arguments, config).run(leaves)


class Launcher:
    """Launcher of the processes of one machine, through all restarts of a run.

    Args:
        options: processes and machines.
        arguments: flags of the run.
        config: the configuration that the flags describe; None if this machine refuses it.
    """

    def __init__(
        self, options: LaunchOptions, arguments: Sequence[str], config: RunConfig | None
    ) -> None:
        self._options = options
        self._arguments = arguments
        self._config = config
        self._second: int | None = None
        self._forwarded = 0
        signals: tuple[signal.Signals, ...] = SIGNALS
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            signals = (*SIGNALS, signal.SIGHUP)
        self._flag = SignalFlag(self._receive_second, speaks=options.speaks, signals=signals)

    def run(self, leaves: Leave | None = None) -> int:
        """Start the processes and return the exit code of the run.

        Args:
            leaves: reason for which this machine takes no part, and only informs the other
                machines.
        """
        with self._flag:
            if leaves is not None and self._has_others and self._options.speaks:
                _say(
                    f"the other machines are informed: up to {LEAVE_SECONDS:g} s, Ctrl-C ends the wait."
                )
            nodes = self._nodes()
            try:
                return self._run_attempts(nodes, leaves)
            except NodesError as error:
                _say(str(error))
                return error.exit_code
            finally:
                nodes.close()

    def _nodes(self) -> OneNode:
        return ManyNodes(self._options, self._stopped) if self._has_others else OneNode()

    @property
    def _has_others(self) -> bool:
        return self._options.max_nodes > 1 or bool(self._options.rdzv_endpoint)

    def _run_attempts(self, nodes: OneNode, leaves: Leave | None) -> int:
        restarts = 0
        while True:
            placement = nodes.join(restarts, self._options.processes, leaves)
            end = self._run_once(nodes, placement)
            if self._second is not None:
                return self._second
            if end.failure is None:
                return ExitCode.DONE
            restarts = placement.restarts + 1
            if not end.restart_helps:
                return end.failure.exit_code
            if restarts > self._options.max_restarts:
                if placement.node == 0:
                    self._mark_loss(end.failure)
                return end.failure.exit_code
            if self._options.speaks:
                _say(f"restart {restarts} of {self._options.max_restarts}: {self._resumes()}.")
            if self._stopped():
                leaves = Leave(ExitCode.PREEMPTED, "it was stopped before the run started.")

    def _run_once(self, nodes: OneNode, placement: Placement) -> Agreement:
        """Run all processes of this machine until they end; return how the attempt ended."""
        kill_time = _KillTime()
        first: RankFailure | None = None
        with LocalRanks(
            placement, self._options.processes, self._arguments, self._options.log_dir
        ) as ranks:
            while ranks.running:
                time.sleep(POLL_SECONDS)
                self._forward_signals(ranks, kill_time)
                failure = ranks.poll()
                if failure is not None:
                    nodes.publish(failure)
                if first is None and (first := nodes.failure()) is not None:
                    _say(first.sentence)
                    kill_time.within(_SECONDS_AFTER.get(first.exit_code, _SECONDS_AFTER_FAILURE))
                if kill_time.passed():
                    ranks.kill()
        end = nodes.agree(stopped=self._stopped())
        if first is None and end.failure is not None:
            _say(end.failure.sentence)
        return end

    def _forward_signals(self, ranks: LocalRanks, kill_time: _KillTime) -> None:
        """Send a new signal to the processes, and limit the time until they end."""
        signals = self._stopped() + (self._second is not None)
        if signals == self._forwarded:
            return
        self._forwarded = signals
        received = self._flag.received
        assert received is not None  # a second signal follows a first one
        # A run does not handle SIGHUP, which a closed terminal sends to this process.
        ranks.signal(signal.SIGTERM if received == signal.SIGHUP else received)
        if self._second is not None:
            kill_time.within(SECOND_SIGNAL_SECONDS)
        else:
            limit = self._options.shutdown_timeout
            reason = (
                f"the run has not ended {limit:g} s after {received.name}: its processes are "
                "killed; --shutdown-timeout sets another limit."
            )
            kill_time.within(limit, reason)

    def _stopped(self) -> bool:
        return self._flag.received is not None

    def _receive_second(self, exit_code: int) -> None:
        self._second = exit_code

    def _mark_loss(self, failure: RankFailure) -> None:
        save = None if self._config is None else self._config.checkpoint.save
        if save is not None and os.path.isdir(save):
            _mark_loss_in_status(save, int(failure.exit_code), failure.sentence)

    def _resumes(self) -> str:
        load = None if self._config is None else self._config.checkpoint.load
        if load is None:
            return "the run begins again at step 1, because --load is not given"
        return f"the run resumes from the newest checkpoint in --load {load}"


class _KillTime:
    """Time at which the processes that still run are killed, with the reason to print."""

    def __init__(self) -> None:
        self._time = math.inf
        self._reason = ""

    def within(self, seconds: float, reason: str = "") -> None:
        """Move the time forward to ``seconds`` from now, unless it is already earlier."""
        time_of_this = time.monotonic() + seconds
        if time_of_this < self._time:
            self._time = time_of_this
            self._reason = reason

    def passed(self) -> bool:
        """Return True if the processes must be killed; print the reason the first time."""
        if time.monotonic() < self._time:
            return False
        if self._reason:
            _say(self._reason)
            self._reason = ""
        return True


def _read_flags(options: LaunchOptions, arguments: Sequence[str]) -> RunConfig:
    """Check the flags of the run before a process starts.

    Raises:
        RefusedCommandLine: the flags are wrong; the problems were printed.
        SystemExit: a flag such as ``--help`` was answered.
    """
    world_size = options.min_nodes * options.processes
    # The first rank of this machine would report the same problems.
    node = 0 if options.speaks else options.node_rank or 0
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")
    values = (node * options.processes, 0, node, world_size)
    with _variables({name: str(value) for name, value in zip(names, values, strict=True)}):
        return parse_or_exit(
            arguments,
            explain_report,
            world_size=world_size,
            warns=False,
            read_stored=stored_options,
        )


def _log_dir_refusal(log_dir: str | None) -> str | None:
    """Create the folder of ``--log-dir``; return a sentence if no file can be written in it."""
    if log_dir is None:
        return None
    try:
        os.makedirs(log_dir, exist_ok=True)
        with TemporaryFile(dir=log_dir):
            return None
    except OSError as error:
        return f"--log-dir {log_dir} cannot be written: {error.strerror}; give another folder."


def _python_refusal() -> str | None:
    """Return a sentence if the program of ``PYTHON_EXEC`` cannot start; None if it can."""
    program = os.environ.get(PYTHON_EXEC)
    if program is None or shutil.which(program) is not None:
        return None
    return (
        f"{PYTHON_EXEC} is {program!r}, which is no program that this user may start; set the "
        "variable to a Python, or unset it."
    )


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them afterwards."""
    environment = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name)
            if name in environment:
                os.environ[name] = environment[name]


def _say(sentence: str) -> None:
    if sentence:
        print(printable(sentence, 1000), file=sys.stderr, flush=True)
