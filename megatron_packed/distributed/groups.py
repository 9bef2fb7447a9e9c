"""Process groups of this rank, built once at start-up from torchrun's environment.

A size of 1 is the identity: its group is ``None``, no collective is called, and a run with one
process needs no process group at all. Everything below ``training/`` receives a ``ParallelGroups``
(or its integers); nothing reads a global.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_packed.config.parallel_layout import (
    DENSE_AXES,
    EXPERT_AXES,
    GROUP_AXES,
    Axis,
    ParallelLayout,
)
from megatron_packed.distributed.init_process_groups import (
    BackendConfig,
    LaunchedProcess,
    axis_groups,
    backend_for,
    claim_device,
    delay_watchdog,
    finishes,
    join_world,
    mesh_of,
)
from megatron_packed.torch_private import abort_process_group


@dataclass(frozen=True)
class Unjoined:
    """Stands for a group of a layout that is only looked at: it has ranks, and no collective."""

    ranks: tuple[int, ...]


def global_ranks(group: dist.ProcessGroup | Unjoined) -> list[int]:
    """Return the global ranks of a group, in its order."""
    return list(group.ranks) if isinstance(group, Unjoined) else dist.get_process_group_ranks(group)


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups, sizes and ranks; the names are those of Megatron-LM (axes of one element have group
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
    """Timeout of every collective."""
    owns_process_group: bool = False
    """True if ``create`` initialised torch.distributed, so that ``shutdown`` ends it."""

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
        by_axis = {axis: layout.ranks(axis, rank) for axis in GROUP_AXES}
        groups = {
            axis: Unjoined(ranks) if len(ranks) > 1 else None for axis, ranks in by_axis.items()
        }
        return cls(
            device=torch.device(device),
            world_size=layout.world_size,
            rank=rank,
            **_fields_of(layout, rank, groups),
        )

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
        here = LaunchedProcess.read(environment)
        layout = layout or ParallelLayout(world_size=here.world_size)
        if layout.world_size != here.world_size:
            raise ValueError(
                f"the layout is one of {layout.world_size} processes, but WORLD_SIZE is {here.world_size}; start "
                "as many processes as the layout has."
            )
        device = claim_device(torch.device(device), here.local_rank)
        backend = backend_for(config, device)
        if here.world_size == 1:
            return cls(device=device, local_rank=here.local_rank)
        timeout = _timeout(config.distributed_timeout_minutes)
        owns = join_world(here, backend, device, environment, timeout)
        on_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        axes = axis_groups(layout, here.rank, "nccl" if on_nccl else None, timeout)
        if on_nccl:
            delay_watchdog([dist.group.WORLD, *axes.values()], timeout)
        # A gloo group serves device tensors too, but only a mesh over the CPU takes it as it is.
        mesh_device = "cuda" if on_nccl else "cpu"
        return cls(
            device=device,
            world_size=here.world_size,
            rank=here.rank,
            local_rank=here.local_rank,
            world_group=dist.group.WORLD,
            mesh=mesh_of(layout, DENSE_AXES, axes, mesh_device),
            expert_mesh=mesh_of(layout, EXPERT_AXES, axes, mesh_device),
            timeout=timeout,
            owns_process_group=owns,
            **_fields_of(layout, here.rank, axes),
        )

    def another_world_group(self) -> dist.ProcessGroup | None:
        """Create another group of all ranks, for messages between the hosts from another thread than
        that of training; a collective.

        ``None`` for one process.
        """
        if self.world_size == 1:
            return None
        # A group of its own: two threads in one group would pair each other's collectives.
        made: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=self.timeout, group_desc="hosts"
        )
        return made

    @property
    def control_device(self) -> torch.device:
        """Device of small messages made on the host: the CPU when a backend serves it, else the
        device of the tensors.
        """
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
        # In another thread: NCCL's destroy waits for peers, and a dead one never comes.
        if finishes(dist.destroy_process_group, timeout_seconds):
            return True
        finishes(abort_process_group, timeout_seconds)
        return False


def _fields_of(
    layout: ParallelLayout, rank: int, groups: Mapping[Axis, dist.ProcessGroup | Unjoined | None]
) -> dict[str, Any]:
    """Return the fields ``<axis>_group``, ``<axis>_size`` and ``<axis>_rank`` of every axis."""
    fields: dict[str, Any] = {}
    for axis, group in groups.items():
        fields[f"{axis}_group"] = group
        fields[f"{axis}_size"] = layout.size(axis)
        fields[f"{axis}_rank"] = layout.rank_in(axis, rank)
    return fields


def _timeout(minutes: float) -> timedelta:
    return timedelta(minutes=minutes)
