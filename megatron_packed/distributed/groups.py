"""Process groups of this rank, built once at start-up from torchrun's environment.

A size of 1 is the identity: its group is ``None``, no collective is called, and a run with one
process needs no process group at all. Everything below ``training/`` receives a ``ParallelGroups``
(or its integers); nothing reads a global.

[Note: who shares a communicator]
Groups with the same ranks are one group, so that a layout of few axes has few communicators, but
never across these two kinds: those that a forward or backward pass waits for (``tp``, ``cp``,
``ep``, ...), and those of gradients and weights (``dp``, ``dp_cp``, ``expert_dp``). A communicator
works through its collectives one by one; gradients on their way would hold up the exchange of
tokens, however well the two could overlap.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_packed.config import flag_names as flags
from megatron_packed.config.parallel_layout import (
    DENSE_AXES,
    EXPERT_AXES,
    GROUP_AXES,
    Axis,
    ParallelLayout,
)

WATCHDOG_AFTER = timedelta(minutes=1)
"""By how much NCCL's own watchdog is later than the timeout of a collective."""
_GRADIENT_AXES: tuple[Axis, ...] = ("dp", "dp_cp", "expert_dp")


class BackendConfig(Protocol):
    """The part of ``config.parallel.ParallelConfig`` that is read here."""

    @property
    def distributed_backend(self) -> str | None: ...
    @property
    def distributed_timeout_minutes(self) -> float: ...


@dataclass(frozen=True)
class Unjoined:
    """Stands for a group of a layout that is only looked at: it has ranks, and no collective."""

    ranks: tuple[int, ...]


def global_ranks(group: dist.ProcessGroup | Unjoined) -> list[int]:
    """Of a group, in its order."""
    return list(group.ranks) if isinstance(group, Unjoined) else dist.get_process_group_ranks(group)


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups, sizes and ranks; the names are those of ``STYLE.md`` (axes of one element have group
    ``None``).
    """

    device: torch.device
    """Device of this rank's tensors, with its index on CUDA."""
    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Number of this process on its host."""
    world_group: dist.ProcessGroup | None = None
    """All ranks: for what concerns the run as a whole (checkpoints, decisions, the norm of all
    gradients).
    """
    mesh: DeviceMesh | None = None
    """The dense grid (``dp``, ``cp``, ``tp``, those of more than one rank) over the groups below;
    ``None`` in a world of one process.
    """
    expert_mesh: DeviceMesh | None = None
    """The same ranks as experts see them: ``expert_dp``, ``ep``, ``expert_tp``."""

    tp_group: dist.ProcessGroup | None = None
    """Ranks that share each matrix of a dense layer."""
    tp_size: int = 1
    tp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share the tokens of a pack."""
    cp_size: int = 1
    cp_rank: int = 0
    tp_cp_group: dist.ProcessGroup | None = None
    """Ranks that work on one pack."""
    tp_cp_size: int = 1
    tp_cp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    """Ranks that hold the same shard of dense layers and the same places of different packs."""
    dp_size: int = 1
    dp_rank: int = 0
    dp_cp_group: dist.ProcessGroup | None = None
    """Ranks that hold the same shard of dense layers: their gradients are summed."""
    dp_cp_size: int = 1
    dp_cp_rank: int = 0
    ep_group: dist.ProcessGroup | None = None
    """Ranks that share the experts of a layer."""
    ep_size: int = 1
    ep_rank: int = 0
    expert_tp_group: dist.ProcessGroup | None = None
    """Ranks that share each matrix of an expert."""
    expert_tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_ep_group: dist.ProcessGroup | None = None
    """Ranks that together hold all experts of a layer once."""
    expert_tp_ep_size: int = 1
    expert_tp_ep_rank: int = 0
    expert_dp_group: dist.ProcessGroup | None = None
    """Ranks that hold the same shard of the same experts: their gradients are summed."""
    expert_dp_size: int = 1
    expert_dp_rank: int = 0

    @property
    def ranks_of_pass(self) -> int:
        """Ranks, next to each other, whose forward passes wait for each other."""
        return math.lcm(self.tp_cp_size, self.expert_tp_ep_size)

    timeout: timedelta = timedelta(minutes=10)
    """Of every collective."""
    owns_process_group: bool = False
    """Whether ``create`` initialised torch.distributed, so that ``shutdown`` ends it."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelGroups:
        """One process, no process group."""
        return cls(device=torch.device(device))

    @classmethod
    def unjoined(
        cls, layout: ParallelLayout, device: torch.device | str = "meta", rank: int = 0
    ) -> ParallelGroups:
        """Sizes and ranks of one rank of a layout, for a model that is looked at and never run;
        nothing is started.
        """
        fields: dict[str, Any] = {}
        for axis in GROUP_AXES:
            ranks = layout.ranks(axis, rank)
            fields[f"{axis}_group"] = Unjoined(ranks) if len(ranks) > 1 else None
            fields[f"{axis}_size"], fields[f"{axis}_rank"] = len(ranks), ranks.index(rank)
        return cls(device=torch.device(device), world_size=layout.world_size, rank=rank, **fields)

    @classmethod
    def create(
        cls,
        config: BackendConfig,
        device: torch.device | str,
        environment: Mapping[str, str] | None = None,
        *,
        layout: ParallelLayout | None = None,
    ) -> ParallelGroups:
        """Join the processes that torchrun started.

        A collective call: every rank must make it. With ``WORLD_SIZE`` absent or 1 nothing is
        initialised. On CUDA the current device is set to ``LOCAL_RANK``, device tensors use NCCL
        and host tensors gloo; on the CPU all is gloo.

        Args:
            config: backend (``None`` chooses by device) and timeout of every collective in minutes.
            device: ``cpu`` or ``cuda``.
            environment: in place of ``os.environ``.
            layout: of ``WORLD_SIZE`` ranks; by default all are data-parallel.
        Raises:
            ValueError: the environment, the backend, the layout or the number of devices does not
                fit.
        """
        environment = os.environ if environment is None else environment
        world_size = _integer(environment, "WORLD_SIZE", 1)
        rank = _integer(environment, "RANK", 0)
        local_rank = _integer(environment, "LOCAL_RANK", 0)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK {rank} is not in [0, WORLD_SIZE {world_size}); start the processes with torchrun."
            )
        layout = layout or ParallelLayout(world_size=world_size)
        if layout.world_size != world_size:
            raise ValueError(
                f"the layout is one of {layout.world_size} processes, but WORLD_SIZE is {world_size}; start as many "
                "processes as the layout has."
            )
        device = _claim_device(torch.device(device), local_rank)
        backend = _backend(config, device)
        if world_size == 1:
            return cls(device=device, local_rank=local_rank)
        owns = not dist.is_initialized()
        if owns:
            _initialize(config, backend, device, environment, world_size, rank)
        elif dist.get_world_size() != world_size or dist.get_rank() != rank:
            raise ValueError(
                f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"the environment says rank {rank} of {world_size}; initialise it in one place only."
            )
        on_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        axes = _axis_groups(
            layout,
            rank,
            backend="nccl" if on_nccl else None,
            timeout=_timeout(config.distributed_timeout_minutes),
        )
        if on_nccl:
            _leave_the_first_word(
                [dist.group.WORLD, *axes.values()], _timeout(config.distributed_timeout_minutes)
            )
        fields: dict[str, Any] = {}
        for axis, group in axes.items():
            fields[f"{axis}_group"] = group
            fields[f"{axis}_size"], fields[f"{axis}_rank"] = (
                layout.size(axis),
                layout.rank_in(axis, rank),
            )
        # A gloo group serves device tensors too, but only a mesh over the CPU takes it as it is.
        mesh_device = "cuda" if on_nccl else "cpu"
        return cls(
            device=device,
            world_size=world_size,
            rank=rank,
            local_rank=local_rank,
            world_group=dist.group.WORLD,
            mesh=_mesh(layout, DENSE_AXES, axes, mesh_device),
            expert_mesh=_mesh(layout, EXPERT_AXES, axes, mesh_device),
            timeout=_timeout(config.distributed_timeout_minutes),
            owns_process_group=owns,
            **fields,
        )

    def another_world_group(self) -> dist.ProcessGroup | None:
        """All ranks once more, for messages between the hosts from another thread than that of
        training; a collective.

        ``None`` for one process.
        """
        if self.world_size == 1:
            return None
        made: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=self.timeout, group_desc="hosts"
        )
        return made

    @property
    def control_device(self) -> torch.device:
        """Where small host-made messages travel: the CPU when a backend serves it, else the device."""
        if self.world_size == 1:
            return torch.device("cpu")
        config = dist.get_backend_config(self.world_group)
        return torch.device("cpu") if "cpu:" in config or "gloo" in config else self.device

    def shutdown(self, timeout_seconds: float = 10.0) -> bool:
        """End torch.distributed if ``create`` began it; may be called twice, blocks at most twice
        the limit.

        Destroying a NCCL group waits for collectives that a dead peer never joins, so the call runs
        beside a clock; when time is up the communicators are aborted.

        Returns:
            Whether all was released in order. After ``False`` a thread may still hang inside the
            library: leave the process by ``os._exit`` once what must be written is written.
        """
        if not self.owns_process_group or not dist.is_initialized():
            return True
        if _finishes(dist.destroy_process_group, timeout_seconds):
            return True
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None:
            _finishes(abort, timeout_seconds)
        return False


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment variable {name} is {text!r}, not an integer; start with torchrun."
        ) from None


def _claim_device(device: torch.device, local_rank: int) -> torch.device:
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index = local_rank if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"local rank {local_rank} wants CUDA device {index}, but {count} are visible; start at most {count} "
            "processes per host or show more devices (CUDA_VISIBLE_DEVICES)."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _backend(config: BackendConfig, device: torch.device) -> str:
    """Return the library for collectives on ``device``; one process is refused the wrong one, too."""
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown; choose nccl (CUDA) or gloo.")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"{flags.DISTRIBUTED_BACKEND} nccl needs CUDA devices, but the device is {device}; choose gloo."
        )
    return backend


def _initialize(
    config: BackendConfig,
    backend: str,
    device: torch.device,
    environment: Mapping[str, str],
    world_size: int,
    rank: int,
) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            "start the processes with torchrun."
        )
    dist.init_process_group(
        # Host tensors (checkpoint manifests, decisions of rank 0) go through gloo and never touch
        # the device's streams.
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=_timeout(config.distributed_timeout_minutes),
        world_size=world_size,
        rank=rank,
        device_id=device if backend == "nccl" else None,
    )


def _timeout(minutes: float) -> timedelta:
    return timedelta(minutes=minutes)


def _leave_the_first_word(groups: Sequence[dist.ProcessGroup | None], timeout: timedelta) -> None:
    """NCCL's watchdog kills a process whose collective takes too long; a host that waits for it
    then says why first.
    """
    for group in groups:
        if group is not None:
            with suppress(
                Exception
            ):  # a private interface of torch: without it the job ends all the same
                group._get_backend(torch.device("cuda"))._set_default_timeout(
                    timeout + WATCHDOG_AFTER
                )


def _axis_groups(
    layout: ParallelLayout, rank: int, *, backend: str | None, timeout: timedelta
) -> dict[Axis, dist.ProcessGroup | None]:
    """The group of ``rank`` of every kind, ``None`` for one of one rank. A collective call.

    Args:
        backend: of the new groups; ``None`` takes that of the world.
        timeout: of every collective; torch would not pass on that of the world.
    """
    # See [Note: who shares a communicator].
    found: dict[Axis, dist.ProcessGroup | None] = {}
    made: dict[object, dist.ProcessGroup | None] = {}
    for axis in GROUP_AXES:
        partition, of_gradients = layout.groups(axis), axis in _GRADIENT_AXES
        key = (tuple(partition), of_gradients)
        if layout.size(axis) == 1:
            made[key] = None
        elif len(partition) == 1 and of_gradients:
            made[key] = dist.group.WORLD
        elif key not in made:
            made[key], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(ranks) for ranks in partition],
                timeout=timeout,
                backend=backend,
                group_desc=axis,
            )
        found[axis] = made[key]
    return found


def _mesh(
    layout: ParallelLayout,
    names: tuple[Axis, ...],
    groups: Mapping[Axis, dist.ProcessGroup | None],
    device_type: str,
) -> DeviceMesh:
    """The grid of the axes ``names``, slowest first, over groups that exist; axes of one rank are
    left out.
    """
    used = [(name, group) for name in names if (group := groups[name]) is not None]
    shape = [layout.size(name) for name, _ in used]
    return DeviceMesh.from_group(
        [group for _, group in used],
        device_type,
        mesh=torch.arange(layout.world_size).view(shape),
        mesh_dim_names=tuple(name for name, _ in used),
    )


def _finishes(call: Callable[[], object], timeout_seconds: float) -> bool:
    """Run ``call`` in a daemon thread; whether it returned, by value or by exception, in time."""
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return not thread.is_alive()


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        # a broken group may raise anything on its way out; the run's own error matters more
        print(f"process group ended with {type(error).__name__}: {error}", flush=True)
