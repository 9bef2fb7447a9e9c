"""Whole E layers in graphs on one and two GPUs: replays equal eager steps bit for bit, without waits.

Bounds of the experts' buffers follow the routing, and steps that overflow are repeated eagerly.

On one GPU the expert-parallel group has one rank, which sends rows to itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_packed.config.sections.collectives import NCCL, SYMMETRIC_MEMORY
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.layers.moe.expert_room import Load
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from megatron_packed.training.expert_bounds import ExpertBounds
from support.gpu_graph_steps import (
    CAPTURE_SIZES,
    DEVICE,
    EPOCHS,
    PACKS,
    STEPS,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import MODEL, VOCAB, with_depths
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

TOO_SMALL = Load(0.1, 0.1)
SHRUNK_AT = 10
"""Step before which the bounds are made too small, so that the step overflows."""


def compare(
    groups: ParallelGroups,
    dispatcher: str,
    impl: str,
    epochs: int = EPOCHS,
    backend: str = NCCL,
    options: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Compare replayed steps with eager steps without bounds; one step overflows on the way.

    Rows of replayed steps travel by ``backend``, those of eager steps by NCCL.

    Args:
        options: further options of the model of both.
    """
    configure_determinism()
    model = MODEL if groups.ep.size > 1 else with_depths(MODEL)
    model = dataclasses.replace(model, moe_token_dispatcher_type=dispatcher, **options)
    layout = {"expert_model_parallel_size": groups.ep.size, "use_distributed_optimizer": True}
    eager = build_job(config_of(model, **layout), groups, VOCAB)
    # With two ranks, this is the default of captured experts.
    bounded = dataclasses.replace(model, moe_expert_rank_capacity_factor="auto")
    config = with_graphs(config_of(bounded, **layout, all_to_all_backend=backend), impl)
    job = build_job(config, groups, VOCAB)
    assert groups.ep.size == 1 or (job.model.ep.exchange.memory is not None) == (backend != NCCL)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    bounds = ExpertBounds(job.step, groups, packs_per_step=PACKS, say=print)
    steps, equal, repeats = epochs * steps_of(groups, 1, overflow=False), [], []
    with released(graphs):
        bounds.observe(steps[0])
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        job.step.graphs = graphs
        for number, micro_batches in enumerate(steps):
            if number == SHRUNK_AT:
                bounds.room.bounds = TOO_SMALL
                bounds.make_room()
                capture_graphs(graphs, job.step, PACKS, groups)
            wanted = eager.step(micro_batches, 1e-3).clone()
            found = job.step(micro_batches, 1e-3).clone()
            if StepValues.from_list(found.tolist(), model.mtp_depths).held:
                repeats.append(number)
                bounds.make_room()
                found = job.step.redo(micro_batches, 1e-3).clone()
                bounds.raise_for(job.step.layout.counts_of(job.step.numbers.tolist()))
            equal.append(torch.equal(found, wanted))
        eager.buffers.wait_params()
        job.buffers.wait_params()
        changed = different(state_of(job), state_of(eager))
        fallbacks = graphs.counters.fallbacks.total()
        return waiting(job.step, steps[:10]) | {
            "equal": equal,
            "repeats": repeats,
            "changed": changed,
            "fallbacks": fallbacks,
            "after": graphs.counters.fallbacks.total(),
            "module_fallbacks": dict(graphs.counters.module_fallbacks),
            "replays": graphs.counters.replays,
            "bounds": bounds.room.bounds,
            "packs": len(steps[0]),
        }


def check(found: dict[str, Any], epochs: int = EPOCHS) -> None:
    print(found["repeats"], found["bounds"], found["replays"])
    assert len(found["equal"]) == epochs * STEPS and all(found["equal"]), found["equal"]
    assert not found["changed"] and SHRUNK_AT in found["repeats"], found
    # Only repeated steps run eagerly, with all micro-batches of each rank.
    assert found["fallbacks"] == found["after"] == found["packs"] * len(found["repeats"]), found
    assert found["replays"] > 0 and not found["module_fallbacks"], found
    assert found["launches"] > 0, found
    assert_no_wait(found)


@pytest.fixture
def alone() -> Iterator[ParallelGroups]:
    """Yield groups of one process with an expert-parallel group of this process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dataclasses.replace(ParallelGroups.single(DEVICE), ep=Axis(dist.group.WORLD))
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (1, with_depths(MODEL)))
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_replays_and_repeated_steps_are_the_eager_ones_on_one_gpu(
    dispatcher: str, impl: str, alone: ParallelGroups
) -> None:
    # One process replays all packs of a step: 100 packs in an epoch.
    check(compare(alone, dispatcher, impl, epochs=1), epochs=1)


@pytest.mark.multi_gpu
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    lambda dispatcher: f"EP {dispatcher}",
    "ZeRO-1",
    of=lambda: (2, MODEL),
)
@pytest.mark.shows(
    "no host sync", lambda dispatcher: f"EP {dispatcher}", "ZeRO-1", of=lambda: (2, MODEL)
)
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_replays_and_repeated_steps_are_the_eager_ones(
    dispatcher: str, impl: str, nccl_pools: WorkerPools
) -> None:
    for found in nccl_pools.run(compare, 2, dispatcher, impl, layout={"ep_size": 2}, timeout=400):
        check(found)
        assert found["nccl"] > 0, found


@pytest.mark.multi_gpu
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    "copied all-to-alls",
    "EP alltoall",
    "ZeRO-1",
    of=lambda: (2, MODEL),
)
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_rows_that_travel_through_symmetric_memory_change_no_bit(
    impl: str, nccl_pools: WorkerPools
) -> None:
    arguments = ("alltoall", impl, 1, SYMMETRIC_MEMORY)
    for found in nccl_pools.run(compare, 2, *arguments, layout={"ep_size": 2}, timeout=400):
        check(found, 1)


PARTS: dict[str, dict[str, Any]] = {
    dispatch: {"moe_dispatch": dispatch, "moe_comm_overlap_parts": 2}
    for dispatch in ("rows", "tokens")
}


@pytest.mark.multi_gpu
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    lambda backend: "EP alltoall" if backend == NCCL else "copied all-to-alls",
    "ZeRO-1",
    of=lambda dispatch, ranks: (ranks, dataclasses.replace(MODEL, **PARTS[dispatch])),
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.multi_gpu(4))])
@pytest.mark.parametrize("backend", [NCCL, SYMMETRIC_MEMORY])
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("dispatch", PARTS)
def test_replays_are_the_eager_steps_where_rows_travel_in_parts(
    dispatch: str, impl: str, backend: str, ranks: int, nccl_pools: WorkerPools
) -> None:
    arguments = ("alltoall", impl, 1, backend, PARTS[dispatch])
    for found in nccl_pools.run(compare, ranks, *arguments, layout={"ep_size": ranks}, timeout=400):
        check(found, 1)
