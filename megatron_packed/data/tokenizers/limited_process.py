"""Child process with limits of CPU time and memory, for code and files from a download.

A sandbox inside Python cannot limit time and memory. For example, ``{{ 10 ** (10 ** 10) }}`` in a
chat template, or a regular expression in a tokenizer, runs inside one C function. No signal
handler, thread or trace hook can interrupt it. A child process therefore does the work.

The child has an address-space limit and cannot write files. `system_call_filter` also takes its
environment variables, and its access to files, network and other processes.
It starts a CPU timer before each request. The kernel kills the child when the timer expires, even
if the parent has died. The timer counts CPU time and not wall time, so that the load of the machine
does not change which lines are accepted.

Messages in both directions have a header and a body of bytes. The header contains the kind and the
length of the message, and the CPU seconds that an answer took.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.tokenizers.system_call_filter import restrict_process

MEMORY_BYTES = 4 * 2**30
"""Limit of the address space of a child, in bytes."""
CPU_SECONDS = 10.0
"""Limit of the CPU time for one request, without the time that its length adds."""
SLOW_SECONDS, SLOW_SECONDS_PER_MIB = 1.0, 10.0
"""CPU time above which a request counts as slow: a constant, plus a time per MiB of the request.

Usual chat templates take milliseconds for a conversation, usual tokenizers about a second per MiB.
"""
BUDGET_SECONDS = 300.0
"""Limit of the CPU time of all slow requests of a data set together."""
_HEADER = struct.Struct("<cId")
_REQUEST, _DONE, _REFUSED = b"?", b"+", b"-"
"""Kinds of messages: a request, its answer, and a refused setup or a request over its limits."""
_TOO_DEEP = ("too_deep", "while rendering")
_PACKAGE_ROOT = str(Path(__file__).parents[2])


class LimitReached(Exception):
    """Error for a request or a setup that exceeded a limit; the message names the limit.

    The parent raises it, and code in the child may raise it too.
    """


class SetupRefused(Exception):
    """Error for a setup that raised an exception in the child; it has the child's message."""


@dataclass
class Budget:
    """Limit of the CPU time of slow and failed requests over a data set; shared by all threads.

    Args:
        subject, unit, cure: words of the error message, e.g. ``the chat template``,
            ``conversations``, ``give another --chat-template``.
        max_in_a_row: number of successive requests over a limit that raises an error.
        seconds: limit of the CPU time of all slow and failed requests together.
    """

    subject: str
    unit: str
    cure: str
    max_in_a_row: int
    seconds: float = BUDGET_SECONDS
    _in_a_row: int = 0
    _slow: int = 0
    _spent: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def succeeded(self, seconds: float, num_bytes: int) -> None:
        """Count an answer that took ``seconds`` of CPU time for a request of ``num_bytes`` bytes.

        Raises:
            DataError: slow requests together have exceeded the budget.
        """
        with self._lock:
            self._in_a_row = 0
            if seconds > SLOW_SECONDS + SLOW_SECONDS_PER_MIB * num_bytes / 2**20:
                self._spend(seconds)

    def failed(self, seconds: float, detail: str) -> None:
        """Count a request that reached a limit after ``seconds`` of CPU time.

        Raises:
            DataError: too many successive requests reached a limit, or slow requests together have
                exceeded the budget.
        """
        with self._lock:
            self._in_a_row += 1
            if self._in_a_row >= self.max_in_a_row:
                raise DataError(
                    f"{self.subject} hit a limit for {self._in_a_row} {self.unit} in a row ({detail}); {self.cure}."
                )
            self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self._slow += 1
        self._spent += seconds
        if self._spent > self.seconds:
            raise DataError(
                f"{self.subject} took {self._spent:.0f} s of CPU time for {self._slow} slow {self.unit}, but only "
                f"{self.seconds:g} s are allowed for a data set; {self.cure}."
            )


class Limits(NamedTuple):
    """Limits of a child process."""

    cpu_seconds: float = CPU_SECONDS
    """CPU time for the setup, and for a request without the time that its length adds."""
    cpu_seconds_per_mib: float = 0.0
    """CPU time that each MiB of a request adds to its limit."""
    memory_bytes: int = MEMORY_BYTES

    def seconds_for(self, num_bytes: int) -> float:
        """Return the limit of the CPU time for a request of ``num_bytes`` bytes."""
        return self.cpu_seconds + self.cpu_seconds_per_mib * num_bytes / 2**20


class LimitedProcess:
    """Child process that answers requests. Only one thread at a time may use it.

    If a limit kills the child, the next request starts another child.

    Args:
        module: name of a module whose function ``serve`` is the child's main function. ``serve``
            must call `serve_requests`.
        setup: JSON object that the child receives first.
        limits: limits of the child.
        budget: limit of slow requests, shared with other children.
        quiet: True discards the standard error of the child.
    Raises:
        SetupRefused: the setup raised an exception in the child.
        LimitReached: the setup exceeded a limit.
    """

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        limits: Limits,
        budget: Budget,
        *,
        quiet: bool = False,
    ) -> None:
        self._program = f"from {module} import serve; serve()"
        self._setup = json.dumps({"setup": setup, "limits": limits}).encode()
        self._limits = limits
        self._budget = budget
        self._quiet = quiet
        self._child: subprocess.Popen[bytes] | None = None
        self.greeting = b""
        """Answer of the child to the setup."""
        self._start()

    def ask(self, request: bytes) -> bytes:
        """Send a request to the child and return the answer.

        Raises:
            LimitReached: the request exceeded a limit, or the child died.
            DataError: the budget is exceeded.
        """
        if self._child is None:
            self._start()
        answer = self._exchange(request)
        if answer is None:
            allowed = self._limits.seconds_for(len(request))
            killed, detail = self._end_of_child(allowed)
            seconds = allowed if killed else 0.0
        else:
            kind, body, seconds = answer
            if kind == _DONE:
                self._budget.succeeded(seconds, len(request))
                return body
            detail = body.decode()
        self._budget.failed(seconds, detail)
        raise LimitReached(detail)

    def close(self) -> None:
        """End the child; the next request starts another child."""
        child = self._child
        self._child = None
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # the child ended before it read all bytes
                    stream.close()
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _start(self) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, *filter(None, sys.path)]),
            "PYTHONUTF8": "1",
            # A thread pool with a thread per processor would use up the limited address space.
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
            **{
                name: os.environ[name]
                for name in ("LD_LIBRARY_PATH", "PYTHONHOME")
                if name in os.environ
            },
        }
        self._child = subprocess.Popen(
            [sys.executable, "-c", self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._quiet else None,
            env=environment,
        )
        answer = self._exchange(self._setup)
        if answer is None:
            raise LimitReached(self._end_of_child(self._limits.cpu_seconds)[1])
        kind, self.greeting, _ = answer
        if kind == _REFUSED:
            self.close()
            raise SetupRefused(self.greeting.decode())

    def _exchange(self, request: bytes) -> tuple[bytes, bytes, float] | None:
        """Send a request and return kind, body and CPU seconds of the answer.

        Return None if the child died.
        """
        assert (
            self._child is not None
            and self._child.stdin is not None
            and self._child.stdout is not None
        )
        try:
            _send(self._child.stdin, _REQUEST, request)
            return _receive(self._child.stdout)
        except BrokenPipeError:
            return None

    def _end_of_child(self, allowed: float) -> tuple[bool, str]:
        """Return whether the CPU timer killed the child, and the cause of its death in words."""
        assert self._child is not None
        child = self._child
        self.close()
        if child.returncode == -signal.SIGPROF:
            return True, f"not finished after {allowed:g} s of CPU time"
        if child.returncode == -signal.SIGABRT:
            return (
                False,
                f"its process aborted, probably at its memory limit of {self._limits.memory_bytes >> 20} MiB",
            )
        return False, f"its process ended with exit status {child.returncode}"


class GuardedObject:
    """Object in child processes with limits. Each thread that calls it uses its own process.

    Args:
        module: as for `LimitedProcess`; its ``serve`` must call `serve_calls`.
        arguments: arguments of the object, in types that JSON has.
        limits, budget, quiet: as for `LimitedProcess`.
        limit_reason: key of `errors.REASONS` for calls that exceed a limit.
    Raises:
        SetupRefused, LimitReached: as for `LimitedProcess`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[Any],
        limits: Limits,
        budget: Budget,
        limit_reason: str,
        *,
        quiet: bool = False,
    ) -> None:
        setup = {"arguments": arguments}
        self._start = partial(LimitedProcess, module, setup, limits, budget, quiet=quiet)
        self._limit_reason = limit_reason
        self._lock = threading.Lock()
        self._idle = [self._start()]

    def call(self, method: str, *arguments: Any) -> tuple[Any, bytes]:
        """Call a method of the object; return the JSON part of its result, and the bytes.

        Raises:
            BadLine, DataError: the method raises it, it exceeds a limit, or the budget is exceeded.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            process = process or self._start()
            answer = process.ask(json.dumps([method, *arguments]).encode())
        except RecursionError:
            raise BadLine(*_TOO_DEEP) from None
        except LimitReached as limit:
            raise BadLine(self._limit_reason, str(limit)) from None
        finally:
            if process is not None:
                with self._lock:
                    self._idle.append(process)
        head, _, data = answer.partition(b"\n")
        outcome, *fields = json.loads(head)
        if outcome == "bad line":
            raise BadLine(*fields)
        if outcome == "data error":
            raise DataError(*fields)
        return fields[0], data

    def close(self) -> None:
        """End the processes; the object stays usable."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.close()


def _send(stream: IO[bytes], kind: bytes, body: bytes, seconds: float = 0.0) -> None:
    stream.write(_HEADER.pack(kind, len(body), seconds))
    stream.write(body)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[bytes, bytes, float] | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, size, seconds = _HEADER.unpack(header)
    body = stream.read(size)
    return (kind, body, seconds) if len(body) == size else None


# -------------------------------------------------------------------------------------------------------
# functions of the child process

Answer = Callable[[bytes], bytes]
Call = Callable[..., tuple[Any, bytes]]
"""Function that calls a method: bytes of the request, name, and arguments -> JSON part and bytes."""


def serve_requests(
    prepare: Callable[[dict[str, Any]], tuple[bytes, Answer]], *, opens_files: bool = False
) -> None:
    """Answer requests until standard input ends. This function is the main function of a child.

    Args:
        prepare: returns for the setup the first answer, and the function that answers requests. If
            ``prepare`` raises an exception, the parent raises `SetupRefused`. The answering
            function may raise `LimitReached`.
        opens_files: ``prepare`` opens files or imports modules, so `system_call_filter` restricts the
            process after it. Otherwise it restricts the process before.
    """
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # printed text must not get into the pipe of answers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of the group, but only the parent reacts to it
    received = _receive(source)
    if received is None:
        return
    message = json.loads(received[1])
    limits = Limits(*message["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    if not opens_files:
        restrict_process()  # before foreign code is compiled: jinja2 evaluates constants then
    try:
        greeting, answer = prepare(message["setup"])
    except BaseException as error:  # a panic of a Rust library is not an Exception
        text = str(error) or type(error).__name__
        _send(sink, _REFUSED, text.encode("utf-8", "backslashreplace"))
        return
    if opens_files:
        restrict_process()
    _send(sink, _DONE, greeting)
    while (received := _receive(source)) is not None:
        request = received[1]
        signal.setitimer(signal.ITIMER_PROF, limits.seconds_for(len(request)))
        started = time.process_time()
        try:
            kind, body = _DONE, answer(request)
        except LimitReached as limit:
            kind, body = _REFUSED, str(limit).encode("utf-8", "backslashreplace")
        _send(sink, kind, body, time.process_time() - started)


def serve_calls(
    build: Callable[..., Call], failure_reason: str | None = None, *, opens_files: bool = False
) -> None:
    """Answer the calls of a `GuardedObject`. This function is the main function of its child.

    Args:
        build: returns the function that calls a method, from the arguments of the object.
        failure_reason: key of `errors.REASONS` for exceptions of libraries; None ends the child.
        opens_files: as for `serve_requests`.
    """

    def prepare(setup: dict[str, Any]) -> tuple[bytes, Answer]:
        return b"", partial(_answer_call, build(*setup["arguments"]), failure_reason)

    serve_requests(prepare, opens_files=opens_files)


def _answer_call(call: Call, failure_reason: str | None, request: bytes) -> bytes:
    data = b""
    head: list[Any]
    try:
        value, data = call(len(request), *json.loads(request))
        head = ["value", value]
    except LimitReached:
        raise
    except MemoryError:
        raise LimitReached("out of memory") from None
    except DataError as error:
        head = ["data error", str(error)]
    except BadLine as bad_line:
        head = ["bad line", bad_line.reason, bad_line.detail]
    except RecursionError:
        head = ["bad line", *_TOO_DEEP]
    except BaseException as error:  # libraries raise Exception itself, or a Rust panic
        if failure_reason is None:
            raise
        head = ["bad line", failure_reason, library_message(error)]
    return json.dumps(head).encode() + b"\n" + data


def library_message(error: BaseException) -> str:
    """Return the message of an error of a library, or its type without a message."""
    return printable(str(error) or type(error).__name__)
