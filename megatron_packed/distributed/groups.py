"""Process groups of this rank, built once at start-up from torchrun's environment.

A size of 1 is the identity: its group is ``None``, no collective is called, and a run with one process needs no process
group at all. Everything below ``training/`` receives a ``ParallelGroups`` (or its integers); nothing reads a global.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA_PARALLEL_AXIS = "dp"


class BackendConfig(Protocol):
    """The part of ``config.parallel.ParallelConfig`` that is read here."""

    @property
    def distributed_backend(self) -> str | None: ...
    @property
    def distributed_timeout_minutes(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups, sizes and ranks; the names are those of ``STYLE.md`` (axes of one element have group ``None``)."""

    device: torch.device
    """Device of this rank's tensors, with its index on CUDA."""
    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Number of this process on its host."""
    mesh: DeviceMesh | None = None
    """One axis, ``dp``; ``None`` when the world is one process."""

    dp_group: dist.ProcessGroup | None = None
    dp_size: int = 1
    dp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    tp_size: int = 1
    tp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None
    cp_size: int = 1
    cp_rank: int = 0
    ep_group: dist.ProcessGroup | None = None
    ep_size: int = 1
    ep_rank: int = 0
    dp_cp_group: dist.ProcessGroup | None = None
    dp_cp_size: int = 1
    dp_cp_rank: int = 0
    expert_dp_group: dist.ProcessGroup | None = None
    expert_dp_size: int = 1
    expert_dp_rank: int = 0

    owns_process_group: bool = False
    """Whether ``create`` initialised torch.distributed, so that ``shutdown`` ends it."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelGroups:
        """One process, no process group."""
        return cls(device=torch.device(device))

    @classmethod
    def create(
        cls,
        config: BackendConfig,
        device: torch.device | str,
        environment: Mapping[str, str] | None = None,
    ) -> ParallelGroups:
        """Join the processes that torchrun started.

        A collective call: every rank must make it. With ``WORLD_SIZE`` absent or 1 nothing is initialised. On CUDA the
        current device is set to ``LOCAL_RANK``, device tensors use NCCL and host tensors gloo; on the CPU all is gloo.

        Args:
            config: backend (``None`` chooses by device) and timeout of every collective in minutes.
            device: ``cpu`` or ``cuda``.
            environment: in place of ``os.environ``.
        Raises:
            ValueError: the environment, the backend or the number of devices does not fit.
        """
        environment = os.environ if environment is None else environment
        world_size = _integer(environment, "WORLD_SIZE", 1)
        rank = _integer(environment, "RANK", 0)
        local_rank = _integer(environment, "LOCAL_RANK", 0)
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK {rank} is not in [0, WORLD_SIZE {world_size}); start the processes with torchrun.")
        device = _claim_device(torch.device(device), local_rank)
        if world_size == 1:
            return cls(device=device, local_rank=local_rank)
        owns = not dist.is_initialized()
        if owns:
            _initialize(config, device, environment, world_size, rank)
        elif dist.get_world_size() != world_size or dist.get_rank() != rank:
            raise ValueError(
                f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"the environment says rank {rank} of {world_size}; initialise it in one place only."
            )
        # A gloo group serves device tensors too, but only a mesh over the CPU takes it as it is.
        mesh_device = "cuda" if device.type == "cuda" and "nccl" in dist.get_backend_config() else "cpu"
        mesh = init_device_mesh(mesh_device, (world_size,), mesh_dim_names=(DATA_PARALLEL_AXIS,))
        group = mesh.get_group(DATA_PARALLEL_AXIS)
        return cls(
            device=device,
            world_size=world_size,
            rank=rank,
            local_rank=local_rank,
            mesh=mesh,
            dp_group=group,
            dp_size=world_size,
            dp_rank=rank,
            dp_cp_group=group,
            dp_cp_size=world_size,
            dp_cp_rank=rank,
            expert_dp_group=group,
            expert_dp_size=world_size,
            expert_dp_rank=rank,
            owns_process_group=owns,
        )

    @property
    def control_device(self) -> torch.device:
        """Where small host-made messages travel: the CPU when a backend serves it, else the device."""
        if self.world_size == 1:
            return torch.device("cpu")
        config = dist.get_backend_config(self.dp_group)
        return torch.device("cpu") if "cpu:" in config or "gloo" in config else self.device

    def shutdown(self, timeout_seconds: float = 10.0) -> bool:
        """End torch.distributed if ``create`` began it; may be called twice, blocks at most twice the limit.

        Destroying a NCCL group waits for collectives that a dead peer never joins, so the call runs beside a clock;
        when time is up the communicators are aborted.

        Returns:
            Whether all was released in order. After ``False`` a thread may still hang inside the library: leave the
            process by ``os._exit`` once what must be written is written.
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
        raise ValueError(f"environment variable {name} is {text!r}, not an integer; start with torchrun.") from None


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


def _initialize(
    config: BackendConfig, device: torch.device, environment: Mapping[str, str], world_size: int, rank: int
) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            "start the processes with torchrun."
        )
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {backend!r} is unknown; choose nccl (CUDA) or gloo.")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"distributed backend nccl needs CUDA devices, but the device is {device}; choose gloo.")
    dist.init_process_group(
        # Host tensors (checkpoint manifests, decisions of rank 0) go through gloo and never touch the device's streams.
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=timedelta(minutes=config.distributed_timeout_minutes),
        world_size=world_size,
        rank=rank,
        device_id=device if backend == "nccl" else None,
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
    except Exception as error:  # a broken group may raise anything on its way out; the run's own error matters more
        print(f"process group ended with {type(error).__name__}: {error}", flush=True)
