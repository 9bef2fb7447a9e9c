"""Process groups of this rank, created once at start-up from torchrun's environment variables.

The group of an axis of size 1 is ``None``, and a collective over ``None`` is the identity. So a run
with one process needs no process group. Code below ``training/`` receives a ``ParallelGroups`` or
its integers as an argument, and reads no global variable.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_packed.config.parallel_layout import (
    DENSE_AXES,
    EXPERT_AXES,
    GROUP_AXES,
    AxisName,
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
    """Placeholder for a process group of a layout that is never run.

    Collectives over it return tensors of the right shapes and exchange nothing.
    """

    ranks: tuple[int, ...]
    own_rank: int
    """This process's rank in the group."""
    group_desc = "unjoined"

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.own_rank


def global_ranks(group: dist.ProcessGroup | Unjoined) -> list[int]:
    """Return the global ranks of a group, in the order of the group."""
    return list(group.ranks) if isinstance(group, Unjoined) else dist.get_process_group_ranks(group)


@dataclass(frozen=True)
class Axis:
    """Process group of this rank along one axis, with the group's size and the rank in it.

    The default is an axis of one rank: its group is ``None``, over which a collective is the
    identity.
    """

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Nine axes of this process, with Megatron-LM's names.

    The world is no axis of the layout: its size and rank have the names of torchrun's variables.
    """

    device: torch.device
    """Device of this rank's tensors, with its index on CUDA."""
    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Number of this process on its host."""
    world_group: dist.ProcessGroup | None = None
    """Group of all ranks, for checkpoints, decisions of the whole run and the gradient norm."""
    mesh: DeviceMesh | None = None
    """Device mesh of dense layers over the groups of ``dp``, ``cp`` and ``tp``.

    Axes of one rank are left out; ``None`` in a world of one process.
    """
    expert_mesh: DeviceMesh | None = None
    """Device mesh of experts over the same ranks: ``expert_dp``, ``ep``, ``expert_tp``."""

    tp: Axis = Axis()
    """Ranks among which each matrix of a dense layer is split."""
    cp: Axis = Axis()
    """Ranks among which the tokens of a pack are split."""
    tp_cp: Axis = Axis()
    """Ranks that work on the same pack."""
    dp: Axis = Axis()
    """Ranks that hold the same shard of dense layers and work on different packs.

    They have the same context-parallel rank, so they hold the same token positions of their packs.
    """
    dp_cp: Axis = Axis()
    """Ranks that hold the same shard of dense layers: their gradients are summed."""
    ep: Axis = Axis()
    """Ranks among which the experts of a layer are distributed."""
    expert_tp: Axis = Axis()
    """Ranks among which each matrix of an expert is split."""
    expert_tp_ep: Axis = Axis()
    """Ranks that together hold exactly one copy of all experts of a layer."""
    expert_dp: Axis = Axis()
    """Ranks that hold the same shard of the same experts: their gradients are summed."""

    timeout: timedelta = timedelta(minutes=10)
    """Timeout of every collective."""
    owns_process_group: bool = False
    """True if ``create`` initialised torch.distributed, so that ``shutdown`` ends it."""

    @property
    def ranks_of_pass(self) -> int:
        """Number of consecutive ranks whose forward passes wait for each other."""
        return math.lcm(self.tp_cp.size, self.expert_tp_ep.size)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelGroups:
        """Return the groups of a run with one process: every group is ``None``."""
        return cls(device=torch.device(device))

    @classmethod
    def unjoined(
        cls, layout: ParallelLayout, device: torch.device | str = "meta", rank: int = 0
    ) -> ParallelGroups:
        """Return sizes and ranks of one rank of a layout without starting torch.distributed.

        This serves models that are inspected and never run. Each group is an `Unjoined`.
        """
        ranks_by_axis = {name: layout.ranks(name, rank) for name in GROUP_AXES}
        groups = {
            name: Unjoined(ranks, layout.rank_in(name, rank)) if len(ranks) > 1 else None
            for name, ranks in ranks_by_axis.items()
        }
        return cls(
            device=torch.device(device),
            world_size=layout.world_size,
            rank=rank,
            **_axes(layout, rank, groups),
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

        This is a collective call, so every rank must make it. If ``WORLD_SIZE`` is absent or 1,
        torch.distributed is not initialised. On CUDA the current device is set to ``LOCAL_RANK``;
        CUDA tensors use NCCL and CPU tensors use gloo. On the CPU all tensors use gloo.

        Args:
            config: backend (``None`` selects one by device), timeout of every collective in
                minutes, and overlap of tensor-parallel collectives with products.
            device: ``cpu`` or ``cuda``.
            environment: environment variables to read instead of ``os.environ``.
            layout: parallel layout of ``WORLD_SIZE`` ranks; by default all ranks are data-parallel.
        Raises:
            ValueError: the environment variables are inconsistent, the backend does not support the
                device, the layout has another world size, or there are too few CUDA devices.
        """
        environment = os.environ if environment is None else environment
        process = LaunchedProcess.read(environment)
        layout = layout or ParallelLayout(world_size=process.world_size)
        if layout.world_size != process.world_size:
            raise ValueError(
                f"the parallel layout needs {layout.world_size} processes, but WORLD_SIZE is {process.world_size}; "
                "start one process per rank of the layout."
            )
        device = claim_device(torch.device(device), process.local_rank)
        backend = backend_for(config, device)
        if process.world_size == 1:
            return cls(device=device, local_rank=process.local_rank)
        timeout = timedelta(minutes=config.distributed_timeout_minutes)
        owns = join_world(process, backend, device, environment, timeout)
        on_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        # Without the flag no collective of NCCL runs under products. See `connect_overlap`.
        kind, overlap = "nccl" if on_nccl else None, bool(config.tp_comm_overlap)
        axes = axis_groups(layout, process.rank, kind, timeout, under_products=overlap)
        if on_nccl:
            delay_watchdog([dist.group.WORLD, *axes.values()], timeout)
        # A gloo group also accepts CUDA tensors, but only a CPU mesh can be built from its groups.
        mesh_device = "cuda" if on_nccl else "cpu"
        return cls(
            device=device,
            world_size=process.world_size,
            rank=process.rank,
            local_rank=process.local_rank,
            world_group=dist.group.WORLD,
            mesh=mesh_of(layout, DENSE_AXES, axes, mesh_device),
            expert_mesh=mesh_of(layout, EXPERT_AXES, axes, mesh_device),
            timeout=timeout,
            owns_process_group=owns,
            **_axes(layout, process.rank, axes),
        )

    def another_world_group(self) -> dist.ProcessGroup | None:
        """Create another gloo group of all ranks, for messages that a background thread sends.

        This is a collective call. For one process the result is ``None``.
        """
        if self.world_size == 1:
            return None
        # Create a separate group. With two threads in one group, a collective of one thread could
        # be matched with a collective of the other thread.
        made: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=self.timeout, group_desc="hosts"
        )
        return made

    @property
    def control_device(self) -> torch.device:
        """Device for small messages that the host sends through a collective.

        This is the CPU if a backend supports CPU tensors, else ``device``.
        """
        if self.world_size == 1:
            return torch.device("cpu")
        config = dist.get_backend_config(self.world_group)
        return torch.device("cpu") if "cpu:" in config or "gloo" in config else self.device

    def shutdown(self, timeout_seconds: float = 10.0) -> bool:
        """End torch.distributed if ``create`` initialised it; may be called twice.

        Destroying an NCCL group waits for collectives that a dead peer never joins. So the call
        runs with a time limit. When the limit has passed, the communicators are aborted.

        Args:
            timeout_seconds: limit of the destruction and of the abort; the call blocks at most
                twice this time.
        Returns:
            True if all groups were destroyed in time. After False a thread may still hang inside
            the library: write all output, then end the process with ``os._exit``.
        """
        if not self.owns_process_group or not dist.is_initialized():
            return True
        # Run the call in another thread: destroying an NCCL group waits for all peers, and a dead
        # peer never arrives.
        if finishes(dist.destroy_process_group, timeout_seconds):
            return True
        finishes(abort_process_group, timeout_seconds)
        return False


def _axes(
    layout: ParallelLayout,
    rank: int,
    groups: Mapping[AxisName, dist.ProcessGroup | Unjoined | None],
) -> dict[str, Any]:
    """Return each axis of ``rank`` under the name of its field."""
    return {
        name: Axis(
            cast("dist.ProcessGroup | None", group), layout.size(name), layout.rank_in(name, rank)
        )
        for name, group in groups.items()
    }
