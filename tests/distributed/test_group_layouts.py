"""Process groups of real processes in layouts of four ranks: members, sharing, meshes, timeouts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_packed.config.parallel_layout import GROUP_AXES, ParallelLayout
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.init_process_groups import WATCHDOG_AFTER
from support.process_pools import WorkerPools, run_distributed

LAYOUTS = [
    {},
    {"tp_size": 2},
    {"tp_size": 4},
    {"cp_size": 4, "ep_size": 2},
    {"tp_size": 2, "cp_size": 2, "ep_size": 4, "expert_tp_size": 1},
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "ep_size": 2, "expert_tp_size": 1},
]


def describe(groups: ParallelGroups) -> dict:
    """Return for each axis the members, size and rank, and the axes that share a group.

    The members are read from the group, and also found by a sum over the group.
    """
    found, made = {}, {}
    for axis in GROUP_AXES:
        group = getattr(groups, axis).group
        total = torch.tensor([10**groups.rank], device=groups.device)
        if group is not None:
            dist.all_reduce(total, group=group)
            made[axis] = id(group)
        found[axis] = (
            tuple(dist.get_process_group_ranks(group)) if group is not None else (groups.rank,),
            tuple(
                rank
                for rank in range(groups.world_size)
                if str(int(total))[::-1][rank : rank + 1] == "1"
            ),
            getattr(groups, axis).size,
            getattr(groups, axis).rank,
        )
    meshes = {}
    for mesh in (groups.mesh, groups.expert_mesh):
        for name in mesh.mesh_dim_names:
            meshes[name] = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
            assert mesh.get_group(name) is getattr(groups, name).group
            assert mesh.get_local_rank(name) == getattr(groups, name).rank
        assert mesh.mesh.flatten().tolist() == list(range(groups.world_size))
    timeouts = {
        group._get_backend(groups.device).options._timeout
        for axis in GROUP_AXES
        if (group := getattr(groups, axis).group) is not None
    }
    return {
        "axes": found,
        "made": made,
        "world": dist.get_process_group_ranks(groups.world_group),
        "is_world": {axis: identity == id(groups.world_group) for axis, identity in made.items()},
        "meshes": meshes,
        "timeouts": timeouts,
    }


@pytest.mark.parametrize(
    "sizes", LAYOUTS, ids=lambda sizes: "-".join(f"{k[:-5]}{v}" for k, v in sizes.items()) or "dp"
)
def test_groups_of_four_ranks(pools: WorkerPools, sizes: dict[str, int]) -> None:
    check(
        ParallelLayout(world_size=4, **sizes),
        pools.run(describe, 4, layout=sizes),
        timedelta(minutes=1),
    )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2, "ep_size": 2}], ids=str)
def test_groups_of_two_gpus(sizes: dict[str, int]) -> None:
    found = run_distributed(describe, 2, backend="nccl", layout=sizes, timeout=120)
    # NCCL's watchdog acts a while after the timeout, so that the report comes first.
    check(ParallelLayout(world_size=2, **sizes), found, timedelta(minutes=2) + WATCHDOG_AFTER)


def check(layout: ParallelLayout, ranks: list[dict], timeout: timedelta) -> None:
    for rank, found in enumerate(ranks):
        assert found["world"] == list(range(layout.world_size))
        for axis in GROUP_AXES:
            members = layout.ranks(axis, rank)
            assert found["axes"][axis] == (members, members, len(members), members.index(rank)), (
                rank,
                axis,
            )
            if axis in found["meshes"]:
                assert found["meshes"][axis] == members
        large = {
            axis
            for axis in ("dp", "cp", "tp", "expert_dp", "ep", "expert_tp")
            if layout.size(axis) > 1
        }
        assert set(found["meshes"]) == large
        # The timeout is the requested one, not torch's default (30 minutes for gloo, 10 for NCCL).
        assert found["timeouts"] == {timeout}


def test_equal_groups_are_one_but_gradients_never_wait_for_tokens(pools: WorkerPools) -> None:
    found = pools.run(describe, 4, layout={"tp_size": 2, "ep_size": 4, "expert_tp_size": 1})[0]
    made, is_world = found["made"], found["is_world"]
    assert (
        made["dp"] == made["dp_cp"]
        and made["tp"] == made["tp_cp"]
        and made["ep"] == made["expert_tp_ep"]
    )
    assert "cp" not in made and "expert_tp" not in made and "expert_dp" not in made
    # Experts are distributed over all ranks, in a separate group.
    assert not any(is_world.values())
    spread = pools.run(describe, 4, layout={"ep_size": 4})[0]
    assert spread["is_world"] == {"dp": True, "dp_cp": True, "ep": False, "expert_tp_ep": False}
    folded = pools.run(describe, 4, layout={"cp_size": 2, "ep_size": 2})[0]["made"]
    assert folded["cp"] == folded["ep"] and folded["dp"] == folded["expert_dp"]


def refused(groups: ParallelGroups) -> str:
    from support.process_pools import _Backend

    with pytest.raises(ValueError) as raised:
        ParallelGroups.create(
            _Backend(distributed_backend="gloo", distributed_timeout_minutes=1),
            "cpu",
            layout=ParallelLayout(world_size=8),
        )
    return str(raised.value)


def test_a_layout_of_another_world_is_refused(pools: WorkerPools) -> None:
    message = "the parallel layout needs 8 processes, but WORLD_SIZE is 2; start one process per rank of the layout."
    assert pools.run(refused, 2) == [message] * 2
