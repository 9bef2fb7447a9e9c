"""Steps with an expert capacity in CUDA graphs: equal to eager steps, drops counted, no host
wait.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    CAPTURE_SIZES,
    DEVICE,
    PACKS,
    config_of,
    different,
    state_of,
    steps_of,
)
from support.gpu_layouts import MODEL, VOCAB
from support.host_waits import waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_replayed_steps_drop_and_count_what_eager_steps_do(impl: str) -> None:
    configure_determinism()
    groups = ParallelGroups.single(DEVICE)
    config = config_of(dataclasses.replace(MODEL, moe_expert_capacity_factor=0.1))
    eager, job = (build_job(config, groups, VOCAB) for _ in range(2))
    config = dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    steps = steps_of(groups, 1, overflow=True)[:6]
    try:
        with released(graphs):
            capture_graphs(graphs, job.step, PACKS, groups, first=True)
            job.step.graphs = graphs
            for micro_batches in steps:
                for one in (eager, job):
                    one.step(micro_batches, 1e-3)
                assert torch.equal(eager.step.numbers, job.step.numbers)
                assert different(state_of(job), state_of(eager)) == []
                tokens = sum(one.num_real_tokens for one in micro_batches)
                counts = job.step.layout.counts_of(job.step.numbers.tolist())
                assert sum(counts["expert_counts"]) == 2 * tokens
                assert all(0 < dropped < 2 * tokens for dropped in counts["dropped_assignments"])
            assert graphs.counters.replays >= 5 * PACKS
            found = waiting(job.step, steps_of(groups, 1, overflow=False)[:6])
            assert found["finite"] and found["waits"] == [] and found["pageable"] == [], found
    finally:
        torch.use_deterministic_algorithms(False)
