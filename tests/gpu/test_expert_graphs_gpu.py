"""Whole E layers in graphs on two GPUs: bounds that follow the routing, overflows, no waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import WorkerPools
from megatron_packed.layers.moe.expert_room import Load
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from megatron_packed.training.expert_bounds import ExpertBounds
from megatron_packed.training.metrics_layout import StepValues
from support.gpu_graph_steps import (
    CAPTURE_SIZES,
    EPOCHS,
    PACKS,
    STEPS,
    config_of,
    different,
    state_of,
    steps_of,
)
from support.gpu_layouts import MODEL, VOCAB
from support.host_waits import waiting

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

TOO_SMALL = Load(0.5, 0.5)
SHRUNK_AT = 10
"""Step before which the bounds are made too small, so that the step overflows."""


def compare(groups: ParallelGroups, dispatcher: str, impl: str) -> dict[str, Any]:
    """Compare replayed steps with eager steps without bounds; one step overflows on the way."""
    configure_determinism()
    model = dataclasses.replace(MODEL, moe_token_dispatcher_type=dispatcher)
    config = config_of(model, expert_model_parallel_size=2, use_distributed_optimizer=True)
    eager = build_job(config, groups, VOCAB)
    config = dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    job = build_job(config, groups, VOCAB)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    bounds = ExpertBounds(job.step, groups, packs_per_step=PACKS, say=print)
    steps, equal, repeats = EPOCHS * steps_of(groups, 1, overflow=False), [], []
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
            if StepValues.from_list(found.tolist(), MODEL.mtp_depths).held:
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
        }


@pytest.mark.shows(
    lambda impl: f"graphs: {impl}", lambda dispatcher: f"EP {dispatcher}", "ZeRO-1", "DP"
)
@pytest.mark.shows("no host sync", lambda dispatcher: f"EP {dispatcher}")
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_replays_and_repeated_steps_are_the_eager_ones(
    dispatcher: str, impl: str, nccl_pools: WorkerPools
) -> None:
    for found in nccl_pools.run(compare, 2, dispatcher, impl, layout={"ep_size": 2}, timeout=400):
        print(dispatcher, impl, found["repeats"], found["bounds"], found["replays"])
        assert len(found["equal"]) == EPOCHS * STEPS and all(found["equal"]), found["equal"]
        assert not found["changed"] and SHRUNK_AT in found["repeats"], found
        # Only repeated steps run eagerly, with two micro-batches of each rank.
        assert found["fallbacks"] == found["after"] == 2 * len(found["repeats"]), found
        assert found["replays"] > 0 and not found["module_fallbacks"], found
        assert found["finite"] and found["launches"] > 0 and found["nccl"] > 0, found
        assert found["waits"] == [] and found["pageable"] == [], found
