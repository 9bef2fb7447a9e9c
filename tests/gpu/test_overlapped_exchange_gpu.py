"""Heads that are exchanged in parts, in captured steps: the bits of eager steps, and no host wait.

A part has fewer heads than the whole, and the kernels of mamba-ssm choose other tiles for it. So
losses of steps in parts are close to those of steps without parts, and not equal.

On one GPU the context-parallel group has one rank, which sends its heads to itself through NCCL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_packed.config.sections.collectives import NCCL, SYMMETRIC_MEMORY
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.training.build_job import Job, build_job
from support.gpu_graph_steps import (
    DEVICE,
    captured,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import MODEL, VOCAB
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

PARTS = 4
STEPS = 4
LARGEST_DIFFERENCE = 1e-3
"""Largest relative difference of a loss in parts from that without parts, in bf16."""
LAYERS = dataclasses.replace(
    MODEL,
    hybrid_layer_pattern="M*-",
    num_attention_heads=8,
    num_query_groups=4,
    mamba_num_heads=16,
    mamba_num_groups=4,
    num_experts=None,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
    moe_latent_size=None,
    moe_shared_expert_intermediate_size=None,
    moe_shared_expert_gate=False,
    moe_router_enable_expert_bias=False,
)
"""Attention's heads travel in 4 parts over one rank, all heads in 2 parts over two ranks."""
HEADS = {"cp_size": 2, "cp_comm_type": "a2a", "mamba_cp_comm_type": "heads"}


def parts_of(job: Job) -> list[int]:
    """Return the parts of each layer; a Mamba layer exchanges heads over several ranks alone."""
    mixers = [layer.mixer for layer in job.model.layers]
    exchanging = [getattr(one, "core_attn", getattr(one, "over_ranks", None)) for one in mixers]
    return [getattr(one, "parts", 0) for one in exchanging]


def compare(groups: ParallelGroups, impl: str, backend: str = NCCL) -> dict[str, Any]:
    """Compare replayed steps in parts with eager ones, and these with steps without parts.

    Heads of replayed steps travel by ``backend``, those of eager steps by NCCL.
    """
    configure_determinism()
    layout: dict[str, Any] = {
        "context_parallel_size": groups.cp.size,
        "mamba_cp_comm_type": "heads",
    }
    whole = build_job(config_of(LAYERS, **layout), groups, VOCAB)
    config = config_of(LAYERS, cp_comm_overlap_parts=PARTS, **layout)
    eager = build_job(config, groups, VOCAB)
    parallel = dataclasses.replace(config.parallel, all_to_all_backend=backend)
    config = with_graphs(dataclasses.replace(config, parallel=parallel), impl)
    steps = steps_of(groups, 1, overflow=False)[:STEPS]
    equal, apart = [], []
    with captured(config, groups) as (job, graphs):
        exchange = job.model.cp.exchange
        assert groups.cp.size == 1 or (exchange.memory is not None) == (backend != NCCL)
        for micro_batches in steps:
            plain, wanted, found = (
                one.step(micro_batches, 1e-3).clone() for one in (whole, eager, job)
            )
            equal.append(torch.equal(found, wanted))
            apart.append(abs(float(wanted[0] / plain[0]) - 1))  # the first metric is the loss
        changed = different(state_of(job), state_of(eager))  # before more steps of one job
        return waiting(job.step, steps[:2]) | {
            "parts": [parts_of(one) for one in (whole, eager, job)],
            "equal": equal,
            "apart": apart,
            "different": changed,
            "replays": graphs.counters.replays,
            "fallbacks": graphs.counters.fallbacks.total(),
            "module_fallbacks": dict(graphs.counters.module_fallbacks),
        }


def check(found: dict[str, Any], parts: list[int]) -> None:
    print(found)
    assert found["parts"][0] == [min(part, 1) for part in parts] and found["parts"][1] == parts
    assert found["equal"] == [True] * STEPS and found["different"] == [], found
    assert max(found["apart"]) < LARGEST_DIFFERENCE, found
    assert found["replays"] > 0 and not found["fallbacks"] and not found["module_fallbacks"], found
    assert found["launches"] > 0, found
    assert_no_wait(found)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParallelGroups]:
    """Yield groups of one process, whose models exchange heads in a group of this process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(ContextParallel, "from_groups", staticmethod(of_this_process))
    yield ParallelGroups.single(DEVICE)
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def of_this_process(
    groups: ParallelGroups, *, cp_comm_overlap_parts: int, **communication: Any
) -> ContextParallel:
    return ContextParallel(group=dist.group.WORLD, overlap_parts=cp_comm_overlap_parts)


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (1, LAYERS))
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_replays_in_parts_are_the_eager_steps_on_one_gpu(impl: str, alone: ParallelGroups) -> None:
    check(compare(alone, impl), [0, 4, 0])


@pytest.mark.multi_gpu
@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (2, HEADS, LAYERS))
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_replays_in_parts_are_the_eager_steps(impl: str, nccl_pools: WorkerPools) -> None:
    for found in nccl_pools.run(compare, 2, impl, layout={"cp_size": 2}, timeout=400):
        check(found, [2, 2, 0])


@pytest.mark.multi_gpu
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}", "copied all-to-alls", of=lambda: (2, HEADS, LAYERS)
)
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_heads_that_travel_through_symmetric_memory_change_no_bit(
    impl: str, nccl_pools: WorkerPools
) -> None:
    arguments = (impl, SYMMETRIC_MEMORY)
    for found in nccl_pools.run(compare, 2, *arguments, layout={"cp_size": 2}, timeout=400):
        check(found, [2, 2, 0])
