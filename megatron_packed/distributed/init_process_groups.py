"""Start of torch.distributed: the launcher's environment, the backend, one group for each axis.

[Note: who shares a communicator]
Groups with the same ranks are one group, so that a layout of few axes has few communicators, but
never across these two kinds: those that a forward or backward pass waits for (``tp``, ``cp``,
``ep``, ...), and those of gradients and weights (``dp``, ``dp_cp``, ``expert_dp``). A communicator
works through its collectives one by one; gradients on their way would hold up the exchange of
tokens, however well the two could overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_packed.config import flag_names as flags
from megatron_packed.config.parallel_layout import GROUP_AXES, Axis, ParallelLayout
from megatron_packed.torch_private import set_timeout

WATCHDOG_AFTER = timedelta(minutes=1)
"""Time by which NCCL's own watchdog is later than the timeout of a collective."""
_GRADIENT_AXES: tuple[Axis, ...] = ("dp", "dp_cp", "expert_dp")


class BackendConfig(Protocol):
    """The part of ``config.parallel.ParallelConfig`` that is read here."""

    @property
    def distributed_backend(self) -> str | None: ...
    @property
    def distributed_timeout_minutes(self) -> float: ...


class LaunchedProcess(NamedTuple):
    """One of the processes that a launcher started, from its environment."""

    world_size: int
    rank: int
    local_rank: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchedProcess:
        """Read ``WORLD_SIZE``, ``RANK`` and ``LOCAL_RANK``; one process where they are absent.

        Raises:
            ValueError: a variable is no integer, or the rank is not below the world's size.
        """
        world_size = _integer(environment, "WORLD_SIZE", 1)
        rank = _integer(environment, "RANK", 0)
        local_rank = _integer(environment, "LOCAL_RANK", 0)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK {rank} is not in [0, WORLD_SIZE {world_size}); start the processes with torchrun."
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
    """Return the device of this process with its index, and make it the current one on CUDA."""
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"local rank {local_rank} wants CUDA device {index}, but {count} are visible; start at most {count} "
            "processes per host or show more devices (CUDA_VISIBLE_DEVICES)."
        )
    # Before the first allocation: otherwise every rank opens a context on device 0 as well.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def backend_for(config: BackendConfig, device: torch.device) -> str:
    """Return the library for collectives on ``device``; one process is refused the wrong one, too."""
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown; choose nccl (CUDA) or gloo.")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"{flags.DISTRIBUTED_BACKEND} nccl needs CUDA devices, but the device is {device}; choose gloo."
        )
    return backend


def join_world(
    here: LaunchedProcess,
    backend: str,
    device: torch.device,
    environment: Mapping[str, str],
    timeout: timedelta,
) -> bool:
    """Initialise torch.distributed; return False if the caller had done so before.

    Raises:
        ValueError: the launcher's environment is incomplete, or contradicts the earlier call.
    """
    if dist.is_initialized():
        if (dist.get_world_size(), dist.get_rank()) != (here.world_size, here.rank):
            raise ValueError(
                f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"the environment says rank {here.rank} of {here.world_size}; initialise it in one place only."
            )
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {here.world_size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            "start the processes with torchrun."
        )
    dist.init_process_group(
        # Host tensors (checkpoint manifests, decisions of rank 0) go through gloo and never touch
        # the device's streams.
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=timeout,
        world_size=here.world_size,
        rank=here.rank,
        # With a device NCCL connects now: a broken network is an error of the start, not of step 1.
        device_id=device if backend == "nccl" else None,
    )
    return True


def delay_watchdog(groups: Sequence[dist.ProcessGroup | None], timeout: timedelta) -> None:
    """Let NCCL's watchdog act later than the timeout of a collective.

    The watchdog kills the process without a reason. A host that waits for the same collective gets
    to report the reason first.
    """
    for group in groups:
        if group is not None:
            # The job ends without it all the same, only with a worse report.
            with suppress(Exception):
                set_timeout(group, torch.device("cuda"), timeout + WATCHDOG_AFTER)


def axis_groups(
    layout: ParallelLayout, rank: int, backend: str | None, timeout: timedelta
) -> dict[Axis, dist.ProcessGroup | None]:
    """Create the groups of ``rank`` on every axis, None for a group of one rank; a collective call.

    Args:
        backend: of the new groups; ``None`` takes that of the world.
        timeout: of every collective; torch would not pass on that of the world.
    """
    # See [Note: who shares a communicator].
    found: dict[Axis, dist.ProcessGroup | None] = {}
    made: dict[object, dist.ProcessGroup | None] = {}
    for axis in GROUP_AXES:
        partition = layout.groups(axis)
        of_gradients = axis in _GRADIENT_AXES
        key = (tuple(partition), of_gradients)
        if layout.size(axis) == 1:
            made[key] = None
        elif len(partition) == 1 and of_gradients:
            # Nothing of a forward or backward pass uses the world's communicator.
            made[key] = dist.group.WORLD
        elif key not in made:
            # Every rank creates all groups of the partition in this order, its own among them:
            # torch requires it, or ranks would wait for each other in different groups.
            made[key], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(ranks) for ranks in partition],
                timeout=timeout,
                backend=backend,
                group_desc=axis,
            )
        found[axis] = made[key]
    return found


def mesh_of(
    layout: ParallelLayout,
    names: tuple[Axis, ...],
    groups: Mapping[Axis, dist.ProcessGroup | None],
    device_type: str,
) -> DeviceMesh:
    """Return the grid of the axes ``names``, slowest first, over groups that exist; axes of one rank
    are left out.
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
    """Run ``call`` in a daemon thread; return True if it ended in time, by value or by exception."""
    # Daemon: a call that hangs inside the library must not keep the process alive.
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return not thread.is_alive()


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        # A broken group may raise anything on its way out; the run's own error matters more.
        print(f"process group ended with {type(error).__name__}: {error}", flush=True)
