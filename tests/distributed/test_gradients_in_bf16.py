"""Tests of gradients in bf16 over ranks: sums with one rounding, in every layout and with overlap."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.low_precision_sums import start_rounded_once
from megatron_packed.training.build_graphs import released
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.replica_checks import ReplicaCheck, ReplicaMismatchError
from megatron_packed.training.train_step import StepChecks
from support import layouts, parallel_graphs
from support.process_pools import WorkerPools
from support.whole_state import everything, same_bits

BF16 = torch.bfloat16


def drawn(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(BF16)


def summed(groups: ParallelGroups, numel: int, own_share: bool) -> list[int]:
    flat = drawn(groups.rank, numel)
    started = start_rounded_once(flat, groups.world_group, own_share=own_share)
    assert started is not None
    started.work.wait()
    started.work.wait()  # a second call changes nothing
    found: list[int] = flat.view(torch.int16).tolist()
    return found


@pytest.mark.parametrize(
    ("ranks", "numel", "own_share"),
    [
        *product((2, 4), (64,), (False, True)),
        *product((3,), (63,), (False, True)),
        (3, 64, False),  # the shares of a sum that stays divided have equal sizes
    ],
)
def test_a_sum_is_rounded_once_in_the_order_of_ranks(
    pools: WorkerPools, ranks: int, numel: int, own_share: bool
) -> None:
    total = torch.zeros(numel)
    for rank in range(ranks):
        total += drawn(rank, numel).float()
    wanted = total.to(BF16).view(torch.int16).tolist()
    share = numel // ranks
    for rank, found in enumerate(pools.run(summed, ranks, numel, own_share)):
        place = slice(rank * share, (rank + 1) * share) if own_share else slice(None)
        assert found[place] == wanted[place]


class Case(NamedTuple):
    """Layout and options of a run."""

    way: layouts.Way
    overlap: bool = False
    options: tuple[tuple[str, Any], ...] = (("grad_reduce_in_bf16", True),)


def run_config(case: Case) -> RunConfig:
    config = layouts.config_of(case.way, bf16=True)
    parallel = dataclasses.replace(
        config.parallel,
        overlap_grad_reduce=case.overlap,
        ddp_bucket_size=3000,
        **dict(case.options),
    )
    return dataclasses.replace(config, parallel=parallel)


def trained(groups: ParallelGroups, case: Case) -> dict[str, Any]:
    """Train, and return losses, weights, and what a check says about a wrong sum of gradients."""
    job = build_job(run_config(case), groups, layouts.VOCAB)
    check = ReplicaCheck(job.model, job.optimizer, groups)
    losses = []
    for step in range(2):
        checks = StepChecks(weights=check.weights, gradients=check.gradients)
        batches = layouts.mine(groups, case.way, step, 2 * groups.dp.size)
        metrics = job.step(batches, 1e-2, checks=checks)
        losses.append(layouts.step_values(metrics.tolist()).loss)
    low = {name for name, each in job.buffers.parameters.items() if each.main_grad.dtype == BF16}
    job.buffers.wait_params()
    weights = {name: each.detach().float().numpy() for name, each in job.model.named_parameters()}
    return {"losses": losses, "low": low, "weights": weights, "wrong": wrong_sum(job, groups)}


def wrong_sum(job: Job, groups: ParallelGroups) -> str:
    """Return what the check of gradients says about a sum that a link has changed."""
    check = ReplicaCheck(job.model, job.optimizer, groups)
    low = [each for each in job.buffers.layout.buckets if each.part.low]
    bucket = (low or job.buffers.layout.buckets)[0]

    def reduce() -> None:
        job.buffers.reduce(groups)
        if groups.rank == 0:
            job.buffers.gradients(*job.buffers.owned_span(bucket))[0] += 64

    job.buffers.zero_grad()
    try:
        check.gradients(reduce)
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("experts", [1, 2])
def test_layouts_with_and_without_overlap_have_the_same_bits(
    pools: WorkerPools, experts: int
) -> None:
    ways = [layouts.Way(2, ep_size=experts, distributed_optimizer=zero) for zero in (False, True)]
    cases = [Case(way, overlap) for way in ways for overlap in (False, True)]
    plain, overlapped, *sharded = (
        pools.run(trained, 2, case, layout=case.way.layout) for case in cases
    )
    exact = pools.run(trained, 2, Case(ways[1], options=()), layout=ways[1].layout)
    assert not exact[0]["low"]
    for found in (plain, overlapped, *sharded):
        for rank, of_rank in enumerate(found):
            assert {"embedding.weight", "layers.0.mixer.in_proj.weight"} < of_rank["low"]
            assert "layers.3.mixer.experts.fc1" in of_rank["low"]
            assert "layers.3.mixer.router.weight" not in of_rank["low"]
            assert "sums of gradients have wrong bits" in of_rank["wrong"]
            assert of_rank["losses"] == plain[rank]["losses"]
            for name, weight in of_rank["weights"].items():
                assert (weight == plain[rank]["weights"][name]).all(), name
    for low, full in zip(plain[0]["losses"], exact[0]["losses"], strict=True):
        assert low == pytest.approx(full, rel=5e-3)


@pytest.mark.parametrize("name", ["main_grads_dtype", "rounded at each addition", "pattern"])
def test_options_choose_the_sums(pools: WorkerPools, name: str) -> None:
    options = {
        "main_grads_dtype": (("main_grads_dtype", "bf16"),),
        "rounded at each addition": (
            ("grad_reduce_in_bf16", True),
            ("ddp_reduce_scatter_with_fp32_accumulation", False),
        ),
        "pattern": (
            ("grad_reduce_in_bf16", True),
            ("ddp_param_name_patterns_for_fp32_local_accumulation", ("embedding.*",)),
        ),
    }[name]
    for found in pools.run(trained, 2, Case(layouts.Way(2), options=options)):
        assert ("embedding.weight" in found["low"]) == (name != "pattern")
        assert "layers.2.mixer.fc1.weight" in found["low"] and found["losses"][1] > 0


def test_ranks_agree_on_a_sum_of_three(pools: WorkerPools) -> None:
    """Three ranks divide no bucket evenly, so plain data parallelism pads the exchange."""
    found = pools.run(trained, 3, Case(layouts.Way(3)))
    for of_rank in found[1:]:
        for name, weight in of_rank["weights"].items():
            assert (weight == found[0]["weights"][name]).all(), name


def low_config(way: layouts.Way, **options: Any) -> RunConfig:
    config = layouts.config_of(way, bf16=True, **options)
    parallel = dataclasses.replace(config.parallel, grad_reduce_in_bf16=True)
    return dataclasses.replace(config, parallel=parallel)


def replayed(groups: ParallelGroups, way: layouts.Way, impl: str) -> list[bool]:
    """Return whether steps by replay have the metrics and the state of eager steps, bit for bit."""
    config = low_config(way)
    overlaps = dataclasses.replace(config.parallel, overlap_grad_reduce=True, ddp_bucket_size=3000)
    eager = build_job(dataclasses.replace(config, parallel=overlaps), groups, layouts.VOCAB)
    with mock.patch.object(parallel_graphs, "config_of", low_config):
        job, graphs, backend = parallel_graphs.graphed(way, groups, {}, impl, overlap=True)
    equal = []
    with released(graphs):
        for number in range(2):
            packs = parallel_graphs.LENGTHS[: 2 * groups.dp.size]
            batches = parallel_graphs.step_of(way, groups, number, packs)
            backend.scramble()
            found, wanted = (one.step(batches, 1e-2).clone() for one in (job, eager))
            equal.append(torch.equal(found, wanted))
        assert graphs.counters.replays and not graphs.counters.fallbacks
    assert job.buffers.low_grads.any()
    states = zip(everything(job), everything(eager), strict=True)
    return [*equal, all(same_bits(one[3], other[3]) for one, other in states)]


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize(
    "way", [layouts.Way(2), layouts.Way(2, ep_size=2, distributed_optimizer=True)], ids=str
)
def test_replayed_steps_are_the_eager_ones(pools: WorkerPools, way: layouts.Way, impl: str) -> None:
    for found in pools.run(replayed, 2, way, impl, layout=way.layout):
        assert found == [True, True, True]
