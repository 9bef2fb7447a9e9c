"""Harness of the distributed tests: pools of processes that form a process group.

A fork server that has already imported torch forks the processes, so a start takes a fraction of a
second. The fork server has no CUDA context and no threads, so forking it is safe. The calling
process hosts the rendezvous store on a port that the system assigns. A ``WorkerPool`` reuses its
processes, and the process groups of every requested layout, from one call to the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all

_PRELOAD = [
    "torch",
    "torch.distributed.device_mesh",
    # otherwise the first backward pass would import this module and sympy
    "torch.fx.experimental.symbolic_shapes",
    "numpy",
    "megatron_packed.distributed.groups",
]
_GRACE_SECONDS = 3.0
_STACK_SECONDS = 0.5
_SHUTDOWN_SECONDS = 5.0
_LAYOUTS_OF_A_POOL = 5


class DistributedError(AssertionError):
    """Failure of one or more ranks; the message contains each traceback, in order of failure."""


@dataclass(frozen=True, kw_only=True)
class _Backend:
    distributed_backend: str | None
    distributed_timeout_minutes: float
    tp_comm_overlap: bool = False


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
    layout: Mapping[str, int] | None = None,
) -> list[Any]:
    """Run ``fn`` like ``WorkerPool.run``, in new processes that end after the call.

    Use it for functions that make a pool unusable: they kill processes, send signals or destroy
    process groups.
    """
    with WorkerPool(world_size, backend=backend, collective_timeout=timeout) as pool:
        return pool.run(fn, *args, timeout=timeout, layout=layout)


class WorkerPool:
    """Pool of ``world_size`` processes that form one process group and run the same functions.

    Every process has torchrun's environment variables and one torch thread. A failed call ends the
    pool.

    Args:
        world_size: number of processes.
        backend: gloo for the CPU, nccl for CUDA.
        collective_timeout: seconds after which a collective fails.
    """

    def __init__(
        self, world_size: int, *, backend: str = "gloo", collective_timeout: float = 60.0
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._stacks = tempfile.TemporaryDirectory(prefix="worker_pool_")
        self._ranks: dict[Connection, _Rank] = {}
        setup = _Setup(
            rank=0,
            world_size=world_size,
            port=self._store.port,
            backend=backend,
            timeout=collective_timeout,
            stacks=self._stacks.name,
        )
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, replace(setup, rank=rank)), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks[ours] = _Rank(rank, process)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """True if all processes wait for the next call."""
        return bool(self._ranks)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        layout: Mapping[str, int] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Call ``fn(groups, *args)`` in every process and return the result of each rank.

        ``groups: ParallelGroups`` contains all processes of the pool. With ``world_size`` 1 it
        equals ``ParallelGroups.single()``. Its device is ``cpu`` for gloo and ``cuda`` for nccl.
        The random generators of all processes get the same seed before every call.

        Args:
            fn: function of a module, not a lambda or a local function, so that the processes can
                import it.
            args: further arguments; they must be picklable.
            layout: sizes of ``config.parallel_layout.ParallelLayout``, e.g. ``{"tp_size": 2}``; by
                default all ranks are data-parallel.
            timeout: seconds for the call. Ranks that still run after this time are killed, and the
                error contains their stacks.
        Returns:
            One result per rank. All tensors in it are on the CPU.
        Raises:
            DistributedError: a rank raised an exception, died, or did not finish in time.
        """
        if not self.usable:
            raise DistributedError(
                "the processes of this pool have ended; create a new WorkerPool."
            )
        deadline = time.monotonic() + timeout
        sizes = ParallelLayout(world_size=len(self._ranks), **(layout or {}))
        for end in self._ranks:
            # A dead process is reported when its result is read.
            with contextlib.suppress(BrokenPipeError):
                end.send((fn, args, sizes))
        try:
            return _collect(self._ranks, deadline, Path(self._stacks.name))
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Let all processes finish, then end them; may be called twice."""
        for end in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                end.send(None)
        for entry in self._ranks.values():
            entry.process.join(2 * _SHUTDOWN_SECONDS)
        self._end()

    def _end(self) -> None:
        for end, entry in self._ranks.items():
            if entry.process.is_alive():
                entry.process.kill()
            entry.process.join(10)
            end.close()
        self._ranks = {}
        self._stacks.cleanup()


class WorkerPools:
    """Pools by world size, each created at its first use.

    A new pool replaces a pool after a failed call, and a pool that has had `_LAYOUTS_OF_A_POOL`
    layouts and gets another one. Each process group has a thread that wakes 100 times a second, so
    the groups of many layouts use a large part of a processor. A new pool takes a fraction of a
    second.
    """

    def __init__(self, backend: str = "gloo", *, collective_timeout: float = 60.0) -> None:
        self._start = partial(WorkerPool, backend=backend, collective_timeout=collective_timeout)
        self._pools: dict[int, WorkerPool] = {}
        self._layouts: dict[int, set[ParallelLayout]] = {}

    def __enter__(self) -> WorkerPools:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        layout: Mapping[str, int] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Run ``fn`` by ``WorkerPool.run`` in the pool of ``world_size`` processes."""
        pool = self._pools.get(world_size)
        sizes = ParallelLayout(world_size=world_size, **(layout or {}))
        seen = self._layouts.get(world_size, set())
        if pool is not None and sizes not in seen and len(seen) >= _LAYOUTS_OF_A_POOL:
            pool.close()
        if pool is None or not pool.usable:
            pool, seen = self._start(world_size), set()
            self._pools[world_size], self._layouts[world_size] = pool, seen
        seen.add(sizes)
        return pool.run(fn, *args, layout=layout, timeout=timeout)


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
                # Peers of a failed rank may wait for it in a collective, so wait only briefly for
                # their results.
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for entry in open_ends.values():
        with contextlib.suppress(ProcessLookupError):
            # the handler of this signal writes the stacks
            os.kill(entry.process.pid, signal.SIGUSR2)
    time.sleep(_STACK_SECONDS if open_ends else 0)
    for entry in open_ends.values():
        failures.append(
            f"rank {entry.number} did not finish in time and was killed.{_stack(stacks, entry.number)}"
        )
    if failures:
        raise DistributedError("\n\n".join(failures))
    return [results[rank] for rank in sorted(results)]


def _receive(end: Connection, entry: _Rank) -> tuple[bool, Any]:
    try:
        ok, value = end.recv()
    except (EOFError, ConnectionResetError):
        entry.process.join(5)
        return (
            False,
            f"rank {entry.number} died without a message (exit code {entry.process.exitcode}).",
        )
    return ok, value


def _stack(stacks: Path, rank: int) -> str:
    file = stacks / f"rank_{rank}.txt"
    text = file.read_text() if file.exists() else ""
    return f" Its stacks:\n{text}" if text else ""


def _work(caller: Connection, setup: _Setup) -> None:
    """Run as the main function of a process: serve calls until the pool closes or a call fails."""
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        # The caller hosts the store, so rank 0 must not open another one.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    released = False
    with setup.stack_file().open("w") as stack_file:
        faulthandler.register(signal.SIGUSR2, file=stack_file)
        try:
            released = _serve(caller, setup)
        except EOFError:
            pass  # the calling process has ended
        except BaseException:
            caller.send((False, f"rank {setup.rank} failed:\n{traceback.format_exc()}"))
        faulthandler.unregister(signal.SIGUSR2)
    caller.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if not released:
        os._exit(1)  # a group with a dead peer may block a normal exit of the interpreter


def _serve(caller: Connection, setup: _Setup) -> bool:
    """Serve calls until the pool closes; return True if the process group ended normally."""
    config = _Backend(
        distributed_backend=setup.backend, distributed_timeout_minutes=setup.timeout / 60
    )
    device = "cuda" if setup.backend == "nccl" else "cpu"
    world = ParallelGroups.create(config, device)
    made = {ParallelLayout(world_size=setup.world_size): world}
    while (call := caller.recv()) is not None:
        fn, args, layout = call
        if layout not in made:
            made[layout] = ParallelGroups.create(config, device, layout=layout)
        seed_all(0)
        caller.send_bytes(_pack((True, fn(made[layout], *args))))
    return world.shutdown(timeout_seconds=_SHUTDOWN_SECONDS)


class _Pickler(pickle.Pickler):
    """Pickler that copies tensors, wherever they are in a result, as plain bytes.

    Shared memory would not do: the sending process may end before the caller reads the tensor.
    It would also cost a connection for each tensor.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor_of, (value.dtype, tuple(value.shape), flat.numpy().tobytes())


def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _pack(value: Any) -> bytes:
    packed = io.BytesIO()
    _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(value)
    return packed.getvalue()
