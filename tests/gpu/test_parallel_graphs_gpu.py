"""Graphs with collectives on several GPUs: replayed steps equal eager steps bitwise, without
waits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_graphs import (
    audit_graphs,
)
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    EPOCHS,
    STEPS,
    captured,
    config_of,
    options_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import EVERY_LAYOUT, VOCAB, model_of, sizes_of
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def compare(groups: ParallelGroups, name: str, impl: str) -> dict[str, Any]:
    configure_determinism()
    parallel = ParallelConfig(**options_of(name, impl))
    config = dataclasses.replace(config_of(model_of(name)), parallel=parallel)
    eager = build_job(config, groups, VOCAB)
    # A bound that cannot overflow, because these steps are not repeated.
    model = dataclasses.replace(config.model, moe_expert_rank_capacity_factor=8.0)
    config = with_graphs(dataclasses.replace(config, model=model), impl)
    job = build_job(config, groups, VOCAB)
    alignment = config.parallel.document_alignment
    # Detached: a reference to a parameter's autograd node, which belongs to another stream, would
    # prevent the capture of whole steps.
    first_weight = job.model.embedding.weight.detach().clone()
    with captured(config, groups, job) as (_, graphs):
        equal = []
        for micro_batches in EPOCHS * steps_of(groups, alignment, overflow=True):
            metrics = [one.step(micro_batches, 1e-3).clone() for one in (eager, job)]
            equal.append(torch.equal(*metrics))
        for one in (eager, job):
            one.buffers.wait_params()
        weights = [dict(one.model.named_parameters()) for one in (eager, job)]
        different = [
            name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])
        ]
        steady = steps_of(groups, alignment, overflow=False)
        audited = audit_graphs(graphs, job.step, steady[0][0], deterministic=True, seed=1)
        found = waiting(job.step, steady[:10])
        return found | {
            "steps": equal,
            "weights": different,
            "moved": not torch.equal(weights[1]["embedding.weight"], first_weight),
            "fallbacks": graphs.counters.fallbacks.total(),
            "module_fallbacks": dict(graphs.counters.module_fallbacks),
            "replays": graphs.counters.replays,
            "audited": audited,
            "graph_mib": graphs.counters.memory_mib,
        }


@pytest.mark.shows("Precision", "bf16")
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    of=lambda name, processes, impl: (processes, model_of(name), options_of(name, impl)),
)
@pytest.mark.parametrize("impl", ["local", "full_iteration", "transformer_engine"])
@pytest.mark.parametrize("name, processes", EVERY_LAYOUT)
def test_replayed_steps_are_the_eager_ones_and_wait_for_nothing(
    name: str, processes: int, impl: str, nccl_pools: WorkerPools
) -> None:
    sizes = sizes_of(options_of(name, impl))
    for rank, found in enumerate(
        nccl_pools.run(compare, processes, name, impl, layout=sizes, timeout=300)
    ):
        print(
            f"{name}, {impl}, rank {rank}: graphs hold {found['graph_mib']:.0f} MiB, {found['launches']} launches"
        )
        assert all(found["steps"]) and not found["weights"] and found["moved"], found
        assert found["fallbacks"] == EPOCHS and len(found["steps"]) == EPOCHS * STEPS, found
        assert found["replays"] > 0 and not found["module_fallbacks"], found
        assert found["audited"].endswith("(largest difference 0.0e+00)"), found
        assert found["launches"] > 0 and found["nccl"] > 0, found
        assert_no_wait(found)
