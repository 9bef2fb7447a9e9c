"""Initialisation of torch.distributed: launcher environment, backend, process group of each axis.

[Note: who shares a communicator]
Axes with the same ranks share one process group, so that a layout of few axes needs few
communicators. There are two kinds of axes, and axes of different kinds never share a group. A
forward or backward pass waits for the first kind (``tp``, ``cp``, ``ep``, ...). The second kind
(``dp``, ``dp_cp``, ``expert_dp``) transfers gradients and weights. A communicator runs its
collectives one after the other. In a shared communicator a reduction of gradients would delay the
exchange of tokens, although the two could overlap.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from megatron_packed.config import flag_names as flags
from megatron_packed.config.environment_variables import STORE_SOCKET
from megatron_packed.config.parallel_layout import GROUP_AXES, AxisName, ParallelLayout
from megatron_packed.torch_private import set_timeout

WATCHDOG_AFTER = timedelta(minutes=1)
"""Extra time that NCCL's own watchdog waits after the timeout of a collective."""
_GRADIENT_AXES: tuple[AxisName, ...] = ("dp", "dp_cp", "expert_dp")


class BackendConfig(Protocol):
    """Fields of ``config.parallel.ParallelConfig`` that the initialisation reads."""

    @property
    def distributed_backend(self) -> str | None: ...
    @property
    def distributed_timeout_minutes(self) -> float: ...
    @property
    def tp_comm_overlap(self) -> bool | None: ...


class LaunchedProcess(NamedTuple):
    """World size and ranks of this process, as the launcher's environment variables give them."""

    world_size: int
    rank: int
    local_rank: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchedProcess:
        """Read ``WORLD_SIZE``, ``RANK`` and ``LOCAL_RANK``; absent variables mean a single process.

        Raises:
            ValueError: a variable is not an integer, or ``RANK`` is not below ``WORLD_SIZE``.
        """
        world_size = _integer(environment, "WORLD_SIZE", 1)
        rank = _integer(environment, "RANK", 0)
        local_rank = _integer(environment, "LOCAL_RANK", 0)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK is {rank}, but must be at least 0 and below WORLD_SIZE ({world_size}); start the "
                "processes with torchrun."
            )
        return cls(world_size, rank, local_rank)


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment variable {name} is {text!r}, not an integer; start with torchrun."
        ) from None


def claim_device(device: torch.device, local_rank: int) -> torch.device:
    """Return the device of this process with its index; on CUDA, also make the device current."""
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"local rank {local_rank} needs CUDA device {index}, but the number of visible CUDA devices is {count}; "
            f"start at most {count} processes per host, or make more devices visible (CUDA_VISIBLE_DEVICES)."
        )
    # Set the device before the first allocation. Otherwise every rank also opens a context on
    # device 0.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def backend_for(config: BackendConfig, device: torch.device) -> str:
    """Return the torch.distributed backend for collectives on ``device``.

    A backend that does not support ``device`` is refused, also in a world of one process.
    """
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown; choose nccl (CUDA) or gloo.")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"{flags.DISTRIBUTED_BACKEND} nccl needs CUDA devices, but the device is {device}; choose gloo."
        )
    return backend


def join_world(
    process: LaunchedProcess,
    backend: str,
    device: torch.device,
    environment: Mapping[str, str],
    timeout: timedelta,
) -> bool:
    """Initialise torch.distributed; return False if it was already initialised.

    Raises:
        ValueError: the launcher's environment is incomplete, or contradicts the earlier
            initialisation.
    """
    if dist.is_initialized():
        if (dist.get_world_size(), dist.get_rank()) != (process.world_size, process.rank):
            raise ValueError(
                f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"RANK and WORLD_SIZE give rank {process.rank} of {process.world_size}; "
                "initialise it in one place only."
            )
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {process.world_size} but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; "
            "start the processes with torchrun."
        )
    dist.init_process_group(
        # CPU tensors (checkpoint manifests, decisions of rank 0) use gloo, which never touches the
        # device's streams.
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=timeout,
        store=_store_of_one_machine(process, environment, timeout),
        world_size=process.world_size,
        rank=process.rank,
        # With `device_id` NCCL connects now, so that a broken network fails here and not in step 1.
        device_id=device if backend == "nccl" else None,
    )
    return True


def _store_of_one_machine(
    process: LaunchedProcess, environment: Mapping[str, str], timeout: timedelta
) -> TCPStore | None:
    """Return the store of a run that a launcher has started on one machine; None in other runs.

    Rank 0 hosts it on the socket of its launcher. torch's own store would listen on all interfaces
    of the machine, and has no password.
    """
    if STORE_SOCKET not in environment:
        return None
    address = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    return TCPStore(
        *address,
        process.world_size,
        is_master=process.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_socket_of_launcher(environment[STORE_SOCKET], address),
    )


def _socket_of_launcher(descriptor: str, address: tuple[str, int]) -> int | None:
    """Return the descriptor of the bound socket; None if a program of PYTHON_EXEC has closed it."""
    try:
        number = int(descriptor)
        with socket.socket(fileno=os.dup(number)) as handed:
            if handed.getsockname() != address:
                return None
        os.set_inheritable(number, False)  # processes that this rank starts must not keep the port
    except (ValueError, OSError):
        return None
    return number


def delay_watchdog(groups: Sequence[dist.ProcessGroup | None], timeout: timedelta) -> None:
    """Set the timeout of NCCL's watchdog `WATCHDOG_AFTER` later than the timeout of a collective.

    The watchdog kills the process without a useful message. With the later timeout a main thread
    that waits for the same collective reports the reason first.
    """
    for group in groups:
        if group is not None:
            # If this fails, the watchdog still ends a hanging job, but with a less useful message.
            with suppress(Exception):
                set_timeout(group, torch.device("cuda"), timeout + WATCHDOG_AFTER)


def axis_groups(
    layout: ParallelLayout,
    rank: int,
    backend: str | None,
    timeout: timedelta,
    *,
    under_products: bool = False,
) -> dict[AxisName, dist.ProcessGroup | None]:
    """Create the process group of ``rank`` on every axis; None for an axis of one rank.

    This is a collective call.

    Args:
        layout: sizes of all axes.
        rank: global rank of this process.
        backend: backend of the new groups; None selects the backend of the world group.
        timeout: timeout of every collective. torch does not apply the timeout of the world group to
            new groups.
        under_products: the collectives of the tensor-parallel group run under matrix products.
    """
    # See [Note: who shares a communicator].
    groups: dict[AxisName, dist.ProcessGroup | None] = {}
    made: dict[object, dist.ProcessGroup | None] = {}
    for axis in GROUP_AXES:
        partition = layout.groups(axis)
        of_gradients = axis in _GRADIENT_AXES
        key = (tuple(partition), of_gradients)
        if layout.size(axis) == 1:
            made[key] = None
        elif len(partition) == 1 and of_gradients:
            # No forward or backward pass uses the world's communicator, so gradients may use it.
            made[key] = dist.group.WORLD
        elif key not in made:
            # Every rank creates all groups of the partition in the same order, also the groups that
            # it is not in. torch requires this; otherwise ranks would wait in different groups.
            made[key], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(ranks) for ranks in partition],
                timeout=timeout,
                backend=backend,
                group_desc=axis,
                pg_options=options_under_products(backend)
                if under_products and axis == "tp"
                else None,
            )
        groups[axis] = made[key]
    return groups


def options_under_products(backend: str | None) -> Any:
    """Return options for a group whose kernels start before those of a product; None without NCCL."""
    if backend != "nccl":
        return None
    # With equal priorities, the blocks of a product that started earlier occupy all
    # multiprocessors, and the collective would start when the product ends.
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def mesh_of(
    layout: ParallelLayout,
    names: tuple[AxisName, ...],
    groups: Mapping[AxisName, dist.ProcessGroup | None],
    device_type: str,
) -> DeviceMesh:
    """Return the device mesh of the axes ``names`` over existing process groups.

    Axes of one rank are left out.

    Args:
        layout: sizes of all axes.
        names: axes of the mesh, slowest varying first.
        groups: process group of each axis.
        device_type: device type of the mesh, ``cpu`` or ``cuda``.
    """
    used = [(name, group) for name in names if (group := groups[name]) is not None]
    shape = [layout.size(name) for name, _ in used]
    return DeviceMesh.from_group(
        [group for _, group in used],
        device_type,
        mesh=torch.arange(layout.world_size).view(shape),
        mesh_dim_names=tuple(name for name, _ in used),
    )


def finishes(call: Callable[[], object], timeout_seconds: float) -> bool:
    """Run ``call`` in a daemon thread; return True if it returned or raised in time."""
    # Use a daemon thread, because a call that hangs inside the library must not keep the process
    # alive.
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return not thread.is_alive()


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        # A broken group may raise any exception when it is destroyed. Only print the exception, so
        # that it does not hide the error of the run.
        print(f"process group ended with {type(error).__name__}: {error}", flush=True)
