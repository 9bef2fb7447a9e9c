"""Run a function in several processes that form a process group: the harness of the distributed tests.

Processes come from a fork server that has torch imported, so a start costs a fraction of a second; it has no CUDA
context and no threads, so forking it is safe. The rendezvous store lives in the caller: no port is ever guessed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups

_PRELOAD = ["torch", "torch.distributed.device_mesh", "numpy", "megatron_packed.distributed.groups"]
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5


class DistributedError(AssertionError):
    """One or more ranks failed; the message holds every traceback, the first failure first."""


@dataclass(frozen=True, kw_only=True)
class _Backend:
    distributed_backend: str | None
    distributed_timeout_minutes: float


@dataclass(frozen=True, kw_only=True)
class _PackedTensor:
    """A CPU tensor as plain bytes: a process may end before another reads what it shared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", timeout: float = 60.0
) -> list[Any]:
    """Call ``fn(groups, *args)`` in ``world_size`` new processes and return what each rank returned.

    Every process has torchrun's environment variables, one thread, and ``groups: ParallelGroups`` over the whole world
    (with ``world_size`` 1: ``ParallelGroups.single()``), on ``cpu`` for gloo and ``cuda`` for nccl.

    Args:
        fn: a function of a module (not a lambda or a local one), so that the processes can import it.
        args: passed on; picklable.
        timeout: seconds for the whole call; the ranks still running are killed then, with their stacks in the error.
    Returns:
        One result per rank; tensors come back on the CPU, also inside dicts, lists and tuples.
    Raises:
        DistributedError: a rank raised, died, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    deadline = time.monotonic() + timeout
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as stacks:
        ranks: dict[Connection, _Rank] = {}
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            setup = _Setup(
                rank=rank, world_size=world_size, port=store.port, backend=backend, timeout=timeout, stacks=stacks
            )
            process = context.Process(target=_child, args=(sender, setup, fn, args), daemon=True)
            process.start()
            sender.close()
            ranks[receiver] = _Rank(rank, process)
        try:
            return _collect(ranks, deadline, Path(stacks))
        finally:
            for entry in ranks.values():
                if entry.process.is_alive():
                    entry.process.kill()
                entry.process.join(10)


@dataclass(frozen=True, kw_only=True)
class _Setup:
    rank: int
    world_size: int
    port: int
    backend: str
    timeout: float
    stacks: str

    def stack_file(self) -> Path:
        return Path(self.stacks) / f"rank_{self.rank}.txt"


@dataclass(frozen=True)
class _Rank:
    number: int
    process: Any


def _collect(ranks: dict[Connection, _Rank], deadline: float, stacks: Path) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    open_ends = dict(ranks)
    while open_ends:
        ready = wait(list(open_ends), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            entry = open_ends.pop(end)
            ok, value = _receive(end, entry)
            if ok:
                results[entry.number] = value
            else:
                failures.append(value)
                # Peers of a failed rank wait for it in a collective: give them a moment to say so, no more.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for entry in open_ends.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.process.pid, signal.SIGUSR2)  # it writes its stacks
    time.sleep(_STACK_SECONDS if open_ends else 0)
    for entry in open_ends.values():
        failures.append(f"rank {entry.number} did not finish in time and was killed.{_stack(stacks, entry.number)}")
    if failures:
        raise DistributedError("\n\n".join(failures))
    return [results[rank] for rank in sorted(results)]


def _receive(end: Connection, entry: _Rank) -> tuple[bool, Any]:
    try:
        ok, value = end.recv()
    except EOFError:
        entry.process.join(5)
        return False, f"rank {entry.number} died without a word (exit code {entry.process.exitcode})."
    return ok, _unpack(value) if ok else value


def _stack(stacks: Path, rank: int) -> str:
    file = stacks / f"rank_{rank}.txt"
    text = file.read_text() if file.exists() else ""
    return f" Its stacks:\n{text}" if text else ""


def _child(sender: Connection, setup: _Setup, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the caller's; rank 0 must not open another
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with setup.stack_file().open("w") as stack_file:
        faulthandler.register(signal.SIGUSR2, file=stack_file)
        try:
            minutes = setup.timeout / 60
            config = _Backend(distributed_backend=setup.backend, distributed_timeout_minutes=minutes)
            groups = ParallelGroups.create(config, "cuda" if setup.backend == "nccl" else "cpu")
            result = _pack(fn(groups, *args))
            released = groups.shutdown(timeout_seconds=5)
            message = (True, result)
        except BaseException:
            released = False
            message = (False, f"rank {setup.rank} failed:\n{traceback.format_exc()}")
        faulthandler.unregister(signal.SIGUSR2)
    sender.send(message)
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if not released:
        os._exit(1)  # a group with a dead peer may block the interpreter's own exit


def _pack(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _PackedTensor(dtype=value.dtype, shape=tuple(value.shape), data=flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack(item) for item in value)
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, _PackedTensor):
        if not value.data:
            return torch.empty(value.shape, dtype=value.dtype)
        return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _unpack(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpack(item) for item in value)
    return value
