"""CUDA graphs that hold collectives, on several GPUs: replayed steps are the eager ones, bitwise,
without a wait.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

# Read by the libraries at import or first use, in processes that inherit them.
os.environ |= {
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    "TRITON_CACHE_AUTOTUNING": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_GRAPH_REGISTER": "0",
}

import numpy as np
import pytest
import torch
from test_layouts_no_host_sync import EVERY_LAYOUT, LAYOUTS, LAYOUTS_OF_FOUR, MODEL
from test_no_host_sync import VOCAB, T

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import WorkerPools
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import (
    audit_graphs,
    build_graphs,
    capture_graphs,
    released,
)
from megatron_packed.training.build_job import build_job
from support.host_waits import waiting

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

CAPTURE_SIZES = CaptureSizes.of([8, 32], T)
STEPS, PACKS, EPOCHS = 25, 4, 4
OVERFLOWS = 3
"""The step in which a pack of the first data-parallel rank has more documents than the capture
sizes holds.
"""


@pytest.fixture(scope="module")
def pools() -> Iterator[WorkerPools]:
    with WorkerPools(backend="nccl", collective_timeout=300) as started:
        yield started


def steps_of(groups: ParallelGroups, alignment: int, *, overflow: bool) -> list[list[MicroBatch]]:
    """This rank's pinned packs; micro-batch i has the same capture size on all ranks, or room
    beyond the capture sizes.
    """
    random, steps = np.random.default_rng(0), []
    for number in range(STEPS):
        packs = []
        for _ in range(PACKS):
            lengths = random.integers(1, T // 32, size=random.integers(1, 30))
            packs.append([(random.integers(0, VOCAB, length), None) for length in lengths])
        if overflow and number == OVERFLOWS:
            packs[0] = [(random.integers(0, VOCAB, 20), None) for _ in range(40)]
        scales = (1 / sum(len(tokens) - 1 for pack in packs for tokens, _ in pack), 1 / PACKS)
        mine = []
        for first in range(0, PACKS, groups.dp_size):
            together = packs[first : first + groups.dp_size]
            most = max(map(len, together))
            capture_size = CAPTURE_SIZES.smallest_for(most, T)
            room = (
                (most, None)
                if capture_size is None
                else (capture_size.capacity, capture_size.max_seqlen)
            )
            mine.append(
                MicroBatch.build(
                    together[groups.dp_rank], T, room[0], scales, room[1], alignment
                ).pin_memory()
            )
        steps.append(mine)
    return steps


def compare(groups: ParallelGroups, options: dict[str, Any], impl: str) -> dict[str, Any]:
    configure_determinism()
    config = RunConfig(
        model=MODEL,
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=T, global_batch_size=PACKS),
        optim=OptimizerConfig(lr=1e-3),
        parallel=ParallelConfig(**options),
        training=TrainingConfig(
            train_iters=STEPS,
            bf16=True,
            device="cuda",
            deterministic_mode=True,
            loss_spike_policy="skip",
            loss_spike_window=4,
        ),
    )
    eager = build_job(config, groups, VOCAB)
    config = dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    job = build_job(config, groups, VOCAB)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    assert graphs is not None
    alignment = config.parallel.document_alignment
    # Detached: whoever keeps a parameter's node of autograd alive, of another stream, keeps whole
    # steps from capture.
    first_weight = job.model.embedding.weight.detach().clone()
    with released(graphs):
        capture_graphs(graphs, job.step, PACKS, groups, first=True)
        job.step.graphs = graphs
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


def options_of(name: str, impl: str) -> dict[str, Any]:
    """Of a layout; the last graph of whole steps has all parameters back."""
    late = {"overlap_param_gather"} if impl == "full_iteration" else set()
    return {
        option: value
        for option, value in (LAYOUTS | LAYOUTS_OF_FOUR)[name].items()
        if option not in late
    }


@pytest.mark.shows("Precision", "bf16")
@pytest.mark.shows(
    lambda impl: f"graphs: {impl}",
    of=lambda name, processes, impl: (processes, MODEL, options_of(name, impl)),
)
@pytest.mark.parametrize("impl", ["local", "full_iteration", "transformer_engine"])
@pytest.mark.parametrize("name, processes", EVERY_LAYOUT)
def test_replayed_steps_are_the_eager_ones_and_wait_for_nothing(
    name: str, processes: int, impl: str, pools: WorkerPools
) -> None:
    options = options_of(name, impl)
    sizes = {
        axis: size
        for axis, size in ParallelConfig(**options).layout_sizes.items()
        if size is not None
    }
    for rank, found in enumerate(
        pools.run(compare, processes, options, impl, layout=sizes, timeout=300)
    ):
        print(
            f"{name}, {impl}, rank {rank}: graphs hold {found['graph_mib']:.0f} MiB, {found['launches']} launches"
        )
        assert all(found["steps"]) and not found["weights"] and found["moved"], found
        assert found["fallbacks"] == EPOCHS and len(found["steps"]) == EPOCHS * STEPS, found
        assert found["replays"] > 0 and not found["module_fallbacks"], found
        assert found["audited"].endswith("(largest difference 0.0e+00)"), found
        assert found["finite"] and found["launches"] > 0 and found["nccl"] > 0, found
        assert found["waits"] == [] and found["pageable"] == [], found
