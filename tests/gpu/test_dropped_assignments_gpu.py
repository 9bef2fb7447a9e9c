"""Steps with an expert capacity in CUDA graphs: equal to eager steps, drops counted, no host
wait.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    DEVICE,
    PACKS,
    captured,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import MODEL, VOCAB
from support.host_waits import assert_no_wait, waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_replayed_steps_drop_and_count_what_eager_steps_do(impl: str) -> None:
    configure_determinism()
    groups = ParallelGroups.single(DEVICE)
    config = config_of(dataclasses.replace(MODEL, moe_expert_capacity_factor=0.1))
    eager = build_job(config, groups, VOCAB)
    steps = steps_of(groups, 1, overflow=True)[:6]
    try:
        with captured(with_graphs(config, impl), groups) as (job, graphs):
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
            assert_no_wait(waiting(job.step, steps_of(groups, 1, overflow=False)[:6]))
    finally:
        torch.use_deterministic_algorithms(False)
