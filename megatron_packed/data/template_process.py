"""A chat template in a process of its own, because no sandbox inside Python bounds time and memory.

``{{ 10 ** (10 ** 10) }}`` runs inside one C function: no signal handler, thread or trace hook gets a word in. So a
template that came with a download is compiled and rendered by a child that has no environment variables to steal,
cannot write files, has an address-space limit, and sets a CPU timer before each conversation whose expiry kills it (the
kernel does it, so nothing is left running either when the parent dies). CPU time and not wall time, so that a busy
machine does not change which lines are accepted.

Messages in both directions are JSON with a 4-byte length before it.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.template import Rendered, TemplateError, TemplateRenderer

CPU_SECONDS = 10.0
"""CPU time for one conversation."""
MEMORY_BYTES = 4 * 2**30
"""Address space of the child."""
MAX_FAILURES = 3
"""Conversations in a row that may hit a limit before the template is given up."""
_HEADER = struct.Struct("<I")
_PACKAGE_ROOT = str(Path(__file__).parents[2])


class TemplateProcess:
    """`template.TemplateRenderer` behind limits; the same methods, not for several threads at once.

    Args:
        source, variables, special_tokens: as for `TemplateRenderer`.
        cpu_seconds, memory_bytes: limits for one conversation and for the process.
    Raises:
        TemplateError: the template does not compile, or not within the limits.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        special_tokens: Sequence[str],
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._setup = {
            "source": source,
            "variables": dict(variables),
            "special_tokens": list(special_tokens),
            "cpu_seconds": cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        self._cpu_seconds = cpu_seconds
        self._failures = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """See `TemplateRenderer.prompt`."""
        return str(self._ask({"messages": messages, "tools": tools, "method": "prompt"})["text"])

    def conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """See `TemplateRenderer.conversation`.

        Raises:
            BadLine: also ``template_limit``.
            DataError: several conversations in a row hit a limit.
        """
        return self._rendered("conversation", messages, tools)

    def everything(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """See `TemplateRenderer.everything`; raises as `conversation`."""
        return self._rendered("everything", messages, tools)

    def _rendered(self, method: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> Rendered:
        answer = self._ask({"messages": messages, "tools": tools, "method": method})
        return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a child that is already gone
                    stream.close()
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.close()
        environment = {
            "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, *filter(None, sys.path)]),
            "PYTHONUTF8": "1",
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ},
        }
        program = "from megatron_packed.data.template_process import serve; serve()"
        self._child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd="/",
        )
        answer = self._exchange(self._setup)
        if answer is None:
            status = self._end_of_child()
            raise TemplateError(f"the chat template could not be compiled: {status}; give another --chat-template.")
        if "error" in answer:
            self.close()
            raise TemplateError(answer["error"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._start()
        answer = self._exchange(request)
        if answer is None:
            detail = self._end_of_child()
        elif answer.get("reason") == "template_limit":
            detail = answer["detail"]
        else:
            self._failures = 0
            if "reason" in answer:
                raise BadLine(answer["reason"], answer["detail"])
            return answer
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise DataError(
                f"the chat template hit a limit for {self._failures} conversations in a row ({detail}); "
                "give another --chat-template."
            )
        raise BadLine("template_limit", detail)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The child's answer, or None when it died."""
        assert self._child is not None and self._child.stdin is not None and self._child.stdout is not None
        try:
            body = json.dumps(request).encode()
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None
        try:
            _send(self._child.stdin, body)
            received = _receive(self._child.stdout)
        except BrokenPipeError:
            return None
        return None if received is None else json.loads(received)

    def _end_of_child(self) -> str:
        """Why the child died, in words; it is restarted with the next question."""
        assert self._child is not None
        child = self._child
        self.close()
        if child.returncode == -signal.SIGPROF:
            return f"not done after {self._cpu_seconds:g} s of CPU time"
        return f"its process ended with status {child.returncode}"


def _send(stream: IO[bytes], body: bytes) -> None:
    stream.write(_HEADER.pack(len(body)))
    stream.write(body)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


# ------------------------------------------------------------------------------------------------------- in the child


def serve() -> None:
    """Main function of the child: compile the template, then render one conversation per request until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may write to the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    setup = _receive(source)
    if setup is None:
        return
    options = json.loads(setup)
    resource.setrlimit(resource.RLIMIT_AS, (options["memory_bytes"], options["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = options["cpu_seconds"]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        renderer = TemplateRenderer(options["source"], options["variables"], options["special_tokens"])
    except (TemplateError, MemoryError) as error:
        _send(sink, json.dumps({"error": str(error) or "the chat template needs too much memory"}).encode())
        return
    _send(sink, b"{}")
    while (request := _receive(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        _send(sink, _answer(renderer, request))


def _answer(renderer: TemplateRenderer, body: bytes) -> bytes:
    limit = 8 * len(body) + 2**20
    try:
        request = json.loads(body)
        arguments = (request["messages"], request["tools"])
        answer: dict[str, Any] = {}
        if request["method"] == "prompt":
            answer["text"] = renderer.prompt(*arguments)
        elif request["method"] == "conversation":
            answer = renderer.conversation(*arguments)._asdict()
        else:
            answer = renderer.everything(*arguments)._asdict()
        if len(answer["text"]) <= limit:
            return json.dumps(answer).encode()
        failure = BadLine("template_limit", f"{len(body)} bytes became {len(answer['text'])} characters")
    except BadLine as error:
        failure = error
    except RecursionError:
        failure = BadLine("too_deep", "while rendering")
    except MemoryError:
        failure = BadLine("template_limit", "out of memory")
    return json.dumps({"reason": failure.reason, "detail": failure.detail}).encode()
