"""Two gloo processes: groups, collectives, gradient all-reduce, and the test harness."""

import os
import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_packed.distributed.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    in_turns,
)
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from support.process_pools import DistributedError, WorkerPools, run_distributed


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))


def describe(groups: ParallelGroups) -> dict:
    ones = torch.full((3,), float(groups.rank + 1))
    result = {
        "sizes": (
            groups.world_size,
            groups.dp.size,
            groups.dp_cp.size,
            groups.expert_dp.size,
            groups.tp.size,
        ),
        "ranks": (
            groups.rank,
            groups.dp.rank,
            groups.dp_cp.rank,
            groups.expert_dp.rank,
            groups.tp.rank,
        ),
        "axes": groups.mesh.mesh_dim_names,
        "sum": all_reduce_sum(ones.clone(), groups.dp.group),
        "max": all_reduce_max(ones.clone(), groups.dp.group),
        "gathered": all_gather_json(["ü"] * groups.rank * 3, groups),
    }
    barrier(groups)
    return result


def test_groups_and_collectives(pools: WorkerPools) -> None:
    for rank, found in enumerate(pools.run(describe, 2)):
        assert found["sizes"] == (2, 2, 2, 2, 1) and found["ranks"] == (rank, rank, rank, rank, 0)
        assert found["axes"] == ("dp",)
        assert found["sum"].tolist() == [3.0] * 3 and found["max"].tolist() == [2.0] * 3
        assert found["gathered"] == [[], ["ü"] * 3]


def take_turns(
    groups: ParallelGroups, first_of_its_machine: int, together: bool = False
) -> tuple[float, float, int]:
    def action() -> tuple[float, float, int]:
        start = time.monotonic()
        if together:
            waiting = (groups.tp.group, groups.cp.group, groups.ep.group)
            dist.barrier(next(group for group in waiting if group is not None))
        else:
            time.sleep(0.1)
        return start, time.monotonic(), groups.rank

    return in_turns(
        replace(groups, local_rank=0 if groups.rank == first_of_its_machine else 1), action
    )


def test_turns_are_rank_0_then_one_per_machine_then_the_rest(pools: WorkerPools) -> None:
    def began_after(later: tuple[float, float, int], sooner: tuple[float, float, int]) -> bool:
        return later[0] >= sooner[1]

    zero, one, two, three = results = pools.run(take_turns, 4, 2)
    assert [rank for _, _, rank in results] == [0, 1, 2, 3]
    assert began_after(two, zero) and began_after(one, two) and began_after(three, two)


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"cp_size": 2}, {"ep_size": 2}], ids=str)
def test_ranks_that_wait_for_each_other_take_a_turn_together(
    layout: dict, pools: WorkerPools
) -> None:
    """Check that ranks that wait for each other in a forward pass run `in_turns` at the same time.

    The first of two replicas runs first. Its two ranks run at the same time, because each needs the
    other for a forward pass. Here each waits for the other, so turns of single ranks would not end.
    """
    first, second = (lambda ranks: (ranks[:2], ranks[2:]))(
        pools.run(take_turns, 4, 3, True, layout=layout, timeout=60)
    )
    assert min(start for start, _, _ in second) >= max(end for _, end, _ in first)


def gradients(groups: ParallelGroups) -> dict:
    """Run one step on this rank's batch; return all values that one all-reduce sums.

    These are gradients, an extra slot, a counter and a flag.
    """
    module = model()
    buffers = FlatBuffers(module, extras={"loss": 1, "bad": 2}, counters={"experts": 3})
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (
        calls.append(args[0].numel()) or original(*args, **kwargs)
    )
    buffers.zero_grad()
    for rank in (groups.dp.rank,) if groups.world_size == 2 else (0, 1):
        loss = module(batch(rank)).square().sum()
        loss.backward()
        buffers.extras["loss"].add_(loss.detach())
        buffers.extras["bad"][rank] = rank + 1
        buffers.counters["experts"].add_(torch.tensor([2**24 + 1, 0, rank + 2**30]))
    buffers.all_reduce(groups)
    dist.all_reduce = original
    return {
        "grads": {name: p.main_grad.clone() for name, p in buffers.parameters.items()},
        "loss": buffers.extras["loss"].clone(),
        "bad": buffers.extras["bad"].tolist(),
        "experts": buffers.counters["experts"].value().tolist(),
        "all_reduces": calls,
        "elements": buffers.storage.numel(),
    }


def test_two_processes_get_the_gradients_of_one_on_all_batches(pools: WorkerPools) -> None:
    alone = gradients(ParallelGroups.single())
    whole = model()
    whole(torch.cat([batch(0), batch(1)])).square().sum().backward()
    first, second = pools.run(gradients, 2)
    assert alone["all_reduces"] == [] and first["all_reduces"] == [first["elements"]]
    for name, p in whole.named_parameters():
        assert torch.equal(first["grads"][name], second["grads"][name])
        assert torch.equal(first["grads"][name], alone["grads"][name])
        torch.testing.assert_close(first["grads"][name], p.grad, rtol=1e-5, atol=1e-6)
    for found in (alone, first, second):
        assert torch.equal(found["loss"], alone["loss"])
        assert found["bad"] == [1.0, 2.0]
        assert found["experts"] == [2**25 + 2, 0, 2**31 + 1]


def misbehave(groups: ParallelGroups, how: str) -> None:
    if groups.rank == 1:
        if how == "raise":
            raise KeyError("the cause")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "first_line", "timeout"),
    [
        ("raise", "rank 1 failed:", 30),
        ("die", "exit code 7", 30),
        ("hang", r"rank [01] did not finish in time and was killed. Its stacks:", 3),
    ],
)
def test_the_harness_reports_the_cause_and_never_hangs(
    how: str, first_line: str, timeout: float
) -> None:
    start = time.monotonic()
    with pytest.raises(DistributedError, match=first_line) as raised:
        run_distributed(misbehave, 2, how, timeout=timeout)
    assert time.monotonic() - start < 15
    if how == "raise":
        assert "KeyError: 'the cause'" in str(raised.value).split("\n\n")[0]
    if how == "hang":
        assert "misbehave" in str(raised.value)


def leave(groups: ParallelGroups) -> tuple[bool, bool]:
    if groups.rank == 1:
        return groups.shutdown(timeout_seconds=5), dist.is_initialized()
    time.sleep(1.0)  # The other rank has left by now.
    start = time.monotonic()
    groups.shutdown(timeout_seconds=5)
    return time.monotonic() - start < 11, dist.is_initialized()


def test_shutdown_after_a_peer_has_gone() -> None:
    assert run_distributed(leave, 2) == [(True, False), (True, False)]


def test_results_of_every_dtype_come_back(pools: WorkerPools) -> None:
    for rank, found in enumerate(pools.run(results, 2)):
        assert found[0].dtype == torch.bfloat16 and found[0].tolist() == [float(rank)] * 2
        assert (
            found[1]["empty"].shape == (0, 3)
            and found[1]["scalar"] == rank
            and found[1]["scalar"].shape == ()
        )
        assert type(found[2]) is Named and found[2].tensors[0].tolist() == [1, 2]


class Named(NamedTuple):
    tensors: tuple[torch.Tensor, ...]


def results(groups: ParallelGroups) -> tuple:
    return (
        torch.full((2,), groups.rank, dtype=torch.bfloat16),
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(groups.rank)},
        Named((torch.tensor([1, 2]),)),
    )


def remember(groups: ParallelGroups) -> tuple[int, int, float]:
    return os.getpid(), id(groups), torch.rand(()).item()


def fail_together(groups: ParallelGroups) -> None:
    raise KeyError(groups.rank)


def test_a_pool_keeps_processes_and_groups_until_a_call_fails() -> None:
    with WorkerPools() as pools:
        first, again = pools.run(remember, 2), pools.run(remember, 2)
        assert first == again and first[0][0] != first[1][0] != os.getpid()
        sharded = pools.run(remember, 2, layout={"tp_size": 2})
        assert [pid for pid, _, _ in sharded] == [pid for pid, _, _ in first] and sharded != first
        assert (
            pools.run(remember, 2, layout={"tp_size": 2}) == sharded
            and pools.run(remember, 2) == first
        )
        with pytest.raises(DistributedError, match="KeyError"):
            pools.run(fail_together, 2)
        assert pools.run(remember, 2)[0][0] != first[0][0]
    for pid, _, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_ends_after_many_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.process_pools._LAYOUTS_OF_A_POOL", 2)
    with WorkerPools() as pools:
        first, last = (
            pools.run(remember, 2, layout={axis: 2})[0][0] for axis in ("tp_size", "cp_size")
        )
        assert first == last == pools.run(remember, 2, layout={"tp_size": 2})[0][0]
        assert pools.run(remember, 2)[0][0] != first
