"""Checks of replicas on one and two GPUs detect flipped bits with graphs and overlap.

The checks change no number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.replica_checks import ReplicaCheck, ReplicaMismatchError
from megatron_packed.training.train_step import StepChecks
from support.gpu_graph_steps import (
    CAPTURE_SIZES,
    DEVICE,
    PACKS,
    config_of,
    different,
    options_of,
    state_of,
    steps_of,
)
from support.gpu_layouts import VOCAB
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu

FLIPS = [
    ("embedding.weight", 0, 0),
    ("embedding.weight", -1, 14),
    ("layers.0.mixer.A_log", 1, 30),
    ("layers.1.norm.weight", 3, 6),
    ("layers.3.mixer.experts.fc1", 70_000, 15),
    ("layers.3.mixer.experts.fc1", -5, 1),
]
"""Bits to flip, each given by parameter, element and number of the bit."""


def turn(job: Job, name: str, element: int, bit: int) -> None:
    """Flip a bit of a weight; a second call restores it."""
    weight = job.buffers.parameters[name].data.view(-1)
    word = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)
    word[element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(word.dtype)


def checked(groups: ParallelGroups, options: dict[str, Any], impl: str) -> dict[str, Any]:
    """Run steps with and without checks, and collect reports about a flip on the last rank."""
    configure_determinism()
    config = dataclasses.replace(config_of(), parallel=ParallelConfig(**options))
    if impl != "none":
        config = dataclasses.replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl=impl))
    job, plain = (build_job(config, groups, VOCAB) for _ in range(2))
    check = ReplicaCheck(job.model, job.optimizer, groups)
    every, weights = StepChecks(check.weights, check.gradients), StepChecks(weights=check.weights)
    graphs = build_graphs(config, job, CAPTURE_SIZES, groups, print)
    steps = steps_of(groups, config.parallel.document_alignment, overflow=False)
    with released(graphs):
        if graphs is not None:
            capture_graphs(graphs, job.step, PACKS, groups, first=True)
            job.step.graphs = graphs
        equal = []
        for number, packs in enumerate(steps[:6]):
            checks = {"checks": (every, weights)[number % 2]} if number % 3 else {}
            metrics = [job.step(packs, 1e-3, **checks).clone(), plain.step(packs, 1e-3)]
            equal.append(torch.equal(*metrics))
        for one in (job, plain):
            one.buffers.wait_params()
        changed, said = different(state_of(job), state_of(plain)), []
        for flip in FLIPS:
            for turned in (groups.rank == groups.world_size - 1, False):
                turn(job, *flip) if turned else None
                try:
                    job.step(steps[7], 1e-3, checks=weights)
                    said.append("")
                except ReplicaMismatchError as error:
                    said.append(str(error))
                job.buffers.wait_params()
                turn(job, *flip) if turned else None
        replays = 0 if graphs is None else graphs.counters.replays
    torch.use_deterministic_algorithms(False)
    return {"equal": equal, "changed": changed, "said": said, "replays": replays}


def assert_found(found: dict[str, Any], impl: str, *, alone: bool = False) -> None:
    assert all(found["equal"]) and not found["changed"], found
    assert (found["replays"] > 0) == (impl != "none")
    for (name, _, _), sentence, sound in zip(FLIPS, found["said"][::2], found["said"][1::2]):
        # One process has no master weight or copy to compare a float32 weight with.
        missed = alone and name.endswith("A_log")
        assert (name in sentence) != missed and sound == "", (name, sentence, sound)


@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
def test_one_gpu_compares_weights_with_their_masters(impl: str) -> None:
    assert_found(checked(ParallelGroups.single(DEVICE), {}, impl), impl, alone=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
@pytest.mark.parametrize("name", ["dp2 overlap", "dp2 zero overlap", "ep2 zero overlap"])
def test_two_gpus_find_flips_and_change_no_number(
    name: str, impl: str, nccl_pools: WorkerPools
) -> None:
    options = options_of(name, impl)
    sizes = {"ep_size": 2} if "ep2" in name else {}
    for found in nccl_pools.run(checked, 2, options, impl, layout=sizes, timeout=150):
        assert_found(found, impl)
