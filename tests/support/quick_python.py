"""Fast start of `python`, `torchrun` and `megatron-packed` with torch already imported.

A server imports the package once. The commands in `folder` are clients that start in 20 ms. A
client sends its arguments, working directory, environment and three streams to the server. The
server forks and runs the program. The client passes signals on, and ends as the program ends, by
its exit code or its signal. There are two differences to a fresh interpreter: the server's modules
are already imported, and they are not taken down at the end, which took 2 s (`end`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from megatron_packed.config.environment_variables import STORE_SOCKET
from support.fork_server import CHARTS, KEPT_MEMORY, TESTS, modules

MORE = (*CHARTS, "torch._dynamo", "torch.distributed.run", "megatron_packed.cli.main")
PROGRAMS = {
    "python": [],
    "torchrun": ["-c", "from torch.distributed.run import main; main()"],
    "megatron-packed": [
        "-c",
        "import sys; from megatron_packed.cli.main import main; sys.exit(main())",
    ],
}
CLIENT = """#!{python} -IS
import ctypes, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = json.dumps([{words!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
store = [int(number) for number in [os.environ.get({socket!r})] if number]
socket.send_fds(server, [len(job).to_bytes(8, "big")], [0, 1, 2, *store])
server.sendall(job)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the process that started it
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
code = int(server.recv(8) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


_others: list[Path] = []
"""Address of the server of another process, if this process uses it."""


@contextlib.contextmanager
def quick_python(folder: Path) -> Iterator[None]:
    """Write the commands into ``folder`` and serve them."""
    with contextlib.ExitStack() as servers:
        address = _others[0] if _others else servers.enter_context(server(folder))
        for name, words in PROGRAMS.items():
            (folder / name).write_text(
                CLIENT.format(
                    python=sys.executable, address=str(address), words=words, socket=STORE_SOCKET
                )
            )
            (folder / name).chmod(0o755)
        deadline = time.monotonic() + 60
        while not address.exists():
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        yield


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Path]:
    """Start a server, and yield its address in ``folder``, which appears when it can serve."""
    address = folder / "server"
    started = subprocess.Popen(
        [sys.executable, __file__, str(address), *modules(), *MORE, "support.frozen_imports"],
        env={
            **os.environ,
            **dict.fromkeys(KEPT_MEMORY, str(1 << 30)),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
    )
    try:
        yield address
    finally:
        started.terminate()
        started.wait()


def use(address: Path) -> None:
    """Use the server of another process, which must live longer than this process."""
    _others.append(address)


def serve(address: str) -> tuple[list[str], str, dict[str, str], list[int]]:
    """Serve clients; return only in each forked process, with the program that it must run."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address + ".new")
    listening.listen(16)
    os.rename(address + ".new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of the processes that wait
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            break
        client.close()
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 8, 4)
    job = b""
    while len(job) < int.from_bytes(size, "big"):
        job += client.recv(1 << 16)
    child = os.fork()
    if child == 0:
        client.close()
        return *json.loads(job), streams
    for stream in streams:
        os.close(stream)
    end = os.pidfd_open(child)  # readable when the child has ended, so nothing polls
    while True:
        ready, _, _ = select.select([client, end], [], [])
        if end in ready:
            _, status = os.waitpid(child, 0)
            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        numbers = client.recv(8)
        for number in numbers or [signal.SIGKILL]:  # nothing to read: the client was killed
            os.kill(child, number)
        if not numbers:
            os._exit(0)


def main() -> None:
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # an optional package is not installed
            __import__(module)
    words, folder, environment, streams = serve(sys.argv[1])
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
    if streams[3:]:
        environment[STORE_SOCKET] = str(streams[3])
    # Open the streams again: the server's objects remember whether its own streams could seek.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    words = [*words[words[0] == "-u" :]]
    sys.path[0] = folder
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] in ("-c", "-"):
        program = words.pop(1) if words[0] == "-c" else sys.stdin.read()
        sys.argv = words
        # As in a fresh interpreter. Processes that multiprocessing spawns would import this file
        # again, and with it torch, if it stayed the main module.
        sys.modules["__main__"] = ModuleType("__main__")
        exec(program, vars(sys.modules["__main__"]))
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def end(code: object) -> None:
    """End with the argument of `sys.exit`, after threads, exit functions and output.

    The processes of multiprocessing end so too. An interpreter would also destroy each object of
    all modules, and copy each page that the process shares with the server.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # the interpreter reports it
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    reason: object = None
    try:
        main()
    except SystemExit as ended:
        reason = ended.code
    end(reason)
